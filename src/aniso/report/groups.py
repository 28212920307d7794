"""Records grouped by experiment, and notes on groups whose inputs differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from aniso.errors import UsageError
from aniso.records import Record


def experiments(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Group records by experiment; an experiment with several settings counts as several."""
    settings: dict[str, set[str]] = defaultdict(set)
    records = list(records)
    for record in records:
        settings[record.experiment].add(record.spec.setting)
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        several = len(settings[record.experiment]) > 1
        name = f"{record.experiment}, {record.spec.setting}" if several else record.experiment
        groups[name].append(record)
    return dict(sorted(groups.items()))


def require_one_experiment(records: Iterable[Record]) -> list[Record]:
    """Return the records if they are of one experiment, which is what one table can show."""
    records = list(records)
    found = list(experiments(records))
    if not found:
        raise UsageError("RECORD", "there is nothing to report", fix="run an experiment first")
    if len(found) > 1:
        raise UsageError(
            "RECORD",
            "a table holds one experiment",
            found=", ".join(found),
            fix="one table for each group of experiments(records)",
        )
    return records


def mixed(records: Iterable[Record]) -> list[str]:
    """Return notes on experiments whose runs differ in the model, the data or the bank."""
    notes = []
    for name, group in experiments(records).items():
        models = {r.inputs.model for r in group if r.inputs.model is not None}
        if len(models) > 1:
            notes.append(f"{name}: mixes runs of {len(models)} different models ({_short(models)})")
        data: dict[str, set[str]] = defaultdict(set)
        for record in group:
            for task, manifest in record.inputs.data.items():
                data[task].add(manifest)
        notes += [
            f"{name}: mixes runs on {len(found)} different sets of images of {task} ({_short(found)})"
            for task, found in sorted(data.items())
            if len(found) > 1
        ]
        banks: dict[tuple[str, ...], set[str]] = defaultdict(set)
        for r in group:
            # selected or random vectors may differ from run to run
            given = r.spec.select is None and not (r.spec.bank or "").startswith("random:")
            if given and r.spec.bank is not None and r.inputs.bank is not None:
                spec = r.spec.model_dump()
                more = (str(spec.get("leave_out")), *sorted(r.inputs.merged), str(spec.get("merge_options")))
                used = r.inputs.selected or r.inputs.bank
                banks[r.spec.bank, r.spec.method, *r.measured, *more].add(used)
        changed = sorted({key[0] for key, hashes in banks.items() if len(hashes) > 1})
        notes += [f"{name}: mixes runs with different contents of bank {bank}" for bank in changed]
    return notes


def _short(hashes: Iterable[str]) -> str:
    return ", ".join(sorted(text[:12] for text in hashes))
