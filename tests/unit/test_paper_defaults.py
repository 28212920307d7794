"""Defaults of the paper: weight decay of linearised models, epochs of ResNets, prompts, and named vectors."""

from __future__ import annotations

from dataclasses import replace

import colours
import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn import functional
from typer.main import get_command

from aniso.cli.app import app
from aniso.data.card import known_card
from aniso.errors import UsageError
from aniso.experiments.methods.coefficients import LearnedCoefficients
from aniso.experiments.methods.weights import FineTunedWeights
from aniso.experiments.parsing import parse_setting
from aniso.experiments.problem import other_vectors
from aniso.experiments.settings.few_shot import FewShot
from aniso.experiments.settings.finetune import FineTune
from aniso.experiments.strict_yaml import Document
from aniso.learn import CrossEntropy, Schedule, Trainable, finetune, fit, tuned_weights
from aniso.learn._training.epoch_sampler import EpochSampler
from aniso.records import Spec

SCHEDULE = Schedule(epochs=2, lr=0.01, batch_size=8, weight_decay=3.0, max_grad_norm=1.0)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> colours.World:
    return colours.world(tmp_path_factory.mktemp("world"))


def trained_theta(world: colours.World, schedule: Schedule, *, decay_theta: bool) -> dict[str, torch.Tensor]:
    """Torch's own optimiser on theta, through f(x; theta0) + J (theta - theta0); the change of theta."""
    split = world.target.split("train")
    term = CrossEntropy(split)
    tangent = Trainable.weights(world.encoder, linearised=True)
    base = tangent.model.tuned()  # tau is zero
    theta = {n: nn.Parameter((base[n] if decay_theta else torch.zeros_like(base[n])).clone()) for n in base}
    kind = torch.optim.SGD if schedule.optimiser == "sgd" else torch.optim.AdamW
    more = {"momentum": 0.9} if schedule.optimiser == "sgd" else {}
    optimiser = kind(list(theta.values()), lr=schedule.lr, weight_decay=schedule.weight_decay, **more)
    head = world.encoder.class_weights(split.classes)
    sampler = EpochSampler([(split, term.views(world.encoder))], schedule, 0)
    done = 0
    for epoch in range(schedule.epochs):
        for (batch,) in sampler.epoch(epoch):
            offset = base if decay_theta else dict.fromkeys(base, 0.0)
            tangent.load({n: theta[n].detach() - offset[n] for n in theta})
            loss = functional.cross_entropy(head.logits(tangent.model(batch.inputs)), batch.labels)
            gradients = torch.autograd.grad(loss, list(tangent.tensors.values()))
            for parameter, gradient in zip(theta.values(), gradients, strict=True):
                parameter.grad = gradient
            nn.utils.clip_grad_norm_(list(theta.values()), schedule.max_grad_norm)
            for group in optimiser.param_groups:
                group["lr"] = schedule.rate(done, sampler.total_steps)
            optimiser.step()
            done += 1
    return {n: theta[n].detach() - (base[n] if decay_theta else 0) for n in theta}


@pytest.mark.parametrize("optimiser", ["adamw", "sgd"])
@pytest.mark.parametrize("decay", ["weights", "change"])
def test_weight_decay_of_a_linearised_model_acts_on_its_weights(
    world: colours.World, optimiser: str, decay: str
) -> None:
    schedule = replace(SCHEDULE, optimiser=optimiser)
    split = world.target.split("train")
    options = {} if decay == "weights" else {"decay": decay}
    trained = Trainable.weights(world.encoder, linearised=True, **options)
    fit(trained, CrossEntropy(split), schedule)
    expected = trained_theta(world, schedule, decay_theta=decay == "weights")
    other = trained_theta(world, schedule, decay_theta=decay != "weights")
    name = max(expected, key=lambda n: float((expected[n] - other[n]).abs().max()))
    for key, tensor in expected.items():
        torch.testing.assert_close(trained.tensors[key].detach(), tensor, rtol=2e-2, atol=2e-4)
    assert float((expected[name] - other[name]).abs().max()) > 0.01


@pytest.mark.parametrize("decay", ["weights", "change"])
def test_finetune_in_python_decays_as_it_is_told(world: colours.World, decay: str) -> None:
    split = world.target.split("train")
    trained = Trainable.weights(world.encoder, linearised=True, decay=decay)
    fit(trained, CrossEntropy(split), SCHEDULE)
    found = finetune(world.encoder, split, SCHEDULE, linearised=True, decay=decay).weights
    expected = tuned_weights(world.encoder, trained)
    assert all(torch.equal(found.read(name), expected.read(name)) for name in expected.tensors)


def test_decay_of_the_change_needs_a_linearised_model() -> None:
    with pytest.raises(ValueError, match="linearised"):
        FineTune(model="m", task="t", method=FineTunedWeights(decay="change")).check()


@pytest.mark.parametrize(
    ("model", "epochs"),
    [
        ("RN50", 30),
        ("RN101", 30),
        ("rn50-quickgelu", 30),
        ("timm/resnet50_clip.openai", 30),
        ("ViT-B-32", 10),
    ],
)
def test_resnets_have_three_times_the_epochs(model: str, epochs: int) -> None:
    alone = FewShot(model=model, bank="b", task="t")
    joint = FewShot(model=model, bank="b", task="t", head="tip", method=LearnedCoefficients(joint=True))
    assert (alone.schedule.epochs, joint.schedule.epochs) == (epochs, 2 * epochs)


def test_caltech256_has_clips_34_prompts() -> None:
    prompts = known_card("caltech256").prompts
    assert len(prompts) == 34 and prompts == known_card("caltech101").prompts


# vectors by name


def test_only_the_named_vectors_are_used() -> None:
    present = ["cars", "dtd", "mnist", "svhn"]
    assert other_vectors(present, "mnist", (), ("svhn", "cars")) == ["cars", "svhn"]
    assert other_vectors(present, "mnist", ()) == ["cars", "dtd", "svhn"]


@pytest.mark.parametrize(
    ("only", "message"), [("gtsrb", "no vector 'gtsrb' to use"), ("mnist", "task's own")]
)
def test_vectors_that_cannot_be_used_are_refused(only: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        other_vectors(["cars", "mnist"], "./MNIST", (), (only,))


# the setting that was called peft


def test_data_fraction_may_be_called_by_its_earlier_name() -> None:
    values = {"model": "mini", "bank": "mini", "task": "./t", "fraction": 0.5}
    earlier = parse_setting(Document("spec", {"setting": "peft", **values}, {}))
    today = parse_setting(Document("spec", {"setting": "data-fraction", **values}, {}))
    assert earlier == today and earlier.name == "data-fraction" and earlier.id == today.id


def test_records_of_the_earlier_name_are_read() -> None:
    values = {"setting": "peft", "model": "mini", "method": "none", "task": "t", "fraction": 0.5}
    assert Spec.model_validate(values).setting == "data-fraction"


def test_the_earlier_command_works_and_names_the_new_one() -> None:
    ran = CliRunner().invoke(get_command(app), ["fit", "peft", "--help"])
    assert ran.exit_code == 0 and "--fraction" in ran.output
    assert "is now called 'data-fraction'" in ran.stderr
