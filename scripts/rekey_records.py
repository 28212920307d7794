"""Give committed records the ids that their cells have now, and put them into one file per experiment.

    python scripts/rekey_records.py experiments/few-shot …

A record's id is the hash of everything that decides its result. When settings get a new option, the ids of
all cells change. Records are matched with cells by what they say they were asked to do; options that a record
does not know have their default value. A record without a cell, or two records for one, are errors.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path, PurePath
from typing import Any

from aniso.experiments.parsing import parse_setting
from aniso.experiments.settings import Setting
from aniso.experiments.spec import Experiment, cells
from aniso.experiments.strict_yaml import Document, read_yaml, validated
from aniso.record_files import RECORDS, read_records
from aniso.records import Record
from aniso.registry import METHODS, SETTINGS


def asked(label: str, setting: Setting) -> str:
    """What a cell was asked to do, in a form that records and cells have in common."""
    return json.dumps([label, _named(json.loads(json.dumps(setting.spec())))], sort_keys=True)


def _named(value: Any) -> Any:
    """Places of tasks become their names, as in records."""
    if isinstance(value, dict):
        return {key: _named(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_named(item) for item in value]
    return PurePath(value).name if isinstance(value, str) and value.startswith("./") else value


SCHEDULE = {
    "batch": "batch_size",
    "warmup": "warmup_steps",
    "clip": "max_grad_norm",
    "shape": "lr_schedule",
    "least_batches": "min_steps_per_epoch",
}
"""Fields of a schedule: old name -> new name."""


EARLIER_HEADS = {
    "tip": ["alpha=1.0", "beta=5.5", "batch_size=0", "decay=0.0"],
    "lpp": ["momentum=0.0", "bias=false"],
}
"""Options of heads before records held them."""
LABELS = {
    "LP++": "LP++, monotone",
    "learned anisotropic + LP++": "learned anisotropic + LP++, monotone",
}
"""Labels of records whose method is no longer the default: old -> new."""


def relabelled(record: Record) -> str:
    """The label of a record's cell."""
    earlier = record.spec.model_dump(mode="json").get("head_options") is None
    return LABELS.get(record.label, record.label) if earlier else record.label


def completed(record: Record) -> Setting:
    """What a record was asked to do, under today's names and with today's defaults for new options."""
    spec = record.spec.model_dump(mode="json", exclude_unset=True)
    if spec["setting"] == "test-time":
        spec = {"trusted_by": "prediction", "mean_over": "batch", **spec}
    if spec.get("head") in EARLIER_HEADS and "head_options" not in spec:
        spec["head_options"] = EARLIER_HEADS[spec["head"]]
    if "schedule" in spec:
        spec["schedule"] = {SCHEDULE.get(name, name): value for name, value in spec["schedule"].items()}
        spec["schedule"].setdefault("epoch_of", "longest")
    if spec["setting"] == "test-time" and spec.pop("train", None) == "layernorm":
        spec["method"] = "layernorm"
    # options of other methods were recorded, too
    known = {
        "setting",
        *SETTINGS.get(spec["setting"]).model_fields,
        *METHODS.get(spec["method"]).model_fields,
    }
    return parse_setting(Document(record.id, {key: v for key, v in spec.items() if key in known}, {}))


def rekey(directory: Path) -> int:
    """Rewrite the records of one experiment; the number of records."""
    document = read_yaml(directory / "spec.yaml")
    ids = {}
    for cell in cells(validated(Experiment, document), document):
        ids[asked(cell.label, cell.setting)] = cell.setting.id
    lines: dict[str, str] = {}
    for record in read_records([directory / "records"]):
        setting = completed(record)
        label = relabelled(record)
        found = ids.pop(asked(label, setting), None)
        if found is None:
            raise SystemExit(f"{directory}: no cell is left for the record {record.id} ({label})")
        spec = _named(json.loads(json.dumps(setting.spec())))
        content = {**record.content(), "id": found, "label": label, "spec": spec}
        lines[found] = json.dumps(content, sort_keys=True)
    for path in (directory / "records").glob("*.json"):
        path.unlink()
    (directory / "records" / RECORDS).write_text("".join(f"{lines[i]}\n" for i in sorted(lines)))
    return len(lines)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name}: {rekey(Path(name))} records")
