"""Schedules, accuracies, evaluation and fine-tuning on models small enough to know the answer."""

from __future__ import annotations

import itertools
import math
import shutil
from pathlib import Path

import pictures
import pytest
import tiny
import torch
from PIL import Image, ImageChops

from aniso.classes import ClassList
from aniso.compose import Composition, Linearised, Partition, Tangent
from aniso.data import Labelled, load_task
from aniso.learn import Accuracy, Schedule, evaluate, finetune
from aniso.learn.evaluate import _permuted
from aniso.models import ClassWeights, load_model
from aniso.vectors import Bank


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return load_model(tiny.hf_clip_directory(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Two classes that differ in colour, so that anything can learn them."""
    root = tmp_path_factory.mktemp("task")
    for part, first in (("train", 0), ("test", 1000)):
        for name, colour in (("red", (220, 30, 30)), ("blue", (30, 30, 220))):
            (root / part / name).mkdir(parents=True)
            for i in range(24):
                picture = pictures.picture(first + i).point(lambda v: v // 4)
                tinted = ImageChops.add(picture, Image.new("RGB", picture.size, colour))
                tinted.save(root / part / name / f"{i}.png")
    return load_task(root)


# schedules


def test_rates_rise_linearly_then_fall_as_a_cosine():
    schedule = Schedule(epochs=10, lr=2.0, batch_size=10, warmup_steps=4)
    steps = 100
    rates = [schedule.rate(step, steps) for step in range(steps)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4] == 2.0
    assert rates[52] == pytest.approx(1.0)
    assert all(a >= b for a, b in itertools.pairwise(rates[4:]))
    assert rates[-1] == pytest.approx(1 + math.cos(math.pi * 95 / 96))


def test_short_runs_do_not_end_while_warming_up():
    schedule = Schedule(epochs=1, lr=1.0, batch_size=1, warmup_steps=500)
    rates = [schedule.rate(step, 50) for step in range(50)]
    assert max(rates) == rates[4] == 1.0
    assert Schedule(epochs=1, lr=1.0, batch_size=8).rate(0, 1) == 1.0  # a single step


# accuracies


def test_intervals_are_wilsons():
    low, high = Accuracy(8, 10).interval
    assert (round(low, 4), round(high, 4)) == (0.4902, 0.9433)
    assert Accuracy(0, 5).interval[0] == 0.0
    assert Accuracy(5, 5).interval[1] == 1.0
    with pytest.raises(ValueError, match="no predictions"):
        Accuracy(0, 0)


def test_the_mean_over_classes_counts_each_the_same():
    result = Accuracy(11, 14, {"many": (10, 12), "few": (1, 2), "none": (0, 0)})
    assert result.value == 11 / 14
    assert result.per_class == (10 / 12 + 1 / 2) / 2


def test_evaluation_counts_what_the_head_says(encoder, task):
    head = encoder.class_weights(task.classes)
    result = evaluate(encoder, task.test, batch_size=7)
    images = torch.stack([encoder.transforms.eval(task.test.open(i), torch.Generator()) for i in range(48)])
    scores = head.logits(encoder(encoder.transforms.eval.finish(images)))
    assert result.correct == int((scores.argmax(-1) == torch.tensor(task.test.labels)).sum())
    assert result.total == 48
    assert sum(n for _, n in result.by_class.values()) == 48


def test_shuffled_class_names_leave_the_accuracy_as_it_is(encoder, task, tmp_path):
    for number, kind in (("2", "red"), ("1", "blue")):
        place = Path(task.test.items.describe(list(task.test.ids).index(f"test/{kind}/0.png"))).parent
        shutil.copytree(place, tmp_path / "test" / number)
    (tmp_path / "task.toml").write_text('[classes]\n"1" = "blue"\n"2" = "red"\n')
    other = load_task(tmp_path)
    assert other.classes.names == ("blue", "red")
    assert evaluate(encoder, other.test).by_class == evaluate(encoder, task.test).by_class


def test_labels_that_look_permuted_are_said(encoder, task):
    tuned = finetune(encoder, task.train, QUICK).model
    assert evaluate(tuned, task.test).notes == ()
    swapped = Labelled("swapped", task.classes, task.test.items, tuple(1 - i for i in task.test.labels))
    result = evaluate(tuned, swapped)
    assert result.value < 0.1
    assert "if classes were renamed" in result.notes[0]


def test_class_weights_of_other_classes_are_refused(encoder, task, refused):
    head = encoder.class_weights(ClassList(("red", "blue")))
    wrong_order = ClassWeights(("red", "blue"), head.weight)
    with refused("DATA-CLASS", 3, "order"):
        evaluate(encoder, task.test, head=wrong_order)


@pytest.mark.parametrize("matrix", [[[14, 6], [7, 13]], [[0, 90], [0, 10]], [[9, 1], [1, 9]]])
def test_weak_and_lazy_models_are_not_taken_for_permuted_labels(matrix, task):
    assert _permuted(torch.tensor(matrix), task.test) == ()


def test_what_has_no_labels_or_no_pictures_has_no_accuracy(encoder, task, refused):
    for split in (task.test.unlabelled(), task.test.take([])):
        with refused("DATA-SPLIT", 2, "labels"):
            evaluate(encoder, split)


@pytest.mark.parametrize(
    "wrong",
    [{"epochs": 0}, {"batch_size": 0}, {"lr": -1}, {"lr": math.nan}, {"max_grad_norm": 0}, {"lr": math.inf}],
)
def test_schedules_that_make_no_sense_are_refused(wrong, refused):
    with refused("USAGE", 2, next(iter(wrong))):
        Schedule(**{"epochs": 1, "lr": 1.0, **wrong})


def test_evaluation_leaves_the_mode_as_it_was(encoder, task):
    encoder.train()
    evaluate(encoder, task.test)
    assert encoder.training
    encoder.eval()


# fine-tuning

QUICK = Schedule(epochs=6, lr=2e-3, batch_size=16, weight_decay=0.0)


@pytest.mark.parametrize("linearised", [False, True])
def test_fine_tuning_learns_the_task_and_moves_the_image_encoder_alone(encoder, task, linearised):
    before = {key: value.clone() for key, value in encoder.state_dict().items()}
    tuned = finetune(encoder, task.train, QUICK, linearised=linearised)
    assert tuned.losses[-1] < 0.5 * tuned.losses[0]
    assert evaluate(tuned.model, task.test).value > 0.9
    blocks = {part.key for block in encoder.layout.blocks for part in block.parts}
    for key, value in before.items():
        assert torch.equal(encoder.state_dict()[key], value)  # the base is not touched
        assert torch.equal(tuned.weights.read(key), value) == (key not in blocks), key


@pytest.mark.parametrize("linearised", [False, True])
def test_a_bank_of_what_was_tuned_gives_the_tuned_model_back(encoder, task, linearised):
    tuned = finetune(encoder, task.train, QUICK, linearised=linearised)
    bank = Bank.build(encoder, {"colours": tuned.weights}, allow_distant=True)
    base = Linearised(encoder) if linearised else encoder
    composition = Composition(base, bank, Partition.whole())
    images = torch.randn(3, 3, 16, 16)
    if not linearised:  # whose attention runs in another form
        assert torch.equal(composition(images), encoder(images))
    torch.testing.assert_close(composition(images), encoder(images))
    with torch.no_grad():
        composition.values.fill_(1.0)
        torch.testing.assert_close(composition(images), tuned.model(images), rtol=1e-4, atol=1e-5)
    assert evaluate(composition, task.test).correct == evaluate(tuned.model, task.test).correct


def test_seeds_decide_fine_tuning_and_workers_do_not(encoder, task):
    short = Schedule(epochs=1, lr=1e-3, batch_size=16)
    runs = [
        finetune(encoder, task.train, short, seed=s, workers=w).losses for s, w in ((0, 0), (0, 2), (1, 0))
    ]
    assert runs[0] == runs[1] != runs[2]


def test_a_loss_that_explodes_is_an_error_with_its_place(encoder, task, refused):
    with refused("LEARN-NONFINITE", 6, "epoch", "learning rate"):
        finetune(encoder, task.train, Schedule(epochs=20, lr=1e30, batch_size=16))


def test_a_tangent_model_is_linear_in_what_moves(encoder):
    names = [part.key for block in encoder.layout.blocks for part in block.parts]
    model = Tangent(encoder, names)
    images = torch.randn(2, 3, 16, 16)
    at_zero = model(images)
    torch.testing.assert_close(at_zero, encoder(images))
    generator = torch.Generator().manual_seed(0)
    steps = [torch.randn(t.shape, generator=generator) * 0.01 for t in model.tau]

    def moved(scale: float) -> torch.Tensor:
        with torch.no_grad():
            for tau, step in zip(model.tau, steps, strict=True):
                tau.copy_(scale * step)
            return model(images) - at_zero

    torch.testing.assert_close(moved(2.0), 2 * moved(1.0), rtol=1e-4, atol=1e-5)
    small = moved(1e-3)
    state = {n: encoder.state_dict()[n] + 1e-3 * s for n, s in zip(names, steps, strict=True)}
    real = torch.func.functional_call(encoder, state, (images,)) - encoder(images)
    torch.testing.assert_close(small, real, rtol=2e-2, atol=1e-5)
