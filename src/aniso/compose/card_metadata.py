"""The front matter of model cards, which model hubs read: base, library, task, datasets and results."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from aniso.data.card import known_name
from aniso.records import Record, Score
from aniso.vectors import Bank
from aniso.vectors.convert import DUAL, HUGGING_FACE, OPEN_CLIP, SENTENCE

PEFT, ONNX = "peft", "onnx"
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@[0-9a-f]{7,40})?")
_LIBRARIES: Final[Mapping[str, str]] = {
    HUGGING_FACE: "transformers",
    OPEN_CLIP: "open_clip",
    SENTENCE: "sentence-transformers",
    DUAL: "aniso",
    PEFT: "peft",
    ONNX: "onnx",
}
_PIPELINES: Final[Mapping[str, str]] = {
    r".*ForCausalLM|.*LMHeadModel": "text-generation",
    r".*ForConditionalGeneration": "text2text-generation",
    r".*ForImageClassification|timm.*": "image-classification",
    r"CLIPModel|open_clip": "zero-shot-image-classification",
}
_MEASURED: Final[Mapping[str, str]] = {
    "zero-shot-image-classification": "image-classification",
    "sentence-similarity": "text-classification",
}
"""The kind of task that results are of, where it is not that of the pipeline."""


@final
@dataclass(frozen=True)
class Export:
    """What a composition is written as: the kind of directory, and the architecture in it."""

    to: str
    architecture: str | None = None
    made_by: str = "merge"
    """The relation of a directory of weights to its base, in the words of model hubs: merge or finetune."""

    @property
    def library(self) -> str:
        return _LIBRARIES[self.to]

    @property
    def relation(self) -> str:
        """The relation to the base, in the words of model hubs."""
        return "adapter" if self.to == PEFT else self.made_by

    @property
    def tags(self) -> list[str]:
        return ["aniso", "merge", "task-vectors"] if self.made_by == "merge" else ["aniso"]

    @property
    def pipeline(self) -> str | None:
        """The task that the model is used for, in the words of model hubs; None if it is not known."""
        if self.to == SENTENCE:
            return "sentence-similarity"
        if self.to == ONNX:
            return "image-classification"
        if self.to in (OPEN_CLIP, DUAL):
            return "zero-shot-image-classification"
        name = self.architecture or ""
        return next((tag for pattern, tag in _PIPELINES.items() if re.fullmatch(pattern, name)), None)


def hub_id(label: str) -> str | None:
    """Return the id on a model hub that a label names, or None if it names a file.

    >>> hub_id("openai/clip-vit-base-patch32@3d74acf9a28c")
    'openai/clip-vit-base-patch32'
    """
    found = _HUB_ID.fullmatch(label)
    return found[1] if found else None


def base_models(bank: Bank, base: str | None) -> list[str]:
    """Return the hub ids of the base and of all vectors that were made from a model of a hub."""
    sources = (bank[name].provenance for name in bank)
    named = [base or hub_id(bank.base.label), *(hub_id(s.source) for s in sources if s.revision is not None)]
    return list(dict.fromkeys(name for name in named if name is not None))


def front_matter(
    export: Export, bases: list[str], record: Record | None, licence: str | None, name: str
) -> str:
    """Return the metadata of a card as YAML, between its two lines of dashes."""
    from huggingface_hub import ModelCardData

    results = list(_results(record, export.pipeline)) if record is not None else []
    tasks = [] if record is None else [task for task in record.measured if known_name(task) == task]
    given: dict[str, Any] = {
        "license": licence,
        "library_name": export.library,
        "pipeline_tag": export.pipeline,
        "base_model": bases or None,
        "base_model_relation": export.relation if bases else None,
        "datasets": tasks or None,
        "metrics": sorted({result.metric_type for result in results}) or None,
        "tags": export.tags,
        "eval_results": results or None,
        "model_name": name if results else None,
    }
    data = ModelCardData(**{key: value for key, value in given.items() if value is not None})
    return f"---\n{data.to_yaml()}\n---"


def _results(record: Record, pipeline: str | None) -> Iterable[Any]:
    """Yield the results of a record, as model hubs list them."""
    kind = _MEASURED.get(pipeline or "", pipeline) or "image-classification"
    for task, score in record.metrics.accuracy.items():
        yield _result(kind, task, "accuracy", score.accuracy, score)
        if task in record.metrics.perplexity:
            yield _result(kind, task, "perplexity", record.metrics.perplexity[task], None)


def _result(kind: str, task: str, metric: str, value: float, score: Score | None) -> Any:
    from huggingface_hub import EvalResult

    low_high = None if score is None or score.interval is None else {"interval_95": list(score.interval)}
    return EvalResult(
        task_type=kind,
        dataset_type=task,
        dataset_name=task,
        dataset_split="test",
        metric_type=metric,
        metric_value=value,
        metric_args=low_high,
    )
