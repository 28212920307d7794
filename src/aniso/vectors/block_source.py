"""A source of weights seen as blocks: read in float32, in one orientation, whatever the file calls them."""

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
    """A model's weights as blocks. What was read once is remembered by norm and hash, not by value."""

    def __init__(
        self,
        source: WeightSource,
        *,
        scheme: str = "auto",
        split: bool = False,
        finite: bool = True,
        activation: str | None = None,
    ) -> None:
        """``finite`` refuses NaN and infinity; ``activation`` says what the files do not."""
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
        """Another model's weights, divided into blocks in the same way."""
        scheme = PLAIN if self.layout.scheme == PLAIN else "auto"
        return BlockSource(source, scheme=scheme, split=self._split)

    def read(self, block: Block) -> Tensor:
        """A fresh float32 tensor of the block's shape."""
        out = block.gathered(self.source.read, torch.float32)
        norm = float(torch.linalg.vector_norm(out, dtype=torch.float32))
        if norm != norm or norm == float("inf"):
            norm = self._check_finite(block, out)
        self._norms[block.name] = norm
        return out

    def read_as_base(self, block: Block) -> Tensor:
        """Read for comparing; not to be changed, since the block read last is kept for the next vector.

        The content's hash is remembered for the fingerprint.
        """
        name, values = self._last  # taken once: another thread may put its own block there
        if name != block.name:
            del values
            self._last = ("", torch.empty(0))  # free the old one before the new one is read
            values = self.read(block)
            self._last = (block.name, values)
        if block.name not in self._hashes:
            self._hashes[block.name] = tensor_hash(values)
        return values

    def read_outside(self, block: Block) -> Tensor:
        """A tensor that is no part of task vectors, in its own dtype."""
        raw = [self.source.read(p.key).T if p.transposed else self.source.read(p.key) for p in block.parts]
        return raw[0] if len(raw) == 1 else torch.cat(raw)

    def identity(self) -> BaseInfo:
        """Who this model is; reads what has not been read yet."""
        for block in self.layout.blocks:
            if block.name not in self._hashes:
                self.read_as_base(block)
        for block in self._whole.blocks:  # who a model is does not depend on how it is divided
            if block.name not in self._hashes:
                self._hashes[block.name] = tensor_hash(self.read(block))
        hashes = {block.name: self._hashes[block.name] for block in self._whole.blocks}
        for block in self.layout.outside:
            if block.kind is Kind.STATISTIC:  # these decide what the model computes, too
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
        """The norm of values whose squares overflow, or an error naming what is not a number."""
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
    """Refuse what holds weights but is no model."""
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


def agreed_activation(source: WeightSource, said: str | None) -> str | None:
    """The activation that the files name, or that the user does; the two must not contradict each other."""
    named = source.info.config.activation
    if said not in (None, *ACTIVATIONS):
        raise UsageError(
            "CKPT-ACTIVATION",
            f"there is no activation '{printable(said)}'",
            expected=" or ".join(ACTIVATIONS),
            fix="choose one of the two",
        )
    if said and named and said != named:
        raise InputError(
            "CKPT-ACTIVATION",
            f"'{source.label}' has another activation than asked for",
            expected=said,
            found=named,
            fix="leave --activation out, or use the right files",
        )
    return said or named


def short_label(source: WeightSource) -> str:
    """A name for records: the hub id, or the last part of the path; never a home directory."""
    if source.info.revision is not None or not source.files:
        return source.label
    return Path(source.label).name


def outside_pairs(base: BlockSource, tuned: BlockSource) -> Iterator[tuple[Block, Block]]:
    """Tensors outside of task vectors that both models have."""
    known = {block.name: block for block in base.layout.outside}
    for block in tuned.layout.outside:
        if block.name in known:
            yield known[block.name], block
