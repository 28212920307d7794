"""All companions of a run: hooks called one after another, state under their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import final

from torch import Tensor

from aniso.learn.objectives import Companion, DataTerm, Losses, RunContext, TermInputs
from aniso.progress import ProgressCallback
from aniso.records import JsonValue

States = dict[str, dict[str, JsonValue]]
"""State of companions that is not tensors, by the companion's name."""


@final
class Companions:
    """The companions of an objective's terms, and others that a run has."""

    def __init__(self, *companions: Companion) -> None:
        self._all = companions

    @classmethod
    def of(cls, terms: Sequence[DataTerm], run: RunContext, *others: Companion) -> Companions:
        """Return the companions that the terms' classes ask for, and ``others``."""
        kinds: dict[type[DataTerm], None] = {type(term): None for term in terms}
        made = [
            kind.companion({i: term for i, term in enumerate(terms) if type(term) is kind}, run)
            for kind in kinds
        ]
        return cls(*(companion for companion in made if companion is not None), *others)

    def before_epoch(self, progress: ProgressCallback, check: Callable[[], None]) -> None:
        for companion in self._all:
            companion.before_epoch(progress, check)

    def reserved_items(self, term: int) -> Sequence[int] | None:
        found = (companion.reserved_items(term) for companion in self._all)
        return next((items for items in found if items is not None), None)

    def marks(self, term: int, items: Sequence[int]) -> dict[str, Tensor]:
        return {k: v for companion in self._all for k, v in companion.marks(term, items).items()}

    def observe(self, term: int, items: Sequence[int], inputs: TermInputs) -> None:
        for companion in self._all:
            companion.observe(term, items, inputs)

    def around_step(self, backward: Callable[[], Losses]) -> Losses:
        step = backward
        for companion in self._all:
            if type(companion).around_step is not Companion.around_step:  # the others would only call it
                step = partial(companion.around_step, step)
        return step()

    def after_step(self) -> None:
        for companion in self._all:
            companion.after_step()

    def metrics(self) -> dict[str, int]:
        return {key: value for companion in self._all for key, value in companion.metrics().items()}

    def state(self) -> tuple[dict[str, Tensor], States]:
        """Tensors under ``<companion>.<key>``, and the rest."""
        tensors: dict[str, Tensor] = {}
        rest: States = {}
        for companion in self._all:
            rest[companion.name] = {}
            for key, value in companion.state_dict().items():
                if isinstance(value, Tensor):
                    tensors[f"{companion.name}.{key}"] = value
                else:
                    rest[companion.name][key] = value
        return tensors, rest

    def restore(self, tensors: Mapping[str, Tensor], rest: Mapping[str, Mapping[str, JsonValue]]) -> None:
        for companion in self._all:
            prefix = f"{companion.name}."
            own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            companion.load_state_dict({**rest[companion.name], **own})
