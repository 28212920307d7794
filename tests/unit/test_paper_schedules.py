"""Schedules of the paper: the number of steps in every setting, and validation within epochs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import colours
import pytest
import torch

from aniso.errors import UsageError
from aniso.experiments.settings.addition import Addition
from aniso.experiments.settings.finetune import FineTune
from aniso.experiments.settings.negation import Negation
from aniso.learn import Best, CrossEntropy, Lowest, fit
from aniso.learn._training.epoch_sampler import EpochSampler
from aniso.schedule import Schedule

VAL = {  # images of the validation splits
    "cars": 814,
    "dtd": 376,
    "eurosat": 2700,
    "gtsrb": 2664,
    "mnist": 5000,
    "resisc45": 1890,
    "sun397": 1985,
    "svhn": 5000,
    "imagenet": 5000,
}
STEPS = {"dtd": 120, "mnist": 553, "svhn": 158, "cars": 260}


@dataclass(frozen=True)
class Images:
    """A split of which only the size matters."""

    count: int

    def __len__(self) -> int:
        return self.count


def sampler(schedule: Schedule, *counts: int, target: int | None = None) -> EpochSampler:
    return EpochSampler([(Images(count), ()) for count in counts], schedule, 0, (), target)  # type: ignore[misc]


@pytest.mark.parametrize("target", sorted(STEPS))
@pytest.mark.parametrize("place", ["", "./", "data/", "/mnt/"])
def test_a_negation_takes_the_papers_steps(target: str, place: str) -> None:
    setting = Negation(model="ViT-B-32", bank="bank", target=place + target, control="imagenet")
    found = sampler(setting.schedule, VAL["imagenet"], VAL[target], target=1)
    assert found.total_steps == STEPS[target]


def test_an_addition_of_eight_tasks_takes_480_steps() -> None:
    tasks = tuple(name for name in VAL if name != "imagenet")
    setting = Addition(model="ViT-B-32", bank="bank", tasks=tasks)
    assert sampler(setting.schedule, *(VAL[name] for name in tasks)).total_steps == 480


@pytest.mark.parametrize(
    "schedule",
    [
        Negation(model="m", bank="b", target="dtd", control="imagenet").schedule,
        Addition(model="m", bank="b", tasks=("dtd",)).schedule,
    ],
)
def test_the_rate_of_negation_and_addition_is_constant(schedule: Schedule) -> None:
    assert [schedule.rate(step, 500) for step in (0, 1, 250, 499)] == [schedule.lr] * 4


def test_an_epoch_is_a_pass_over_the_chosen_split() -> None:
    schedule = Schedule(epochs=3, lr=0.1, batch_size=8)
    steps = {"longest": 25, "smallest": 3, "target": 10}
    for epoch_of, expected in steps.items():
        found = sampler(replace(schedule, epoch_of=epoch_of), 50, 20, 5, target=1)  # 2 images of each
        assert (found.steps, found.total_steps) == (expected, 3 * expected)
    with pytest.raises(UsageError, match="negative weight"):
        _ = sampler(replace(schedule, epoch_of="target"), 50, 20).steps


def test_steps_replace_epochs() -> None:
    found = sampler(Schedule(epochs=3, lr=0.1, batch_size=8, steps=60), 200)
    assert (found.steps, found.total_steps, found.epochs) == (25, 60, 3)
    with pytest.raises(UsageError, match="steps"):
        Schedule(epochs=3, lr=0.1, steps=0)


@pytest.mark.parametrize("ref", ["mnist", "./mnist", "data/MNIST", "../sets/mnist.toml"])
def test_fine_tuning_on_a_known_task_takes_the_papers_epochs_wherever_it_lies(ref: str) -> None:
    assert FineTune(model="m", task=ref).schedule.epochs == 5
    assert FineTune(model="m", task="./photos").schedule.epochs == 10


# validation within an epoch


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return colours.world(tmp_path_factory.mktemp("world"))


def test_a_run_ends_at_the_first_validation_below_the_floor(world) -> None:
    target, control = world.target.val, world.control.val
    objective = -CrossEntropy(world.control.train)
    schedule = Schedule(epochs=40, lr=1.0, batch_size=4, warmup_steps=0, lr_schedule="constant")
    keep = Lowest(target, control, 1.0)
    plain = fit(world.composition(), objective, schedule, keep=keep)
    found = fit(world.composition(), objective, replace(schedule, validate_every=1), keep=keep)
    accuracies = [row.accuracy[control.name] for row in found.history]
    assert all(value >= accuracies[0] for value in accuracies[:-1]) and accuracies[-1] < accuracies[0]
    assert [row.step for row in found.history] == list(range(len(found.history)))
    per_epoch = sampler(schedule, *(len(term.split) for _, term in objective.data_terms)).steps
    assert found.history[-1].step <= (len(plain.history) - 1) * per_epoch


def test_validating_more_often_does_not_change_the_training(world) -> None:
    schedule = Schedule(epochs=2, lr=0.2, batch_size=4)
    objective, keep = CrossEntropy(world.target.train), Best(world.target.val)
    plain = fit(world.composition(), objective, schedule, keep=keep)
    often = fit(world.composition(), objective, replace(schedule, validate_every=2), keep=keep)
    ends = [
        often.history[0],
        *(b for a, b in zip(often.history, often.history[1:], strict=False) if b.epoch > a.epoch),
    ]
    assert [row.accuracy for row in ends] == [row.accuracy for row in plain.history]
    assert len(often.history) > len(plain.history)


def test_a_run_of_so_many_steps_is_the_start_of_a_longer_one(world) -> None:
    schedule = Schedule(epochs=3, lr=0.2, batch_size=4, warmup_steps=0, lr_schedule="constant")
    objective = CrossEntropy(world.target.train)
    found = fit(world.composition(), objective, replace(schedule, steps=5))
    assert found.history[-1].step == 5
    longer = fit(
        world.composition(), objective, replace(schedule, validate_every=5), keep=Best(world.target.val)
    )
    short = fit(world.composition(), objective, replace(schedule, steps=5), keep=Best(world.target.val))
    at = next(row for row in longer.history if row.step == 5)
    assert short.history[-1].accuracy == at.accuracy


def test_a_run_interrupted_within_an_epoch_resumes_to_the_same_result(world, tmp_path) -> None:
    schedule = Schedule(epochs=2, lr=0.2, batch_size=4, validate_every=2)
    objective, keep = CrossEntropy(world.target.train), Best(world.target.val)
    whole = fit(world.composition(), objective, schedule, keep=keep)

    class StopError(Exception):
        pass

    def stop(row) -> None:
        if row.step == 2:
            raise StopError

    with pytest.raises(StopError):
        fit(world.composition(), objective, schedule, keep=keep, directory=tmp_path, epoch_done=stop)
    resumed = fit(world.composition(), objective, schedule, keep=keep, directory=tmp_path, resume=True)
    assert resumed.history == whole.history
    assert torch.equal(resumed.coefficients.values, whole.coefficients.values)
