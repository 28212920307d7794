"""Learning in rounds: the difference vector, coefficients folded back, and exact resumption."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import colours
import pytest
import runs
import torch

from aniso.compose import Composition, Linearised, Partition, difference_vector, folded
from aniso.errors import StoppedError
from aniso.experiments.result import RunOptions
from aniso.experiments.session import Session
from aniso.experiments.settings.addition import Addition
from aniso.learn import Best, CrossEntropy, Schedule, features, fit, rounds_of
from aniso.vectors import Bank

Refused = Callable[..., AbstractContextManager[Any]]

QUICK = Schedule(epochs=2, lr=0.1, batch_size=8)
PARTITIONS = ("blocks", "whole", "rows", "random:3", "blocks@weight")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> colours.World:
    return colours.world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> runs.Shelf:
    return runs.shelf(tmp_path_factory.mktemp("shelf"))


def at_random(composition: Composition, seed: int = 1) -> Composition:
    with torch.no_grad():
        g = torch.Generator().manual_seed(seed)
        composition.values.copy_(0.3 * torch.randn(composition.values.shape, generator=g))
    return composition


def extended(composition: Composition) -> Composition:
    difference = difference_vector(composition.bank, composition.coefficients, "difference")
    assert difference is not None
    own = {name: composition.bank[name] for name in composition.bank}
    return composition.with_bank(Bank({**own, "difference": difference}))


# the difference vector


@pytest.mark.parametrize("partition", PARTITIONS)
def test_the_difference_is_composed_minus_base(world: colours.World, partition: str) -> None:
    composition = at_random(world.composition(Partition.parse(partition)))
    found = difference_vector(composition.bank, composition.coefficients, "difference")
    assert found is not None and found.name == "difference"
    own = {"difference": found}
    whole = Composition(world.encoder, Bank(own), Partition.whole())
    with torch.no_grad():
        whole.values.fill_(1.0)
    composed, again = composition.weights(), whole.weights()
    assert set(again) <= set(composed)
    for name, tensor in again.items():
        torch.testing.assert_close(tensor, composed[name], rtol=1e-5, atol=1e-6)


def test_no_coefficient_gives_no_difference(world: colours.World) -> None:
    composition = world.composition()
    assert difference_vector(composition.bank, composition.coefficients, "difference") is None


@pytest.mark.parametrize("partition", PARTITIONS)
def test_folded_coefficients_are_the_same_model(world: colours.World, partition: str) -> None:
    composition = at_random(world.composition(Partition.parse(partition)))
    before = composition.coefficients
    more = at_random(extended(composition), 2)
    split = world.target.val.unlabelled()
    expected = features(more, split)
    with torch.no_grad():
        composition.values.copy_(folded(more.index, more.values.detach(), before, "difference"))
    torch.testing.assert_close(features(composition, split), expected, rtol=1e-4, atol=1e-5)


def test_folding_is_mu_plus_c_times_lambda(world: colours.World) -> None:
    composition = at_random(world.composition())
    before, more = composition.coefficients, at_random(extended(composition), 2)
    values = folded(more.index, more.values.detach(), before, "difference")
    found = more.coefficients
    for vector in ("one", "two"):
        for block in before.blocks:
            c, mu = found.of("difference", block), found.of(vector, block)
            expected = mu + c * before.of(vector, block)
            torch.testing.assert_close(values[before.index.cell(vector, block)], expected)


# rounds


def test_a_round_starts_where_the_last_one_ended(world: colours.World) -> None:
    term = CrossEntropy(world.target.train, view="eval")
    split, starts, ends = world.target.val.unlabelled(), [], []
    composition = world.composition()
    for model in rounds_of(composition, 3):
        starts.append(features(model, split))
        fit(model, term, QUICK)
        ends.append(features(model, split))
    assert len(ends) == 3
    for end, start in zip(ends, starts[1:], strict=False):
        torch.testing.assert_close(start, end, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(features(composition, split), ends[-1], rtol=1e-4, atol=1e-5)
    assert composition.bank.names == ("one", "two")


def test_rounds_never_lose_what_the_keep_rule_measures(world: colours.World) -> None:
    keep, term = Best(world.target.val), CrossEntropy(world.target.train)
    done = [fit(model, term, QUICK, keep=keep) for model in rounds_of(world.composition(), 3)]
    kept = [one.history[one.kept].accuracy[world.target.val.name] for one in done]
    assert kept == sorted(kept)


def test_one_round_is_the_composition_itself(world: colours.World) -> None:
    composition = world.composition()
    assert [*rounds_of(composition, 1)] == [composition]


def test_rounds_of_a_linearised_model(world: colours.World) -> None:
    composition = Composition(Linearised(world.encoder), world.bank)
    term = CrossEntropy(world.target.train)
    done = [fit(model, term, QUICK) for model in rounds_of(composition, 2)]
    assert len(done) == 2 and composition.coefficients.linearised


def test_a_round_that_changes_nothing_is_the_last(world: colours.World) -> None:
    assert len([*rounds_of(world.composition(), 4)]) == 1


def test_the_difference_has_a_name_of_its_own(world: colours.World) -> None:
    vectors = {"difference": world.bank["one"], "two": world.bank["two"]}
    composition = at_random(Composition(world.encoder, Bank(vectors)))
    names = [model.bank.names for model in rounds_of(composition, 2)]
    assert names == [("difference", "two"), ("difference", "two", "difference+")]


def test_a_round_without_a_step_gives_the_same_coefficients(world: colours.World) -> None:
    composition = at_random(world.composition())
    before = composition.values.detach().clone()
    for _ in rounds_of(composition, 3):
        pass
    assert torch.equal(composition.values.detach(), before)


def test_a_number_of_rounds_below_one_is_refused(world: colours.World, refused: Refused) -> None:
    with refused("USAGE", 2, "0 rounds"):
        next(rounds_of(world.composition(), 0))


# runs


def setting(shelf: runs.Shelf, **options: Any) -> Addition:
    from aniso.experiments.methods.coefficients import LearnedCoefficients
    from aniso.experiments.schedule_options import ScheduleOptions

    method = LearnedCoefficients(
        rounds=3, schedule=ScheduleOptions(epochs=2, lr=0.1, batch_size=4), **options
    )
    tasks = tuple(str(shelf.data / name) for name in ("cars", "dtd"))
    return Addition(
        model=str(shelf.model),
        bank=str(shelf.bank),
        tasks=tasks,
        method=method,
        choose_by="last",
        compare=False,
    )


@pytest.mark.parametrize("steps", [1, 9, 17])
def test_a_run_is_resumed_exactly_in_every_round(shelf: runs.Shelf, tmp_path: Path, steps: int) -> None:
    made = setting(shelf)
    expected = Session(made, RunOptions(directory=tmp_path / "whole")).run()
    with pytest.raises(StoppedError):
        Session(made, RunOptions(directory=tmp_path / "cut", progress=runs.StopAfterSteps(steps))).run()
    found = Session(made, RunOptions(directory=tmp_path / "cut", resume=True)).run()
    assert expected.coefficients is not None and found.coefficients is not None
    assert torch.equal(found.coefficients.values, expected.coefficients.values)
    assert found.metrics.history == expected.metrics.history
    assert [row.round for row in found.metrics.history] == [1] * 3 + [2] * 3 + [3] * 3


def test_rounds_from_the_command_line(aniso: Any, shelf: runs.Shelf, tmp_path: Path) -> None:
    tasks = ("--task", shelf.data / "cars", "--task", shelf.data / "dtd", "--no-compare")
    given = ("fit", "addition", *shelf.base, *tasks, "--epochs", 1, "--batch-size", 4, "--lr", 0.1)
    run = tmp_path / "run"
    ran = aniso(*given, "--rounds", 2, "--choose-by", "last", "-o", run)
    assert ran.code == 0, ran.err
    assert (run / "round-2" / "metrics.jsonl").is_file()
    assert not [*run.rglob("state-*")]
    again = aniso(*given, "--rounds", 2, "--choose-by", "last", "-o", run, "--resume")
    assert again.code == 0, again.err
    planned = aniso(*given, "--rounds", 2, "--plan")
    assert planned.code == 0 and "2 rounds" in planned.out + planned.err
    refused = aniso(*given, "--rounds", 2, "--factors")
    assert refused.code == 2 and "rounds" in refused.err


def test_one_round_has_the_id_from_before_rounds(shelf: runs.Shelf) -> None:
    made = setting(shelf)
    one = made.model_copy(update={"method": made.method.model_copy(update={"rounds": 1})})
    assert "rounds" not in one._identity() and "rounds" in made._identity()
