"""A setting about texts carried out: model, bank and texts read, the method applied, the result measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, final

from torch import nn

from aniso.compose import Coefficients, MergedAdapter, Plan
from aniso.data import TextDataset, read_examples
from aniso.errors import InputError, UsageError, printable
from aniso.experiments.banks import open_bank
from aniso.experiments.choosing import strategy_of
from aniso.experiments.content import Content
from aniso.experiments.learning import composed, device_of, evolved, learned, with_choice
from aniso.experiments.outcome import RunOptions, RunResult
from aniso.experiments.settings.language import Language
from aniso.experiments.settings.setting import COMPOSED, others
from aniso.learn import (
    Best,
    EpochSampler,
    Keep,
    LanguageLoss,
    Last,
    Objective,
    Trainable,
    evaluate_lm,
    text_dataset,
)
from aniso.learn.evaluate import wilson
from aniso.learn.finetune import tuned_weights
from aniso.learn.language import LanguageScore
from aniso.learn.lora import Adapter, adapter
from aniso.learn.selection import Choice
from aniso.models import LanguageModel, load_language_model
from aniso.vectors import Bank
from aniso.weights import TensorMap


@final
@dataclass(frozen=True)
class _Made:
    model: nn.Module
    facts: dict[str, Any] = field(default_factory=dict)
    coefficients: Coefficients | None = None
    weights: TensorMap | None = None
    adapter: Adapter | MergedAdapter | None = None
    notes: tuple[str, ...] = ()


@final
class LanguageWork:
    """One setting on its way. What is loaded is loaded when first needed, and once."""

    def __init__(self, setting: Language, options: RunOptions | None = None) -> None:
        self.setting = setting
        self._how = options or RunOptions()

    @cached_property
    def model(self) -> LanguageModel:
        return load_language_model(self.setting.model, self.setting.weights).to(device_of(self._how))

    @cached_property
    def bank(self) -> Bank:
        """The vectors that are composed."""
        setting = self.setting
        whole = open_bank(str(setting.bank), self.model.weight_source(), seed=setting.seed)
        names = others(whole.names, "", setting.leave_out)
        if not names:
            raise InputError(
                "BANK-NAME",
                f"bank '{printable(setting.bank)}' has no vector left",
                found=", ".join(whole.names),
                fix="leave out fewer",
            )
        found = whole.only(*names)
        self.choice = self._chosen(found)
        return found if self.choice is None else self.choice.bank

    choice: Choice | None = None
    """Which vectors, or cells, were kept, if the setting chooses; known once there is a bank."""

    def _chosen(self, bank: Bank) -> Choice | None:
        how = self._how
        strategy = strategy_of(
            self.setting, self._objective, self.model, workers=how.workers, progress=how.progress
        )
        return None if strategy is None else strategy.choose(bank)

    # texts

    @cached_property
    def _texts(self) -> dict[str, TextDataset]:
        """By what they are for."""
        said = {"train": self.setting.train, "val": self.setting.val, "test": self.setting.test}
        found = {role: self._read(name, role) for role, name in said.items() if name is not None}
        _require_apart(found)
        return found

    @property
    def content(self) -> Content:
        """The files of texts that the result depends on; no model is needed to know them."""
        setting, trains = self.setting, self.setting.method != "none"
        learned = [self._path(name) for name in (setting.train, setting.val) if name is not None and trains]
        return Content(tuple(learned), () if setting.test is None else (self._path(setting.test),))

    def _path(self, name: str) -> Path:
        root = self._how.data
        return root / name[2:] if name.startswith("./") and root is not None else Path(name).expanduser()

    def _read(self, name: str, role: str) -> TextDataset:
        path = self._path(name)
        # two files may have the same name
        return text_dataset(
            self.model, read_examples(path), f"{path.name} {role}", role, length=self.setting.length
        )

    @cached_property
    def _objective(self) -> Objective:
        return LanguageLoss(self._texts["train"]) * 1.0

    @property
    def _keep(self) -> Keep:
        return Best(self._texts["val"]) if "val" in self._texts else Last()

    # before anything is learned

    def plan(self) -> tuple[Plan | None, dict[str, Any]]:
        """What will be read, trained and needed, in numbers; fails where the work itself would."""
        setting, schedule, memory = self.setting, self.setting.resolved_schedule(), None
        facts: dict[str, Any] = {"method": setting.method, "texts": _sizes(self._texts)}
        if setting.method in COMPOSED:
            made, _ = composed(self.model, self.bank, setting, self._how)
            memory = made.plan
            facts |= {"vectors": list(self.bank.names), "trainable": made.values.numel()}
            if self.choice is not None:
                facts["selection"] = self.choice.summary()
        elif setting.method == "weights":
            facts["trainable"] = self._trained_weights()[0].count
        if setting.method in ("coefficients", "weights"):
            passes = EpochSampler([(self._texts["train"], ())], schedule, setting.seed)
            facts["steps"] = schedule.epochs * passes.steps
        return memory, facts

    # the methods

    def run(self) -> RunResult:
        self._texts  # noqa: B018 (what cannot be read is found out now)
        method = {
            "none": lambda: _Made(self.model),
            "coefficients": self._composed,
            "gradient-free": self._evolved,
            "weights": self._tuned,
        }[self.setting.method]
        return self._outcome(method())

    def _composed(self) -> _Made:
        made, factors = composed(self.model, self.bank, self.setting, self._how)
        trained = Trainable.coefficients(made)
        done, facts = learned(trained, self._objective, self._keep, self.setting, self._how)
        if factors is not None:
            return _Made(made, facts, adapter=factors.adapter(), notes=done.notes)
        return _Made(made, facts, made.coefficients, notes=done.notes)

    def _evolved(self) -> _Made:
        made, _ = composed(self.model, self.bank, self.setting, self._how)
        facts = evolved(made, self._objective, self._keep, self.setting, self._how)
        return _Made(made, facts, made.coefficients)

    def _trained_weights(self) -> tuple[Trainable, Adapter | None]:
        if self.setting.rank is None:
            return Trainable.weights(self.model), None
        made = adapter(self.model, self.setting.rank, seed=self.setting.seed)
        return made.trained, made

    def _tuned(self) -> _Made:
        trained, made = self._trained_weights()
        done, facts = learned(trained, self._objective, self._keep, self.setting, self._how)
        weights = tuned_weights(self.model, trained) if made is None else None
        return _Made(trained.model, facts, weights=weights, adapter=made, notes=done.notes)

    # results

    def _outcome(self, made: _Made) -> RunResult:
        metrics: dict[str, Any] = {"accuracy": {}, **made.facts}
        notes = [note for text in self._texts.values() for note in text.notes]
        notes += [*_known(self._texts), *made.notes]
        notes += made.coefficients.index.notes if made.coefficients is not None else ()
        test = self._texts.get("test")
        if test is None:
            notes.append("warning: there are no texts to test by, so nothing was measured: --test FILE")
        else:
            found = self._guessed(made.model, test)
            metrics["accuracy"][test.name] = _score(found)
            metrics["perplexity"] = {test.name: found.perplexity}
            if self.setting.compare and self.setting.method != "none":
                before = self._guessed(self.model, test)
                metrics["zero_shot"] = {test.name: before.right / before.tokens}
                metrics["base_perplexity"] = {test.name: before.perplexity}
        if self.choice is not None:
            metrics["selection"] = self.choice.summary()
            notes += self.choice.notes
        return RunResult(
            metrics,
            self._inputs(),
            self._names(),
            with_choice(made.coefficients, self.choice),
            made.weights,
            made.adapter,
            device=device_of(self._how).type,
            notes=tuple(notes),
            content=self.content,
        )

    def _guessed(self, model: nn.Module, split: TextDataset) -> LanguageScore:
        how, at_once = self._how, self.setting.resolved_schedule().micro_batch
        return evaluate_lm(
            model,
            split,
            batch=min(split.default_batch_size, at_once or split.default_batch_size),
            workers=how.workers,
            progress=how.progress,
        )

    def _names(self) -> dict[str, str]:
        """Of files their names: where they lie is nobody's business."""
        said = {"train": self.setting.train, "val": self.setting.val, "test": self.setting.test}
        return {name: f"{Path(name).name} {role}" for role, name in said.items() if name is not None}

    def _inputs(self) -> dict[str, Any]:
        data = {text.name: text.manifest for text in self._texts.values()}
        inputs: dict[str, Any] = {**self.model.identity(), "data": data, "content": self.content.hashes()}
        if self.setting.method in COMPOSED:
            inputs |= {"bank": self.bank.content_hash, "vectors": list(self.bank.names)}
        return inputs


