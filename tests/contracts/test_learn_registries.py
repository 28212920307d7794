"""What holds for every registered objective, head and selection rule, and for every companion."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import colours
import pytest
import torch
from torch import Tensor, nn

from aniso.data import Labelled
from aniso.errors import StoppedError
from aniso.learn import CrossEntropy, Schedule, fit, selection
from aniso.learn.heads import Head, new_head
from aniso.learn.objectives import Companion, DataTerm, Losses, RunContext, Term, TermInputs
from aniso.learn.selection import SelectionInputs, SelectionRule, new_selection_rule
from aniso.learn.unwrap import encoder_of
from aniso.progress import ProgressCallback
from aniso.registry import HEADS, OBJECTIVES, SELECTION_RULES, Registry

Refused = Callable[..., AbstractContextManager[Any]]

QUICK = Schedule(epochs=2, lr=0.1, batch_size=8, warmup_steps=0)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> colours.World:
    return colours.world(tmp_path_factory.mktemp("world"))


def test_everything_has_its_name() -> None:
    assert set(OBJECTIVES.names) == {
        *("cross-entropy", "language", "coefficient-norm", "entropy", "sar", "contrastive", "fixmatch"),
        "cosine-pairs",
        "image-text",
        "stay-near",
        "distil",
    }
    assert set(HEADS.names) == {"tip", "lpp", "linear"}
    assert set(SELECTION_RULES.names) == {"random", "features", "gradient", "blockwise-gradient", "pursuit"}


@pytest.mark.parametrize("registry", [OBJECTIVES, HEADS, SELECTION_RULES], ids=lambda r: r.kind)
def test_every_entry_has_a_summary_and_is_known_by_its_name(registry: Registry) -> None:
    for name in registry.names:
        assert registry.name_of(registry.get(name)) == name
        assert registry.summary(name).endswith(".") and len(registry.summary(name)) > 20


def test_names_and_summaries_need_no_torch() -> None:
    code = (
        "import sys; from aniso.registry import *; "
        "[r.summary(n) for r in (OBJECTIVES, HEADS, SELECTION_RULES) for n in r.names]; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", OBJECTIVES.names)
def test_every_objective_is_a_term_that_declares_whether_it_needs_labels(name: str) -> None:
    kind = OBJECTIVES.get(name)
    assert issubclass(kind, Term)
    if issubclass(kind, DataTerm):
        assert isinstance(kind.needs_labels, bool)
        assert 0 <= kind.reserved_share < 1 and kind.no_grad_views >= 0


@pytest.mark.parametrize("name", HEADS.names)
def test_every_head_predicts_as_its_class_weights_until_it_is_trained(
    world: colours.World, name: str
) -> None:
    base = world.encoder.class_weights(world.target.classes)
    head = new_head(name, base)
    features = torch.randn(5, base.weight.shape[1], generator=torch.Generator().manual_seed(1))
    assert isinstance(head, Head) and head.kind == name
    torch.testing.assert_close(head.logits(features), base.logits(features), rtol=1e-4, atol=1e-5)


def test_an_unknown_name_lists_the_known_ones(world: colours.World, refused: Refused) -> None:
    with refused("USAGE", 2, "'lp'", "linear, lpp, tip", "--head lpp"):
        new_head("lp", world.encoder.class_weights(world.target.classes))
    with refused("USAGE", 2, "'pursuits'", "blockwise-gradient", "pursuit"):
        new_selection_rule("pursuits", SelectionInputs(world.encoder, None, 1))


@pytest.mark.parametrize("name", SELECTION_RULES.names)
def test_every_rule_is_made_from_inputs_and_keeps_its_budget(
    world: colours.World, name: str, refused: Refused
) -> None:
    inputs = SelectionInputs(world.encoder, CrossEntropy(world.target.split("train")) * 1.0, 1, seed=3)
    rule = new_selection_rule(name, inputs)
    assert isinstance(rule, SelectionRule) and rule.kind == name and rule.budget == selection.Budget(1)
    assert isinstance(rule.needs_gradient, bool) and isinstance(rule.compares_vectors, bool)
    bank = world.composition().bank
    if name != "features":  # this bank has none
        chosen = rule.choose(bank)
        assert chosen.rule == name and 1 <= len(chosen.bank) <= len(bank)
    without = SelectionInputs(world.encoder, None, 1)
    if rule.needs_objective:
        with refused("USAGE", 2, name, "--task TASK"):
            new_selection_rule(name, without)
    else:
        assert new_selection_rule(name, without).kind == name


# companions


class Counter(Companion):
    """Weights every item by how often it was seen, and counts the hooks."""

    name = "counter"

    def __init__(self, items: int) -> None:
        self.seen = torch.zeros(items)
        self.hooks: dict[str, int] = {}

    def _count(self, hook: str) -> None:
        self.hooks[hook] = self.hooks.get(hook, 0) + 1

    def before_epoch(self, progress: ProgressCallback, check: Callable[[], None]) -> None:
        self._count("before_epoch")

    def marks(self, term: int, items: Sequence[int]) -> Mapping[str, Tensor]:
        return {"seen": self.seen[list(items)]}

    def observe(self, term: int, items: Sequence[int], inputs: TermInputs) -> None:
        assert torch.equal(inputs.marks["seen"], self.seen[list(items)])
        self.seen[list(items)] += 1

    def around_step(self, backward: Callable[[], Losses]) -> Losses:
        self._count("around_step")
        return backward()

    def after_step(self) -> None:
        self._count("after_step")

    def metrics(self) -> Mapping[str, int]:
        return {"steps": self.hooks.get("after_step", 0)}

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "hooks": self.hooks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen, self.hooks = state["seen"], dict(state["hooks"])


MADE: list[Counter] = []


@dataclass(frozen=True)
class Counted(DataTerm):
    needs_labels = True
    split: Labelled

    @property
    def name(self) -> str:
        return "counted"

    def identity(self) -> dict[str, Any]:
        return {"loss": "counted"}

    @classmethod
    def companion(cls, terms: Mapping[int, Self], run: RunContext) -> Companion:
        ((number, term),) = terms.items()
        assert number == 0 and run.heads[0] is not None
        MADE.append(Counter(len(term.split)))
        return MADE[-1]

    def views(self, model: nn.Module) -> tuple[Any, ...]:
        return (encoder_of(model).transforms.train,)

    def loss(self, inputs: TermInputs) -> Tensor:
        assert inputs.labels is not None
        losses = nn.functional.cross_entropy(inputs.logits[0], inputs.labels, reduction="none")
        return (losses * (1 + inputs.marks["seen"])).mean()


class StopAt:
    """Interrupts a run after a number of calls of the progress callback."""

    def __init__(self, calls: int) -> None:
        self._left = calls

    def __call__(self, what: str, done: int, total: int) -> None:
        self._left -= 1
        if self._left == 0:
            raise StoppedError("STOPPED", "enough", signal=2)


def test_a_companions_hooks_are_called_and_its_metrics_are_in_the_history(world: colours.World) -> None:
    split = world.target.split("train")
    done = fit(world.composition(), Counted(split), QUICK)
    steps = -(-len(split) // QUICK.batch_size)
    assert MADE[-1].hooks == {
        "before_epoch": 2,
        "around_step": 2 * steps,
        "after_step": 2 * steps,
    }
    assert MADE[-1].seen.tolist() == [2.0] * len(split)
    assert [row.content()["steps"] for row in done.history] == [0, steps, 2 * steps]


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_a_companion_is_resumed_exactly(world: colours.World, tmp_path: Path, calls: int) -> None:
    term = Counted(world.target.split("train"))
    expected = world.composition()
    whole = fit(expected, term, QUICK)
    composition = world.composition()
    with pytest.raises(StoppedError):
        fit(composition, term, QUICK, directory=tmp_path / "run", progress=StopAt(calls))
    resumed = world.composition()
    done = fit(resumed, term, QUICK, directory=tmp_path / "run", resume=True)
    assert torch.equal(resumed.values, expected.values)
    assert done.history == whole.history
    assert MADE[-1].hooks == MADE[-3].hooks and torch.equal(MADE[-1].seen, MADE[-3].seen)
