"""Checkpoints written by ``torch.save``."""

from __future__ import annotations

import argparse
import io
import pickle
import pickletools
import random
import struct
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from . import mutations as change
from .containers import zip_entries, zipped
from .targets import Case, Target


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.register_buffer("mask", torch.ones(2, 2), persistent=False)


def _values() -> list[Any]:
    """What checkpoints hold: state dicts bare and wrapped, views, whole modules."""
    torch.manual_seed(0)
    model = _Small()
    whole = torch.arange(24.0).reshape(4, 6)
    state = model.state_dict()
    return [
        {
            "a.weight": whole,
            "a.view": whole.T[1:, ::2],
            "b": torch.zeros(0, 3),
            "c": torch.ones((), dtype=torch.half),
        },
        {"state_dict": state, "optimizer": {"state": {0: {"m": whole}}}, "args": argparse.Namespace(lr=0.1)},
        {"model": {f"module.{k}": v for k, v in state.items()}, "epoch": 3, "tags": {"x"}, "path": Path("x")},
        model,
    ]


def _saved(value: Any, protocol: int) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, pickle_protocol=protocol)
    return out.getvalue()


def _read_weights(folder: Path) -> None:
    """Everything that ``aniso inspect --hash`` and ``convert --tensors-only`` do with a file."""
    from aniso.errors import AnisoError
    from aniso.vectors.summary import summarise_source
    from aniso.weights import open_weights

    path = folder / "model.pt"
    refusal = None
    try:
        open_weights(path)
    except AnisoError as e:
        refusal = e
    source = open_weights(path, tensors_only=True)
    survey = summarise_source(source, hashes=True, allow_nonfinite=True)
    survey.to_json()
    _ = source.aliases
    assert (refusal is not None) == bool(survey.calls), (refusal, survey.calls)
    if refusal is not None:
        raise refusal


class ZipPickles(Target):
    """The form since torch 1.6: an archive of a pickle and the storages."""

    name: ClassVar[str] = "pickles-zip"

    def prepare(self, place: Path) -> None:
        self._files = [_saved(value, protocol) for value in _values() for protocol in (2, 4)]
        self._entries = [zip_entries(data) for data in self._files]

    def case(self, rng: random.Random) -> Case:
        which = rng.randrange(len(self._files))
        if rng.random() < 0.15:
            return Case({"model.pt": change.any_bytes(rng, self._files[which])})
        entries = dict(self._entries[which])
        name = next(name for name in entries if name.endswith("data.pkl"))
        other = next(data for n, data in rng.choice(self._entries).items() if n.endswith("data.pkl"))
        entries[name] = change.pickle_edited(rng, entries[name], other)
        if rng.random() < 0.1:
            odd = rng.choice(list(entries))
            entries[odd] = change.any_bytes(rng, entries[odd])
        if rng.random() < 0.05:
            entries[rng.choice(["archive/../x", "/x", "x\\y", "archive/data.pkl2", "é"])] = b"x"
        return Case({"model.pt": zipped(entries)})

    def read(self, folder: Path) -> None:
        _read_weights(folder)


class LegacyPickles(Target):
    """The form before torch 1.6, and plain pickles."""

    name: ClassVar[str] = "pickles-legacy"

    def prepare(self, place: Path) -> None:
        self._files = [_legacy(_saved(value, 2)) for value in _values()]
        plain: list[Any] = [{"w": [1, 2.5, "x"]}, {"a": (None, {1: b"x"})}, argparse.Namespace(a=1)]
        self._plain = [pickle.dumps(value, protocol) for value in plain for protocol in range(6)]

    def case(self, rng: random.Random) -> Case:
        if rng.random() < 0.3:
            data = change.pickle_edited(rng, rng.choice(self._plain), rng.choice(self._plain))
            return Case({"model.pt": data})
        data = rng.choice(self._files)
        if rng.random() < 0.2:
            return Case({"model.pt": change.any_bytes(rng, data)})
        parts = _pickles(data)
        which = rng.choice([0, 1, 2, 3, 3, 3, 3, 4])
        parts[which] = change.pickle_edited(rng, parts[which], _pickles(rng.choice(self._files))[3])
        return Case({"model.pt": b"".join(parts)})

    def read(self, folder: Path) -> None:
        _read_weights(folder)


def _pickles(data: bytes) -> list[bytes]:
    """The five pickles of a legacy file, and the storages behind them."""
    parts = []
    for _ in range(5):
        size = 1 + [at for _, _, at in pickletools.genops(io.BytesIO(data)) if at is not None][-1]
        parts.append(data[:size])
        data = data[size:]
    return [*parts, data]


def _legacy(data: bytes) -> bytes:
    """The legacy form of a zip file; torch itself would name storages by their addresses in memory."""
    from aniso.weights.pickle import LEGACY_MAGIC, Machine

    entries = zip_entries(data)
    root = next(content for name, content in entries.items() if name.endswith("data.pkl"))
    machine = Machine()
    machine.run(io.BytesIO(root))
    system = {
        "protocol_version": 1001,
        "little_endian": True,
        "type_sizes": {"short": 2, "int": 4, "long": 4},
    }
    parts = [pickle.dumps(value, 2) for value in (LEGACY_MAGIC, 1001, system)]
    parts += [root, pickle.dumps(list(machine.storages), 2)]
    for key, storage in machine.storages.items():
        content = next(content for name, content in entries.items() if name.endswith(f"/data/{key}"))
        parts += [struct.pack("<q", storage.numel), content]
    return b"".join(parts)
