"""Weights as blocks, read in float32 and in one orientation, whatever the names in the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from aniso.errors import InputError, UsageError, printable
from aniso.vectors._files.segment_format import FORMAT
from aniso.vectors.block import Block, Kind, Layout
from aniso.vectors.naming import PLAIN
from aniso.vectors.provenance import BaseInfo
from aniso.weights import PeftAdapter, Ref, SafetensorsFile, WeightSource, open_weights
from aniso.weights.fingerprint import combined_hash, tensor_hash

ACTIVATIONS = ("quick_gelu", "gelu")


class BlockSource:
    """A model's weights as blocks. Norms and hashes of blocks that were read are cached, values are not."""

    def __init__(
        self,
        source: WeightSource,
        *,
        scheme: str = "auto",
        split: bool = False,
        finite: bool = True,
        activation: str | None = None,
    ) -> None:
        """``finite`` raises for NaN and infinity; ``activation`` is needed if the files do not name it."""
        require_model(source)
        self.source = source
        self.label = source.label
        self.activation = agreed_activation(source, activation)
        self.layout = Layout.of(source, scheme=scheme, split=split)
        self._whole = Layout.of(source, scheme=scheme) if split else self.layout
        self._split = split
        self._finite = finite
        self._norms: dict[str, float] = {}
        self._hashes: dict[str, str] = {}
        self._last = ("", torch.empty(0))

    @classmethod
    def of(cls, ref: Ref | BlockSource, *, scheme: str = "auto") -> BlockSource:
        return ref if isinstance(ref, BlockSource) else cls(open_weights(ref), scheme=scheme)

    def like(self, source: WeightSource) -> BlockSource:
        """Return another model's weights in blocks of the same scheme."""
        scheme = PLAIN if self.layout.scheme == PLAIN else "auto"
        return BlockSource(source, scheme=scheme, split=self._split)

    def read(self, block: Block) -> Tensor:
        """Read a block into a new float32 tensor."""
        out = block.gathered(self.source.read, torch.float32)
        norm = float(torch.linalg.vector_norm(out, dtype=torch.float32))
        if norm != norm or norm == float("inf"):
            norm = self._check_finite(block, out)
        self._norms[block.name] = norm
        return out

    def read_as_base(self, block: Block) -> Tensor:
        """Read a block for comparison; the tensor is cached for the next vector and must not be changed.

        Its hash is cached for the fingerprint.
        """
        name, values = self._last  # read once: another thread may replace it
        if name != block.name:
            del values
            self._last = ("", torch.empty(0))  # free the old one before the new one is read
            values = self.read(block)
            self._last = (block.name, values)
        if block.name not in self._hashes:
            self._hashes[block.name] = tensor_hash(values)
        return values

    def read_outside(self, block: Block) -> Tensor:
        """Read a tensor that is not part of task vectors, in its own dtype."""
        raw = [self.source.read(p.key).T if p.transposed else self.source.read(p.key) for p in block.parts]
        return raw[0] if len(raw) == 1 else torch.cat(raw)

    def identity(self) -> BaseInfo:
        """Return the hash, activation and block norms of the model; reads blocks not read yet."""
        for block in self.layout.blocks:
            if block.name not in self._hashes:
                self.read_as_base(block)
        for block in self._whole.blocks:  # the identity does not depend on how the model is split
            if block.name not in self._hashes:
                self._hashes[block.name] = tensor_hash(self.read(block))
        hashes = {block.name: self._hashes[block.name] for block in self._whole.blocks}
        for block in self.layout.outside:
            if block.kind is Kind.STATISTIC:  # these change the model's outputs, too
                hashes[block.name] = tensor_hash(self.read_outside(block))
        return BaseInfo(
            short_label(self.source),
            combined_hash(hashes),
            self.activation,
            {block.name: self._norms[block.name] for block in self.layout.blocks},
        )

    def dtype_of(self, block: Block) -> str:
        return self.source.tensors[block.parts[0].key].dtype

    def _check_finite(self, block: Block, values: Tensor) -> float:
        """Return the norm of values whose squares overflow float32; raises for NaN and infinity."""
        bad = (~torch.isfinite(values.reshape(-1))).nonzero().reshape(-1)
        if bad.numel() and self._finite:
            raise InputError(
                "WEIGHT-NONFINITE",
                f"'{self.label}' has {bad.numel()} values that are NaN or infinite",
                key=block.parts[0].key,
                first=f"element {int(bad[0])} of block {block.name}",
                fix="find out why training diverged; --allow-nonfinite only to look",
            )
        return float(torch.linalg.vector_norm(values.double()))


def require_model(source: WeightSource) -> None:
    """Raise if a source is an adapter or a task vector, not a model."""
    if isinstance(source, PeftAdapter):
        raise InputError(
            "LORA-KIND",
            f"'{source.label}' is an adapter, not a model",
            fix="give the model it was trained on, or make a vector of it with aniso vector make",
        )
    if isinstance(source, SafetensorsFile) and source.metadata.get("format") == FORMAT:
        raise InputError(
            "VECTOR-FILE",
            f"'{source.label}' is a task vector, not a model",
            fix="give the model that it was made from",
        )


def agreed_activation(source: WeightSource, requested: str | None) -> str | None:
    """Return the activation named by the files or requested by the user; raises if they differ."""
    named = source.info.config.activation
    if requested not in (None, *ACTIVATIONS):
        raise UsageError(
            "CKPT-ACTIVATION",
            f"there is no activation '{printable(requested)}'",
            expected=" or ".join(ACTIVATIONS),
            fix="choose one of the two",
        )
    if requested and named and requested != named:
        raise InputError(
            "CKPT-ACTIVATION",
            f"'{source.label}' has a different activation",
            expected=requested,
            found=named,
            fix="leave --activation out, or use the right files",
        )
    return requested or named


def short_label(source: WeightSource) -> str:
    """Return a short name for records: the hub id, or the last part of the path."""
    if source.info.revision is not None or not source.files:
        return source.label
    return Path(source.label).name


def outside_pairs(base: BlockSource, tuned: BlockSource) -> Iterator[tuple[Block, Block]]:
    """Yield the tensors outside of task vectors that both models have."""
    known = {block.name: block for block in base.layout.outside}
    for block in tuned.layout.outside:
        if block.name in known:
            yield known[block.name], block
