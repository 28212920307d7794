"""Features of items, and a cache of them on disk that is valid only while nothing has changed."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from aniso.compose import Coefficients, Composition, batch_runner
from aniso.data import Batches, Labelled, Split, by_length, content_hash
from aniso.errors import AnisoError
from aniso.learn.unwrap import encoder_of, require_items
from aniso.models import Encoder
from aniso.progress import ProgressCallback, progress_or_default
from aniso.vectors import Bank
from aniso.weights import SafetensorsFile, save_safetensors
from aniso.weights.caches import cache_directory
from aniso.weights.files import RawFile
from aniso.weights.fingerprint import combined_hash, tensor_hash

_VERSION = "2"
_LIMIT = 2 << 30  # bytes on disk
_BY_LENGTH = 64  # texts of similar length at once: a tenth of the tokens is padding, at 256 it is a third


def feature_identity(model: nn.Module) -> dict[str, str]:
    """Return hashes of everything a model's features depend on, beside the items.

    These are its weights; for a composition its base, bank and coefficients.
    """
    encoder = encoder_of(model)
    if isinstance(model, Composition):
        return composed_identity(encoder.fingerprint, model.bank, model.coefficients)
    out = {"model": encoder.fingerprint}
    if not isinstance(model, Encoder):
        state = {name: tensor_hash(tensor.detach().cpu()) for name, tensor in model.state_dict().items()}
        out["weights"] = combined_hash(state)
    return out


def composed_identity(base: str, bank: Bank, coefficients: Coefficients) -> dict[str, str]:
    """Return ``feature_identity`` of a composition from its base's fingerprint, without the model."""
    return {
        "model": base,
        "bank": bank.content_hash,
        "partition": str(coefficients.partition.as_dict()),
        "coefficients": coefficients.content_hash,
        "linearised": str(coefficients.linearised),
    }


@dataclass(frozen=True)
class FeatureCache:
    """Files named by a hash of everything features depend on, items included.

    Without a directory nothing is cached.
    """

    directory: Path | None
    limit: int = _LIMIT
    """Bytes; beyond it the files that were not used for longest are removed."""

    @classmethod
    def default(cls) -> FeatureCache:
        """Return the cache in the user's cache directory."""
        return cls(cache_directory("features"))

    def get(self, key: str) -> Tensor | None:
        """Return the features under a key, or None; a damaged file counts as none."""
        if self.directory is None:
            return None
        path = self._path(key)
        try:
            file = SafetensorsFile(RawFile(path))
            found = file.read("features")
            if file.metadata.get("hash") != tensor_hash(found):
                return None
        except (AnisoError, OSError, ValueError):
            return None
        with contextlib.suppress(OSError):  # a cache that cannot be written to can be read from
            os.utime(path)
        return found

    def put(self, key: str, features: Tensor) -> None:
        """Store features, if the directory can be written to; they can always be computed again."""
        if self.directory is None:
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            meta = {"hash": tensor_hash(features)}
            save_safetensors(self._path(key), {"features": features}, meta, overwrite=True)
            self._make_room()
        except (AnisoError, OSError):
            return

    def _path(self, key: str) -> Path:
        assert self.directory is not None
        return self.directory / f"{_VERSION}-{key}.safetensors"

    def _make_room(self) -> None:
        assert self.directory is not None
        files = [(path.stat(), path) for path in self.directory.glob("*.safetensors")]
        used = sum(stat.st_size for stat, _ in files)
        for stat, path in sorted(files, key=lambda one: one[0].st_mtime):
            if used <= self.limit:
                return
            path.unlink(missing_ok=True)
            used -= stat.st_size


@final
@dataclass(frozen=True)
class ViewRequest:
    """Which transform of the items, how often, and the seed it is drawn by."""

    view: str = "eval"
    views: int = 1
    seed: int = 0


