"""Features of pictures, for heads to learn from; kept on disk, found again only if nothing has changed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from aniso.compose import Coefficients, Composition
from aniso.data import Batches, Split, content_hash
from aniso.errors import AnisoError
from aniso.learn.unwrap import encoder_of
from aniso.models import Encoder
from aniso.progress import ProgressCallback, progress_or_default
from aniso.vectors import Bank
from aniso.weights import SafetensorsFile, save_safetensors
from aniso.weights.caches import cache_directory
from aniso.weights.files import RawFile
from aniso.weights.fingerprint import combined_hash, tensor_hash

_VERSION = "2"
_LIMIT = 2 << 30  # bytes on disk


def identity(model: nn.Module) -> dict[str, str]:
    """What a model's features depend on, beside the pictures: its weights, or base, bank and coefficients."""
    encoder = encoder_of(model)
    if isinstance(model, Composition):
        return composed_identity(encoder.fingerprint, model.bank, model.coefficients)
    out = {"model": encoder.fingerprint}
    if not isinstance(model, Encoder):
        state = {name: tensor_hash(tensor.detach().cpu()) for name, tensor in model.state_dict().items()}
        out["weights"] = combined_hash(state)
    return out


def composed_identity(base: str, bank: Bank, coefficients: Coefficients) -> dict[str, str]:
    """The same for a composition of a base with this fingerprint, without the model itself."""
    return {
        "model": base,
        "bank": bank.content_hash,
        "partition": str(coefficients.partition.as_dict()),
        "coefficients": tensor_hash(coefficients.values.detach().cpu()),
        "linearised": str(coefficients.linearised),
    }


@dataclass(frozen=True)
class FeatureCache:
    """Files named by all that features depend on, pictures included. Without a directory nothing is kept."""

    directory: Path | None
    limit: int = _LIMIT
    """Bytes; beyond it those that were not used for longest are removed."""

    @classmethod
    def usual(cls) -> FeatureCache:
        return cls(cache_directory("features"))

    def get(self, key: str) -> Tensor | None:
        """What was kept under a key; a damaged file is as good as none."""
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
        """Keep, if the directory can be written to; features can always be computed again."""
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


@torch.no_grad()
def features(
    model: nn.Module,
    split: Split,
    *,
    view: str = "eval",
    views: int = 1,
    seed: int = 0,
    batch: int = 256,
    workers: int = 0,
    cache: FeatureCache | None = None,
    progress: ProgressCallback | None = None,
) -> Tensor:
    """Views x pictures x width, not normalised; chance in views is drawn by (seed, view, picture)."""
    cache = cache or FeatureCache(None)
    key = "" if cache.directory is None else _key(model, split, view, views, seed)
    found = cache.get(key) if key else None
    if found is not None:
        return found
    progress = progress_or_default(progress)
    total = views * len(split)
    rows: list[Tensor] = []
    for number in range(views):
        for piece in passed(model, split, view, seed=seed, number=number, batch=batch, workers=workers):
            rows.append(piece.float().cpu())
            progress(f"features of {split.name}", sum(map(len, rows)), total)
    made = torch.cat(rows).view(views, len(split), -1)
    cache.put(key, made)
    return made


def passed(
    model: nn.Module,
    split: Split,
    view: str = "eval",
    *,
    seed: int = 0,
    number: int = 0,
    batch: int = 256,
    workers: int = 0,
) -> Iterator[Tensor]:
    """Features of one view of every picture, in order, some at a time."""
    encoder = encoder_of(model)
    device = next(iter(encoder.parameters())).device
    before = model.training
    model.eval()
    try:
        seen = getattr(encoder.transforms, view)
        for pictures in Batches(split, seen, size=batch, seed=seed, epoch=number, workers=workers):
            yield model(pictures.images.to(device))
    finally:
        model.train(before)


def _key(model: nn.Module, split: Split, view: str, views: int, seed: int) -> str:
    encoder = encoder_of(model)
    pixels = asdict(encoder.transforms.pixels)
    drawn = f"{view} {views} {seed}" if view != "eval" else f"eval {views}"
    own = {"pictures": content_hash(split), "pixels": str(pixels), "view": drawn, "version": _VERSION}
    return combined_hash({**identity(model), "config": encoder.config_words, **own})
