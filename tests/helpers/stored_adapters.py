"""Adapters in fsspec's memory file system, whose requests can be made to fail, and in directories."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import tiny
import torch
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from safetensors.torch import save

from aniso.classes import ClassList
from aniso.data import Labelled
from aniso.data.images import ArrayImages
from aniso.learn import CrossEntropy
from aniso.models.encoder import Encoder, Family
from aniso.models.transforms import Pixels

CLASSES = ("red", "green", "blue")
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "fc1"]}


def encoder() -> Encoder:
    head = torch.randn(len(CLASSES), tiny.EMBED, generator=torch.Generator().manual_seed(7))
    family = Family(
        lambda m, x: m.visual_projection(m.vision_model(x).pooler_output),
        own_head=lambda _: (head, None),
        own_classes=CLASSES,
    )
    return Encoder("small", tiny.hf_clip(), family, Pixels(16))


def loss(seed: int = 3) -> CrossEntropy:
    drawn = np.random.default_rng(seed).integers(0, 256, (3, 16, 16, 3)).astype(np.uint8)
    return CrossEntropy(Labelled("made", ClassList(CLASSES), ArrayImages(drawn, "made"), (0, 1, 2)), "eval")


def tensors(seed: int, width: int = tiny.WIDTH, rank: int = 2) -> dict[str, torch.Tensor]:
    """A LoRA of queries and of the first layer of perceptrons."""
    g = torch.Generator().manual_seed(seed)
    out = {}
    for layer in range(tiny.LAYERS):
        for name, rows in (("self_attn.q_proj", width), ("mlp.fc1", 4 * width)):
            key = f"base_model.model.vision_model.encoder.layers.{layer}.{name}"
            out[f"{key}.lora_A.weight"] = torch.randn(rank, width, generator=g) * 0.1
            out[f"{key}.lora_B.weight"] = torch.randn(rows, rank, generator=g) * 0.1
    return out


def adapter(seed: int, weights: bytes | None = None, **config: Any) -> dict[str, bytes]:
    """The files of an adapter, as PEFT writes them."""
    text = json.dumps({**CONFIG, **config}).encode()
    return {
        "adapter_config.json": text,
        "adapter_model.safetensors": save(tensors(seed)) if weights is None else weights,
    }


def put(address: str, files: dict[str, bytes]) -> None:
    """Store files below an address, or a directory."""
    for name, data in files.items():
        if "://" in address:
            fsspec.filesystem(address.partition("://")[0]).pipe_file(f"{address}/{name}", data)
        else:
            Path(address).mkdir(parents=True, exist_ok=True)
            (Path(address) / name).write_bytes(data)


class Marked:
    """Pickled, a call that leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def unusable(mark: Path) -> dict[str, tuple[dict[str, bytes], str]]:
    """Adapters that cannot be used, with the code of the reason."""
    nan = tensors(1)
    next(iter(nan.values()))[0, 0] = float("nan")
    whole = save(tensors(2))
    bomb = struct.pack("<Q", 1 << 62) + b"{" + b" " * 100
    nested = b"[" * 5000
    entry = json.dumps({"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 9]}}).encode()
    overlapping = struct.pack("<Q", len(entry)) + entry + b"0" * 16
    return {
        "pickle": (adapter(0, pickle.dumps(Marked(mark))), "FILE-FORMAT"),
        "bomb": (adapter(0, bomb), "ST-HEADER"),
        "nested": (adapter(0, struct.pack("<Q", 5001) + b"{" + nested), "ST-HEADER"),
        "overlapping": (adapter(0, overlapping), "ST-OFFSETS"),
        "cut": (adapter(0, whole[:-40]), "FILE-TRUNCATED"),
        "longer": (adapter(0, whole + b"more"), "ST-TRAILING"),
        "empty": (adapter(0, b""), "FILE-EMPTY"),
        "page": (adapter(0, b"<!doctype html><html>log in first</html>"), "FILE-PAGE"),
        "pointer": (adapter(0, b"version https://git-lfs.github.com/spec/v1\n"), "FILE-POINTER"),
        "nan": (adapter(0, save(nan)), "WEIGHT-NONFINITE"),
        "wide": (adapter(0, save(tensors(0, 2 * tiny.WIDTH))), "CKPT-SHAPE"),
        "rank": (adapter(0, save(tensors(0, rank=3))), "LORA-RANK"),
        "other": (adapter(0, save({"layers.0.lora_A.weight": torch.ones(2, 4),
                                   "layers.0.lora_B.weight": torch.ones(4, 2)})), "LORA-KEYS"),
        "kind": (adapter(0, peft_type="LOHA"), "LORA-KIND"),
        "text": ({**adapter(0), "adapter_config.json": b"{"}, "DIR-CONFIG"),
        "bin": ({"adapter_config.json": json.dumps(CONFIG).encode(), "adapter_model.bin": b"x"}, "DIR-EMPTY"),
        "alone": ({"adapter_model.safetensors": whole}, "LORA-CONFIG"),
    }  # fmt: skip


class Faulty(MemoryFileSystem):
    """Memory whose requests are counted, and fail as ``faults`` says, a function of path and start."""

    reads: ClassVar[list[tuple[str, int, int]]] = []
    faults: ClassVar[Callable[[str, int], bytes | Exception | None]] = staticmethod(lambda path, start: None)
    store: ClassVar[dict[str, MemoryFile]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        stream = super().open(path, mode, **options)
        return Request(self, path, stream) if mode == "rb" else stream


class Request:
    def __init__(self, system: Faulty, path: str, stream: Any) -> None:
        self.system, self.path, self.stream = system, path, stream

    def __enter__(self) -> Request:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()

    def seek(self, offset: int) -> None:
        self.stream.seek(offset)

    def read(self, size: int) -> bytes:
        start = self.stream.tell()
        self.system.reads.append((self.path.rpartition("/")[0], start, start + size))
        fault = type(self.system).faults(self.path, start)
        if isinstance(fault, Exception):
            raise fault
        return self.stream.read(size) if fault is None else fault


@contextmanager
def faulty_memory() -> Iterator[type[Faulty]]:
    """Let ``memory://`` be a file system that is empty and may fail."""
    Faulty.store.clear()
    Faulty.pseudo_dirs[:] = [""]
    Faulty.reads.clear()
    Faulty.faults = staticmethod(lambda path, start: None)
    fsspec.register_implementation("memory", Faulty, clobber=True)
    Faulty.clear_instance_cache()
    try:
        yield Faulty
    finally:
        fsspec.register_implementation("memory", MemoryFileSystem, clobber=True)
