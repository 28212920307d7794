"""Model cards: what a composition was made from, how it was learned, and what was measured."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import final

from aniso.compose.card_metadata import Export, base_models, front_matter, hub_id
from aniso.compose.coefficients import Coefficients
from aniso.errors import InputError, printable
from aniso.records import Record
from aniso.vectors import Bank
from aniso.vectors.licences import agreed_licence
from aniso.vectors.provenance import BaseInfo

RECORD = "record.json"
_MARKUP = re.compile(r"([\\`*_{}\[\]<>|#&~$])")
_ROWS = 200
_CLASSES = 100
_DATA = ("task", "tasks", "target", "control", "train", "val", "test")
_INPUTS = ("model", "weights", "bank")


@final
@dataclass(frozen=True)
class CardDetails:
    """What a card says beside the composition itself."""

    record: Record | None = None
    """The record of the run that learned the coefficients."""
    command: str = ""
    licence: str | None = None
    """Default: that of the base and all vectors, if they state the same one."""
    base_model: str | None = None
    """The base's id on a model hub; default: that it was loaded from."""
    base_licence: str | None = None
    more: tuple[str, ...] = ()
    """Sentences about other files in the directory."""

    def require_record_of(self, coefficients: Coefficients) -> None:
        """Raise RECORD if the record is of other coefficients."""
        if self.record is None:
            return
        stated = self.record.coefficients.sha256 if self.record.coefficients is not None else None
        same_vectors = self.record.inputs.vectors == coefficients.vectors  # older records have no hash
        if stated != coefficients.content_hash if stated is not None else not same_vectors:
            raise InputError(
                "RECORD",
                "the record belongs to other coefficients",
                expected=(stated or ", ".join(self.record.inputs.vectors))[:64],
                found=coefficients.content_hash if stated else ", ".join(coefficients.vectors)[:64],
                fix="give the run's directory as it was written, or the file of coefficients from elsewhere",
            )


def model_card(coefficients: Coefficients, bank: Bank, export: Export, details: CardDetails) -> str:
    """Return the card of a composition as Markdown; ``bank`` has the vectors that were composed."""
    base, record = _line(coefficients.provenance.base.label), details.record
    licence = details.licence or agreed_licence(bank, details.base_licence)
    name = f"{base} + {len(coefficients.vectors)} task vectors"
    lines = [
        front_matter(export, base_models(bank, details.base_model), record, licence, name),
        "",
        f"# A composition of {len(coefficients.vectors)} task vectors over {base}",
        "",
        "The weights are base + Σ coefficient · task vector, with "
        f"{coefficients.partition} ({len(coefficients):,} in all). They are ordinary weights: "
        "nothing but the architecture's own library is needed to run them. "
        "`coefficients.safetensors` holds every coefficient, with the names it belongs to.",
        "",
        *(line for sentence in details.more for line in (sentence, "")),
        *(_learned(record, bank) if record is not None else ()),
        "## Vectors",
        "",
        *_vectors(coefficients, bank),
        "",
        *_provenance(coefficients, bank, details.command),
    ]
    return "\n".join([*lines, *_METHOD])


def plain_card(base: BaseInfo, tuned: str | None, export: Export, details: CardDetails) -> str:
    """Return the card of a model without coefficients; ``tuned`` is the hash of fine-tuned weights."""
    label, record = _line(base.label), details.record
    task = "" if record is None or not record.measured else f" for {_line(', '.join(record.measured))}"
    title = f"{label}{' fine-tuned' if tuned else ''}{task}"
    known = details.base_model or hub_id(base.label)
    licence = details.licence or details.base_licence
    about = "fine-tuned from the base" if tuned else "those of the base, unchanged"
    lines = [
        front_matter(export, [known] if known else [], record, licence, title),
        "",
        f"# {title}",
        "",
        f"The weights are {about}. Nothing but the architecture's own library is needed to run them.",
        "",
        *(line for sentence in details.more for line in (sentence, "")),
        *(_learned(record, None) if record is not None else ()),
        f"- base: {label}, content `{base.content}`",
        *([f"- weights: content `{tuned}`"] if tuned else []),
        *_command(details.command),
        "",
    ]
    return "\n".join(lines)


_METHOD = (
    "",
    "Method: Knowledge Composition using Task Vectors with Learned Anisotropic Scaling "
    "(NeurIPS 2024), https://arxiv.org/abs/2407.02880",
    "",
)


def _provenance(coefficients: Coefficients, bank: Bank, command: str) -> Iterator[str]:
    base = coefficients.provenance.base
    yield f"- base: {_line(base.label)}, content `{base.content}`"
    yield f"- bank: content `{bank.whole_hash}`"
    yield f"- coefficients: content `{coefficients.content_hash}`"
    if coefficients.selection:
        yield f"- vectors selected by {_line(coefficients.selection)}"
    yield from _command(command)


def _command(command: str) -> Iterator[str]:
    if command:  # between backticks nothing needs escaping, and nothing may end them
        yield f"- command: `{printable(command, 2000).replace('`', '')}`"


def factors_card(bank: Bank, export: Export, details: CardDetails) -> str:
    """Return the card of adapters that were composed factor by factor."""
    names = ", ".join(_line(name) for name in bank.names[:_ROWS])
    licence = details.licence or agreed_licence(bank, details.base_licence)
    base = _line(bank.base.label)
    return "\n".join(
        [
            front_matter(export, base_models(bank, details.base_model), details.record, licence, base),
            "",
            f"# {len(bank)} LoRA adapters over {base}, composed factor by factor",
            "",
            "The update is (Σ b · B)(Σ a · A), with learned coefficients for the factors A and B of every "
            "adapter and weight. It is an ordinary adapter for PEFT, of the rank that each of them has.",
            "",
            f"- adapters: {names}",
            f"- base: {base}, content `{bank.base.content}`",
            f"- bank: content `{bank.whole_hash}`",
            *_command(details.command),
            "",
        ]
    )