@final
class ItemFeatures:
    """Features of labelled items in memory, by item: splits with common items share them.

    The folds of a cross-validation and all heads on one model need the features of the same shots.
    ``seconds`` counts the time of computing, and ``charged`` the time that would have been needed if nothing
    had been shared.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.charged = 0.0
        self._rows: dict[tuple[str, ViewRequest], dict[tuple[str, str], Tensor]] = {}
        self._cost: dict[tuple[str, ViewRequest], float] = {}

    def features(
        self,
        model: nn.Module,
        split: Labelled,
        request: ViewRequest,
        *,
        batch_size: int = 256,
        workers: int = 0,
        progress: ProgressCallback | None = None,
    ) -> Tensor:
        """Return features as ``aniso.features`` does; those of new items are computed."""
        key = (combined_hash(feature_identity(model)), request)
        rows = self._rows.setdefault(key, {})
        names = [(split.role, name) for name in split.ids]
        missing = [i for i, name in enumerate(names) if name not in rows]
        if missing:
            begun = time.monotonic()
            new = features(
                model,
                split if len(missing) == len(split) else split.take(missing),
                view=request.view,
                views=request.views,
                seed=request.seed,
                batch_size=batch_size,
                workers=workers,
                progress=progress,
            )
            rows.update({names[i]: new[:, place] for place, i in enumerate(missing)})
            spent = time.monotonic() - begun
            self.seconds += spent
            self._cost[key] = spent / len(missing)
        self.charged += self._cost[key] * len(split)
        return torch.stack([rows[name] for name in names], dim=1)

    def keep_only(self, model: nn.Module) -> None:
        """Forget the features of all other models."""
        own = combined_hash(feature_identity(model))
        self._rows = {key: rows for key, rows in self._rows.items() if key[0] == own}


@torch.no_grad()
def features(
    model: nn.Module,
    split: Split,
    *,
    view: str = "eval",
    views: int = 1,
    seed: int = 0,
    batch_size: int = 256,
    workers: int = 0,
    cache: FeatureCache | ItemFeatures | None = None,
    progress: ProgressCallback | None = None,
) -> Tensor:
    """Return features as a tensor views x items x width, not normalised.

    Random transforms depend on (seed, view, item) alone.
    """
    if isinstance(cache, ItemFeatures):
        if isinstance(split, Labelled):
            how = ViewRequest(view, views, seed)
            return cache.features(
                model, split, how, batch_size=batch_size, workers=workers, progress=progress
            )
        cache = None
    if cache is None or (isinstance(model, Composition) and model.sharding is not None):
        cache = FeatureCache(None)  # processes that share a model compute together, all of them or none
    key = "" if cache.directory is None else feature_key(model, split, view, views, seed)
    found = cache.get(key) if key else None
    if found is not None:
        return found
    progress = progress_or_default(progress)
    total = views * len(split)
    rows: list[Tensor] = []
    for number in range(views):
        for piece in iterate_features(
            model, split, view, seed=seed, number=number, batch_size=batch_size, workers=workers
        ):
            rows.append(piece.float().cpu())
            progress(f"features of {split.name}", sum(map(len, rows)), total)
    computed = torch.cat(rows).view(views, len(split), -1)
    cache.put(key, computed)
    return computed


def iterate_features(
    model: nn.Module,
    split: Split,
    view: str = "eval",
    *,
    seed: int = 0,
    number: int = 0,
    batch_size: int = 256,
    workers: int = 0,
) -> Iterator[Tensor]:
    """Yield the features of one view of every item, in order, a batch at a time.

    Texts are computed in order of their length, so that little is padding, and yielded in the split's order.
    """
    encoder = encoder_of(model)
    require_items(encoder, split)
    device = next(iter(encoder.parameters())).device
    before = model.training
    model.eval()
    try:
        transform = getattr(encoder.transforms, view)
        order = by_length(split, transform)
        size = batch_size if order is None else min(batch_size, _BY_LENGTH)
        batches = Batches(split, transform, size=size, seed=seed, epoch=number, workers=workers, order=order)
        run = batch_runner(model)
        pieces = (run(batch.inputs.to(device)) for batch in batches)
        yield from pieces if order is None else _in_order(pieces, order, batch_size)
    finally:
        model.train(before)


def _in_order(pieces: Iterator[Tensor], order: list[int], size: int) -> Iterator[Tensor]:
    """Yield features that were computed in another order in that of the split."""
    computed = torch.cat(list(pieces))
    place = torch.empty(len(order), dtype=torch.long)
    place[order] = torch.arange(len(order))
    yield from torch.split(computed[place.to(computed.device)], size)


def feature_key(model: nn.Module, split: Split, view: str = "eval", views: int = 1, seed: int = 0) -> str:
    """Return a hash of everything that features depend on: weights, transforms and the items' content."""
    encoder = encoder_of(model)
    transforms = json.dumps(encoder.transforms.identity(), sort_keys=True)
    drawn = f"{view} {views} {seed}" if view != "eval" else f"eval {views}"
    own = {"pictures": content_hash(split), "transforms": transforms, "view": drawn, "version": _VERSION}
    return combined_hash({**feature_identity(model), "config": encoder.config_words, **own})
