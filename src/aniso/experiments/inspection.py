"""What aniso wrote into a file or a directory: runs, coefficients, heads and composed models."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from aniso.compose import Coefficients
from aniso.compose.card import learned_on
from aniso.compose.coefficients import FORMAT as COEFFICIENTS_FORMAT
from aniso.experiments.run_files import ADAPTER, COEFFICIENTS, HEAD, METRICS, RECORD, SPEC, WEIGHTS, is_run
from aniso.json_value import JsonObject
from aniso.learn import TrainingCheckpoints
from aniso.learn.heads import SavedHead, load_head
from aniso.learn.heads.head import FORMAT as HEAD_FORMAT
from aniso.record_files import read_record
from aniso.records import Record
from aniso.weights import SafetensorsFile
from aniso.weights.files import RawFile

RUN, HEAD_FILE, COEFFICIENTS_FILE, COMPOSITION = "run", "head", "coefficients", "composition"
_OUTPUTS = (COEFFICIENTS, WEIGHTS, HEAD, ADAPTER, RECORD, METRICS, SPEC)
_PREFIX = "aniso."
_SHOWN = 8


@final
@dataclass(frozen=True)
class Story:
    """What an output of aniso is: its kind, sentences for people, and facts for programs."""

    kind: str
    lines: tuple[str, ...]
    facts: JsonObject = field(default_factory=dict)

    @property
    def is_model(self) -> bool:
        """True if there are weights beside the story, which can be listed."""
        return self.kind == COMPOSITION


def story_of(path: Path) -> Story | None:
    """Return what aniso wrote at a path; None for files and directories of others."""
    if path.is_dir():
        return _of_directory(path)
    if not path.is_file() or path.suffix != ".safetensors":
        return None
    metadata = SafetensorsFile(RawFile(path)).metadata
    if metadata.get("format") == COEFFICIENTS_FORMAT:
        return _of_coefficients(COEFFICIENTS_FILE, Coefficients.load(path))
    if metadata.get("format") == HEAD_FORMAT:
        return _of_head(load_head(path))
    known: JsonObject = {
        key.removeprefix(_PREFIX): value for key, value in metadata.items() if key.startswith(_PREFIX)
    }
    return _of_metadata(known) if "coefficients" in known else None


def _of_directory(path: Path) -> Story | None:
    if is_run(path):
        return _of_run(path)
    if not (path / COEFFICIENTS).is_file():
        return None
    story = _of_coefficients(COMPOSITION, Coefficients.load(path / COEFFICIENTS))
    lines, facts = list(story.lines), dict(story.facts)
    if (path / RECORD).is_file():
        record = read_record(path / RECORD)
        lines.append(f"learned: {learned_on(record)}")
        facts["record"] = record.content()
    if (path / HEAD).is_file():
        head = _of_head(load_head(path / HEAD))
        lines.append(head.lines[0])
        facts["head"] = head.facts
    return Story(COMPOSITION, tuple(lines), facts)


def _of_run(path: Path) -> Story:
    present = [name for name in _OUTPUTS if (path / name).exists()]
    if not (path / RECORD).is_file():
        states = len(list(TrainingCheckpoints(path).files()))
        words = f"{states} checkpoints to resume from" if states else "no checkpoint to resume from"
        return Story(RUN, (f"a run that has not finished: {words}",), {"kind": RUN, "files": [*present]})
    record = read_record(path / RECORD)
    lines = [f"a run: {learned_on(record)}", *_inputs(record)]
    lines += [f"wrote {', '.join(present)}", *(f"note: {note}" for note in record.notes)]
    return Story(RUN, tuple(lines), {"kind": RUN, "files": [*present], "record": record.content()})


def _inputs(record: Record) -> list[str]:
    spec, inputs = record.spec, record.inputs
    named = {"model": (spec.model, inputs.model), "bank": (spec.bank, inputs.bank)}
    out = [f"{what} {name}, content {digest}" for what, (name, digest) in named.items() if name and digest]
    if record.coefficients is not None and record.coefficients.sha256:
        out.append(f"coefficients: content {record.coefficients.sha256}")
    return out


def _of_coefficients(kind: str, made: Coefficients) -> Story:
    base, bank = made.provenance.base, made.provenance.bank
    means = [float(row[~row.isnan()].mean()) if bool((~row.isnan()).any()) else 0.0 for row in made.matrix()]
    order = sorted(zip(made.vectors, means, strict=True), key=lambda pair: -abs(pair[1]))
    shown = ", ".join(f"{name} {mean:+.3f}" for name, mean in order[:_SHOWN])
    left = f" … {len(order) - _SHOWN} more" if len(order) > _SHOWN else ""
    what = "a composition" if kind == COMPOSITION else "coefficients"
    lines = [
        f"{what} of {len(made.vectors)} vectors: {len(made):,} coefficients, {made.partition}",
        f"mean coefficients: {shown}{left}",
        f"base {base.label}, content {base.content}",
        f"bank: content {bank}",
        f"coefficients: content {made.content_hash}",
    ]
    if made.selection:
        lines.append(f"vectors selected by {made.selection}")
    facts: JsonObject = {
        "kind": kind,
        "base": {"label": base.label, "content": base.content},
        "bank": bank,
        "coefficients": made.content_hash,
        "partition": str(made.partition),
        "vectors": [
            {"name": name, "sha256": made.provenance.sources[name], "mean": mean}
            for name, mean in zip(made.vectors, means, strict=True)
        ],
        "selection": made.selection or None,
    }
    return Story(kind, tuple(lines), facts)


def _of_head(saved: SavedHead) -> Story:
    head = saved.head
    names = ", ".join(head.names[:_SHOWN])
    left = f" … {len(head.names) - _SHOWN} more" if len(head.names) > _SHOWN else ""
    lines = [f"head {head.kind} for {len(head.names)} classes: {names}{left}"]
    known = {key: saved.features[key] for key in ("model", "coefficients") if key in saved.features}
    lines += [f"trained on features of {key} {value}" for key, value in known.items()]
    facts: JsonObject = {
        "kind": HEAD_FILE,
        "head": head.kind,
        "classes": [*head.names],
        "parameters": head.count,
        "features": {**known},
    }
    return Story(HEAD_FILE, tuple(lines), facts)


def _of_metadata(known: JsonObject) -> Story:
    """Return the story of a file of composed weights that is all there is."""
    vectors = str(known.get("vectors", "")).split(",")
    left = f" … {len(vectors) - _SHOWN} more" if len(vectors) > _SHOWN else ""
    shown = f"{', '.join(vectors[:_SHOWN])}{left}"
    lines = [
        f"a composition of {len(vectors)} vectors ({known.get('partition', '')}): {shown}",
        *(f"{name}: content {known[name]}" for name in ("base", "bank", "coefficients") if name in known),
    ]
    if "learned" in known:
        lines.append(f"learned: {known['learned']}")
    return Story(COMPOSITION, tuple(lines), {"kind": COMPOSITION, **known, "vectors": [*vectors]})