def _require_apart(texts: dict[str, TextDataset]) -> None:
    """What is measured on, or chosen by, texts that were learned from means nothing."""
    for one, other in combinations(texts, 2):
        if texts[one].manifest == texts[other].manifest:
            raise UsageError(
                "LEARN-TEST",
                f"{printable(texts[one].name)} and {printable(texts[other].name)} are the same texts",
                fix=f"--{other} with other texts, or leave it out",
            )


def _known(texts: dict[str, TextDataset]) -> list[str]:
    """A warning for every file to choose or to measure by, some of whose rows were learned from."""
    learned = set(texts["train"].digests)
    out = []
    for role, text in texts.items():
        known = sum(digest in learned for digest in text.digests)
        if role != "train" and known:
            name = printable(texts["train"].name)
            out.append(f"warning: {known} of {len(text)} rows of {printable(text.name)} are in {name}, too")
    return out


def _score(found: LanguageScore) -> dict[str, Any]:
    """Of tokens, how many were thought the likeliest."""
    return {
        "correct": found.right,
        "total": found.tokens,
        "accuracy": found.right / found.tokens,
        "interval": list(wilson(found.right, found.tokens)),
    }


def _sizes(texts: dict[str, TextDataset]) -> dict[str, int]:
    return {text.name: len(text) for text in texts.values()}