# what a record says


def learned_on(record: Record) -> str:
    """Return one sentence on the data and the recipe of a run, and what came out."""
    spec = record.spec
    about = " and ".join(record.measured) or spec.train or "unlabelled data"
    words = [
        f"{name} {value}" for name, value in (("shots", spec.shots), ("seed", spec.seed)) if value is not None
    ]
    more = [f"calibrated by {spec.calibrate}"] if spec.calibrate else []
    how = ", ".join([spec.method, *more, *words, *([f"head {spec.head}"] if spec.head else [])])
    found = "; ".join(_measured(record, name) for name in record.metrics.accuracy)
    return f"{spec.setting} on {about} ({how})" + (f": {found}" if found else "")


def _measured(record: Record, task: str) -> str:
    metrics, score = record.metrics, record.metrics.accuracy[task]
    if task in metrics.perplexity:
        before = f" (base {metrics.base_perplexity[task]:.2f})" if task in metrics.base_perplexity else ""
        return f"{task} perplexity {metrics.perplexity[task]:.2f}{before}"
    before = f" (zero-shot {metrics.zero_shot[task]:.1%})" if task in metrics.zero_shot else ""
    return f"{task} {score.accuracy:.1%}{before}"


def _learned(record: Record, bank: Bank | None) -> Iterator[str]:
    yield from ("## Results", "", *_accuracies(record), "")
    if record.spec.calibrate:
        yield (
            f"Calibrated after the merge by {_line(record.spec.calibrate)}, on at most "
            f"{record.spec.calibrate_items:,} items of every task ({_line(record.spec.inputs_from)} split), "
            "without their labels. The vector below is the calibrated model minus the base."
        )
        yield ""
    head = record.metrics.head
    if head is not None:
        yield f"Measured with the head `{head.kind}` that was learned on these features."
        yield ""
    if bank is not None and record.inputs.bank not in (None, bank.whole_hash, bank.content_hash):
        yield (
            f"Measured with bank `{record.inputs.bank}`; these weights were made from another copy of its "
            f"vectors, `{bank.whole_hash}`."
        )
        yield ""
    yield from ("## Recipe", "", "| option | value |", "|---|---|", *_recipe(record), "")
    for task, names in (record.inputs.class_names or {}).items():
        shown = ", ".join(_line(name) for name in names[:_CLASSES])
        left = len(names) - _CLASSES
        yield f"Classes of {_line(task)} ({len(names)}): {shown}{f' … {left} more' if left > 0 else ''}"
        yield ""


def _accuracies(record: Record) -> Iterator[str]:
    metrics = record.metrics
    if metrics.perplexity:
        yield "| texts | tokens | base: perplexity | perplexity | next-token accuracy |"
        yield "|---|---|---|---|---|"
    else:
        yield "| task | items | zero-shot | accuracy | 95 % interval |"
        yield "|---|---|---|---|---|"
    for task, score in metrics.accuracy.items():
        name = _line(task)
        if metrics.perplexity:
            before = f"{metrics.base_perplexity[task]:.2f}" if task in metrics.base_perplexity else ""
            after = f"{metrics.perplexity[task]:.2f}" if task in metrics.perplexity else ""
            yield f"| {name} | {score.total:,} | {before} | {after} | {score.accuracy:.1%} |"
            continue
        zero = f"{metrics.zero_shot[task]:.1%}" if task in metrics.zero_shot else ""
        interval = f"{score.interval[0]:.1%} to {score.interval[1]:.1%}" if score.interval else ""
        yield f"| {name} | {score.total:,} | {zero} | {score.accuracy:.1%} | {interval} |"


def _recipe(record: Record) -> Iterator[str]:
    spec, metrics = record.spec.content(), record.metrics
    data = {key: spec[key] for key in _DATA if key in spec}
    options = {key: value for key, value in spec.items() if key not in (*_DATA, *_INPUTS)}
    reached = {
        "kept epoch": f"{metrics.kept_epoch} of {metrics.epochs}" if metrics.kept_epoch is not None else None,
        "learning rate": metrics.learning_rate,
        "trained parameters": metrics.trainable,
        "scale": metrics.scale,
    }
    for key, value in {**data, **options, **reached}.items():
        if value is not None and value is not False and value not in ("", [], {}):  # a seed of 0 is shown
            yield f"| {_line(key.replace('_', ' '))} | {_line(_plain(value), 300)} |"


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items() if item is not None)
    return ", ".join(map(_plain, value)) if isinstance(value, list | tuple) else str(value)


def _vectors(coefficients: Coefficients, bank: Bank) -> Iterable[str]:
    yield "| vector | made from | sha256 | mean coefficient | least | most |"
    yield "|---|---|---|---|---|---|"
    rows = list(zip(coefficients.vectors, coefficients.matrix(), strict=True))
    for name, row in rows[:_ROWS]:
        known = row[~row.isnan()].tolist() or [0.0]
        numbers = " | ".join(f"{x:+.3f}" for x in (sum(known) / len(known), min(known), max(known)))
        source = bank[name].provenance
        yield f"| {_line(name)} | {_line(source.source)} | `{source.sha256}` | {numbers} |"
    if len(rows) > _ROWS:
        yield f"| … {len(rows) - _ROWS} more | | | | | |"


def _line(text: str, longest: int = 120) -> str:
    """Return untrusted text on one line, without markup and without directories."""
    shown = text.rsplit("/", 1)[-1] if text.startswith(("/", "~", ".")) else text
    return _MARKUP.sub(r"\\\1", printable(shown, longest))
