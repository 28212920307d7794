"""Files that aniso writes itself: banks, coefficients, heads, records and specifications."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any, ClassVar

import torch

from . import mutations as change
from .containers import packed, unpacked
from .targets import Case, Target

_BASE = {"w": torch.linspace(-1, 1, 70 * 64).reshape(70, 64), "b": torch.linspace(0, 1, 7)}


def _bank(path: Path, storage: str) -> Any:
    """A bank of two dense vectors and a low-rank one."""
    from aniso.vectors import Bank
    from aniso.vectors.delta import LowRank, Term
    from aniso.vectors.provenance import BaseInfo, Provenance
    from aniso.vectors.task_vector import TaskVector

    g = torch.Generator().manual_seed(0)
    tuned = {n: {k: v + 0.3 * torch.randn(v.shape, generator=g) for k, v in _BASE.items()} for n in "xy"}
    view = Bank.build(_BASE, tuned, allow_distant=True)
    info = BaseInfo(view.base.label, view.base.content, view.base.activation, view.base.norms)
    term = Term(torch.full((3, 2), 0.1), torch.full((2, 64), 0.1), 0.5, 5)
    origin = Provenance("lora", "PEFT LoRA")
    low = TaskVector("lora", view.layout, lambda: info, {"w": lambda: LowRank((70, 64), (term,))}, origin)
    Bank({**{name: view[name] for name in view}, "lora": low}).save(path, storage=storage)
    return Bank.load(path)


class Banks(Target):
    """A manifest and a file of vectors whose index says which vector lies where."""

    name: ClassVar[str] = "banks"
    _storages = ("fp32", "int4", "residual2")

    def prepare(self, place: Path) -> None:
        self._seeds = []
        for storage in self._storages:
            _bank(place / storage, storage)
            names = ("manifest.json", "vectors-000.safetensors")
            self._seeds.append({name: (place / storage / name).read_bytes() for name in names})

    def case(self, rng: random.Random) -> Case:
        files = dict(rng.choice(self._seeds))
        how = rng.random()
        if how < 0.35:
            return self._flipped(rng, files)
        if how < 0.7:
            return self._index_edited(rng, files)
        if how < 0.9:
            manifest = change.json_edited(rng, json.loads(files["manifest.json"]))
            if rng.random() < 0.8 and isinstance(manifest, dict):
                manifest = _checked(manifest)
            return Case({**files, "manifest.json": change.json_bytes(rng, manifest)})
        header, body = unpacked(files["vectors-000.safetensors"])
        edited = change.json_bytes(rng, change.json_edited(rng, header))
        return Case({**files, "vectors-000.safetensors": packed(edited, body)})

    def _flipped(self, rng: random.Random, files: dict[str, bytes]) -> Case:
        """Damage to any byte of either file must be noticed."""
        name = rng.choice(["manifest.json", *["vectors-000.safetensors"] * 4])
        how = change.flipped if rng.random() < 0.7 else change.cut
        data = how(rng, files[name])
        same = data == files[name] or (name == "manifest.json" and _same_json(data, files[name]))
        return Case({**files, name: data}, damaged=not same)

    def _index_edited(self, rng: random.Random, files: dict[str, bytes]) -> Case:
        """All checksums are made to fit, so that only the index's own checks stand in the way."""
        header, body = unpacked(files["vectors-000.safetensors"])
        begin, end = header["aniso.index"]["data_offsets"]
        text = change.json_bytes(rng, change.json_edited(rng, json.loads(body[begin:end])))
        header["aniso.index"] = {
            "dtype": "U8",
            "shape": [len(text)],
            "data_offsets": [begin, begin + len(text)],
        }
        hashed = hashlib.sha256(text).hexdigest()
        if "index" in header["__metadata__"]:
            header["__metadata__"]["index"] = hashed
        data = packed(header, body[:begin] + text)
        manifest = json.loads(files["manifest.json"])
        record = manifest["files"][0]
        record.update(nbytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        if "index" in record:
            record["index"] = hashed
        return Case(
            {"manifest.json": json.dumps(_checked(manifest)).encode(), "vectors-000.safetensors": data}
        )

    def read(self, folder: Path) -> None:
        from aniso.vectors import Bank

        bank = Bank.load(folder)
        for block in bank.layout.blocks:
            for delta in bank.read_block(block.name).values():
                delta.dense()
        for name in bank:
            bank[name].apply(_BASE)
        bank.check()


def _same_json(data: bytes, other: bytes) -> bool:
    """Whether two texts are the same but for white space."""
    try:
        return bool(json.loads(data) == json.loads(other))
    except ValueError:
        return False


def _checked(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with a checksum that fits, where it has one."""
    from aniso.vectors._files.manifest import manifest_checksum

    return {**manifest, "checksum": manifest_checksum(manifest)} if "checksum" in manifest else manifest


def _edited_metadata(rng: random.Random, data: bytes) -> bytes:
    """A file with an index in its metadata: the index edited, its checksum left out; or the bytes edited."""
    header, body = unpacked(data)
    how = rng.random()
    if how < 0.2:
        return change.any_bytes(rng, data)
    if how < 0.35:
        return packed(change.json_bytes(rng, change.json_edited(rng, header)), body)
    metadata = header["__metadata__"]
    index = change.json_edited(rng, json.loads(metadata["index"]))
    metadata["index"] = change.json_bytes(rng, index).decode("utf-8", "replace")
    metadata.pop("checksum", None)
    return packed(header, body)


class Coefficients(Target):
    """A table of numbers with an index in its metadata."""

    name: ClassVar[str] = "coefficients"

    def prepare(self, place: Path) -> None:
        from aniso.compose import Coefficients, Partition

        bank = _bank(place / "bank", "fp32")
        self._bank = place / "bank"
        self._files = []
        for partition in (None, Partition.random(2, seed=1) if hasattr(Partition, "random") else None):
            self._files.append(Coefficients.zeros(bank, partition).to_bytes())

    def case(self, rng: random.Random) -> Case:
        return Case({"coefficients": _edited_metadata(rng, rng.choice(self._files))})

    def read(self, folder: Path) -> None:
        from aniso.compose import Coefficients
        from aniso.vectors import Bank

        found = Coefficients.load(folder / "coefficients")
        found.items()
        found.matrix()
        found.for_bank(Bank.load(self._bank), any_bank=True)


class Heads(Target):
    """Classifiers learned on features."""

    name: ClassVar[str] = "heads"

    def prepare(self, place: Path) -> None:
        from aniso.learn.heads import LPP, LinearProbe, TipAdapter
        from aniso.models import ClassWeights

        g = torch.Generator().manual_seed(0)
        base = ClassWeights(("ant", "bee", "cat"), torch.randn(3, 8, generator=g))
        features = torch.randn(12, 8, generator=g)
        labels = torch.arange(12) % 3
        self._files = []
        for i, head in enumerate((LPP(base, steps=2), LinearProbe(base, steps=2), TipAdapter(base))):
            head.fit(features, labels)
            head.save(place / f"head{i}", {"model": "abc"})
            self._files.append((place / f"head{i}").read_bytes())

    def case(self, rng: random.Random) -> Case:
        return Case({"head": _edited_metadata(rng, rng.choice(self._files))})

    def read(self, folder: Path) -> None:
        from aniso.learn.heads import load_head

        load_head(folder / "head").head.logits(torch.zeros(2, 8))


def _matrix() -> Any:
    from aniso.coefficient_matrix import BlockLabel, CoefficientMatrix

    made = CoefficientMatrix.of(["a", "b"], [BlockLabel("x.0.weight", "weight", 0)], [[0.5], [-1.0]])
    assert made is not None
    return json.loads(made.model_dump_json())


class Records(Target):
    """JSON files of runs, which reports are made of."""

    name: ClassVar[str] = "records"

    def prepare(self, place: Path) -> None:
        score = {"correct": 3, "total": 4, "accuracy": 0.75, "right": "7", "interval": [0.2, 0.9]}
        record: dict[str, Any] = {
            "schema": 1, "id": "a" * 40, "experiment": "few-shot", "label": "aTLAS",
            "spec": {"setting": "few-shot", "model": "mini", "method": "coefficients", "bank": "b",
                     "task": "cars", "shots": 4, "seed": 1, "partition": {"rule": "blocks"}},
            "metrics": {"accuracy": {"cars": score}, "zero_shot": {"cars": 0.5}, "kept_epoch": 3,
                        "history": [{"epoch": 0, "loss": 1.0}]},
            "coefficients": {"kind": {"attention weight": [0, 0.1, 0.2, 0.3, 0.4]},
                             "depth": {"1": [0, 0, 0, 0, 1]}, "matrix": _matrix()},
            "inputs": {"model": "h", "bank": "h", "data": {"cars": "h"}}, "versions": {"aniso": "0"},
            "seconds": 1.5, "peak_memory_bytes": 10, "notes": ["x"],
        }  # fmt: skip
        other = {**record, "id": "b" * 40, "label": "zero-shot"}
        other["spec"] = {**record["spec"], "method": "none", "shots": None}
        self._seeds = [record, other]

    def case(self, rng: random.Random) -> Case:
        files = {f"{i}.json": json.dumps(seed).encode() for i, seed in enumerate(self._seeds)}
        which = rng.randrange(2)
        files[f"{which}.json"] = change.json_bytes(rng, change.json_edited(rng, self._seeds[which]))
        return Case(files)

    def read(self, folder: Path) -> None:
        from aniso.record_files import read_records
        from aniso.report import experiments, mixed

        records = read_records([folder])
        experiments(records)
        mixed(records)


_SPEC = b"""schema: 1
name: few-shot
base:
  setting: few-shot
  model: mini
  bank: mini
  task: cars
  shots: 4
  seed: 1
grid:
  shots: [1, 2, 4]
  seed: [1, 2]
variants:
  - label: aTLAS
    base: {method: coefficients}
  - label: zero-shot
    base:
      method: none
    grid:
      seed: [1]
"""


class Specs(Target):
    """Experiments as YAML."""

    name: ClassVar[str] = "specs"

    def prepare(self, place: Path) -> None:
        home = Path(__file__).parents[2] / "experiments"
        self._seeds = [_SPEC, *(path.read_bytes() for path in sorted(home.glob("*/spec.yaml")))]

    def case(self, rng: random.Random) -> Case:
        seed = _SPEC if rng.random() < 0.5 else rng.choice(self._seeds)
        return Case({"spec.yaml": change.lines_edited(rng, seed)})

    def read(self, folder: Path) -> None:
        from aniso.experiments.spec import Experiment, cells
        from aniso.experiments.strict_yaml import read_yaml, validated

        document = read_yaml(folder / "spec.yaml")
        cells(validated(Experiment, document), document)
