"""The base of an adapter as PEFT needs it: a name to load it by, its task type, its tokenizer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, final

from aniso.json_value import JsonObject
from aniso.models.exported_files import home_of, tokenizer_files
from aniso.vectors import BlockSource

_TASK_TYPES: Final = {
    r".*ForCausalLM|.*LMHeadModel": "CAUSAL_LM",
    r".*ForConditionalGeneration|.*EncoderDecoderModel": "SEQ_2_SEQ_LM",
    r".*ForSequenceClassification": "SEQ_CLS",
    r".*ForTokenClassification": "TOKEN_CLS",
    r".*ForQuestionAnswering": "QUESTION_ANS",
}
_CLASS = re.compile(r"[A-Z]\w*")  # other words, such as open_clip, name no class of transformers


def task_type(architecture: str | None) -> str | None:
    """Return PEFT's task type of a class of transformers; None for models without one, such as CLIP.

    >>> task_type("GPT2LMHeadModel")
    'CAUSAL_LM'
    """
    name = architecture or ""
    return next((kind for pattern, kind in _TASK_TYPES.items() if re.fullmatch(pattern, name)), None)


@final
@dataclass(frozen=True)
class AdapterBase:
    """The base that an adapter is for."""

    name: str
    """A hub id or a path, as the user gave it."""
    architecture: str | None = None
    home: Path | None = None
    """Its directory, if it has one."""

    @classmethod
    def of(cls, blocks: BlockSource, label: str) -> Self:
        """``label`` is the bank's name of the base, used for a model in memory, which has none of its own."""
        source = blocks.source
        named = source.label if source.files else label
        name = named.partition("@")[0] if source.info.revision is not None else named
        return cls(name, source.info.config.architecture, home_of(source))

    def settings(self) -> JsonObject:
        """Return the fields of adapter_config.json by which PEFT finds and builds the base."""
        kind = task_type(self.architecture)
        mapping: JsonObject | None = None
        if kind is None and _CLASS.fullmatch(self.architecture or ""):
            mapping = {"base_model_class": self.architecture, "parent_library": "transformers"}
        return {"base_model_name_or_path": self.name, "task_type": kind, "auto_mapping": mapping}

    def tokenizer(self) -> dict[str, bytes]:
        """Return the files of the tokenizer: PEFT looks for one beside an adapter of a language model."""
        if self.home is None or task_type(self.architecture) is None:
            return {}
        return tokenizer_files(self.home)
