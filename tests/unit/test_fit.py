"""Fitting: steps against hand calculation, results that depend on seeds alone, failures that are named."""

from __future__ import annotations

import math
from dataclasses import replace

import colours
import pytest
import torch
from torch import nn
from torch.nn import functional

from aniso.compose import Linearised, Partition
from aniso.compose.composition import Composition
from aniso.data import Labelled
from aniso.learn import (
    Best,
    CoefficientNorm,
    CrossEntropy,
    Lowest,
    Schedule,
    Trainable,
    evaluate,
    fit,
)
from aniso.learn._training.epoch_sampler import EpochSampler
from aniso.learn._training.loop import Loop
from aniso.learn.finetune import tuned_weights
from aniso.learn.fit import _doubts
from aniso.learn.keep import Last
from aniso.records import EpochRow

SHORT = Schedule(epochs=2, lr=0.2, batch_size=8)
ONE_STEP = Schedule(epochs=1, lr=0.1, batch_size=16, max_grad_norm=1e6)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return colours.world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def good(world):
    """Coefficients that have learned the target."""
    composition = world.composition()
    return fit(composition, CrossEntropy(world.target.train), replace(SHORT, epochs=4)).coefficients


@pytest.fixture
def slow_halves():
    """Virtual machines name matrix instructions that they do not have, and oneDNN would use them."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def bytes_of(values):
    return values.detach().contiguous().view(torch.uint8).numpy().tobytes()


def batches_of(world, terms, schedule, seed=0, epoch=0):
    made = EpochSampler([(term.split, term.views(world.encoder)) for term in terms], schedule, seed)
    return list(made.epoch(epoch))


def gradient_of(world, composition, signed, schedule, step=0):
    """Of weighted cross-entropies on the batches of one step, written down once more."""
    total = 0.0
    for (weight, term), batch in zip(
        signed, batches_of(world, [term for _, term in signed], schedule)[step], strict=True
    ):
        head = world.encoder.class_weights(term.split.classes)
        features = functional.normalize(composition(batch.inputs), dim=-1)
        logits = features @ head.weight.T
        total = total + weight * -functional.log_softmax(logits, -1)[range(len(batch)), batch.labels].mean()
    (found,) = torch.autograd.grad(total, composition.values)
    return found


def gradients_in(world, objective, schedule, start=None):
    """What the loop itself adds up in its first step, before anything is clipped."""
    composition = world.composition()
    if start is not None:
        with torch.no_grad():
            composition.values.copy_(start)
    trained = Trainable.coefficients(composition)
    whole = objective * 1.0
    loop = Loop(trained, whole, schedule, Last())
    terms = [term for _, term in whole.data_terms]
    losses = loop._gradients(batches_of(world, terms, schedule)[0])
    return composition.values.grad, losses


def away_from_zero(world, size=0.1):
    generator = torch.Generator().manual_seed(3)
    return size * torch.randn(world.composition().values.shape, generator=generator)


# what a run does


def test_learning_lowers_the_loss_and_raises_the_accuracy(world):
    composition = world.composition()
    task = world.target
    done = fit(composition, CrossEntropy(task.train), replace(SHORT, epochs=4), keep=Best(task.val))
    losses = [row.loss for row in done.history[1:]]
    assert losses[-1] < 0.8 * losses[0]
    assert evaluate(composition, task.test).value > evaluate(world.encoder, task.test).value


def test_the_first_row_is_the_base(world):
    done = fit(world.composition(), CrossEntropy(world.target.train), SHORT, keep=Best(world.target.val))
    first = done.history[0]
    base = evaluate(world.encoder, world.target.val).value
    assert first.epoch == 0
    assert first.loss is None
    assert first.accuracy == {"target val": base}
    assert [row.epoch for row in done.history] == [0, 1, 2]


def test_rows_are_the_means_of_what_was_seen(world):
    task, other = world.target, world.control
    objective = CrossEntropy(task.train) - 0.5 * CrossEntropy(other.train) + 0.1 * CoefficientNorm()
    done = fit(world.composition(), objective, SHORT)
    for row in done.history[1:]:
        assert set(row.terms) == {"target train", "control train", "coefficients' 1-norm"}
        parts = row.terms
        expected = parts["target train"] - 0.5 * parts["control train"] + 0.1 * parts["coefficients' 1-norm"]
        assert row.loss == pytest.approx(expected)


def test_an_epochs_loss_weighs_every_picture_the_same(world):
    term = CrossEntropy(world.target.train.take(range(11)), "eval")
    schedule = Schedule(epochs=1, lr=1e-9, batch_size=4)
    row = fit(world.composition(), term, schedule).history[1]
    whole = replace(schedule, batch_size=11)
    assert row.loss == pytest.approx(fit(world.composition(), term, whole).history[1].loss, rel=1e-5)


def test_what_was_kept_is_in_the_composition(world):
    composition = world.composition()
    seen = []
    done = fit(
        composition,
        CrossEntropy(world.target.train),
        replace(SHORT, epochs=3),
        keep=Best(world.target.val),
        epoch_done=lambda row: seen.append(composition.values.detach().clone()),
    )
    assert [row.kept for row in done.history].count(True) == 1
    assert done.history[done.kept].kept
    assert torch.equal(composition.values, seen[done.kept])
    assert torch.equal(done.coefficients.values, seen[done.kept])
    value = evaluate(composition, world.target.val).value
    assert value == done.history[done.kept].accuracy["target val"]


def test_the_start_is_kept_if_nothing_is_better(world, good):
    task = world.target
    swapped = Labelled("swapped", task.classes, task.train.items, tuple(1 - i for i in task.train.labels))
    composition = world.composition().load(good)
    done = fit(composition, CrossEntropy(swapped), SHORT, keep=Best(task.val))
    assert done.kept == 0
    assert torch.equal(composition.values, good.values)
    assert torch.equal(done.coefficients.values, good.values)


def test_a_run_ends_when_its_rule_says_so(world, good):
    rule = Lowest(world.control.val, world.target.val)
    schedule = Schedule(epochs=30, lr=1.0, batch_size=16)
    done = fit(world.composition().load(good), -CrossEntropy(world.target.train), schedule, keep=rule)
    measured = [row.accuracy for row in done.history]
    assert len(measured) < 31
    assert rule.ends(measured)
    assert not rule.ends(measured[:-1])
    assert not done.history[-1].kept


@pytest.mark.parametrize(("losses", "said"), [((0.5, 1.1), True), ((0.5, 0.9), False), ((-2, -1), False)])
def test_a_loss_that_rose_is_said(losses, said):
    notes = _doubts([EpochRow(loss=loss) for loss in (None, *losses)])
    assert [("try a lower learning rate" in note) for note in notes] == [True] * said


# what it depends on


def test_seeds_decide_and_workers_do_not(world):
    found = []
    for seed, workers in ((0, 0), (0, 0), (0, 2), (1, 0)):
        composition = world.composition()
        done = fit(
            composition,
            CrossEntropy(world.target.train) - CrossEntropy(world.control.train),
            replace(SHORT, epochs=1),
            keep=Best(world.target.val),
            seed=seed,
            workers=workers,
        )
        found.append((bytes_of(done.coefficients.values), str(done.history)))
    assert found[0] == found[1] == found[2]
    assert found[0][0] != found[3][0]


def test_the_global_generator_is_not_touched(world):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one = fit(world.composition(), CrossEntropy(world.target.train), SHORT)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(6)
    other = fit(world.composition(), CrossEntropy(world.target.train), SHORT)
    assert torch.equal(one.coefficients.values, other.coefficients.values)


def with_dropout(model, p):
    for module in model.modules():
        if type(module).__name__.endswith("MLP"):
            module.register_forward_hook(lambda m, args, out: functional.dropout(out, p, training=m.training))


def test_dropout_inside_a_model_is_drawn_by_the_step(world):
    def run(p, seed, disturbed):
        torch.manual_seed(disturbed)
        trained = Trainable.weights(world.encoder)
        with_dropout(trained.model, p)
        before = torch.get_rng_state()
        fit(trained, CrossEntropy(world.target.train), SHORT, seed=seed)
        assert torch.equal(before, torch.get_rng_state())
        return b"".join(bytes_of(tensor) for tensor in trained.tensors.values())

    assert run(0.3, 0, 1) == run(0.3, 0, 2)
    assert run(0.3, 0, 1) != run(0.0, 0, 1)


def test_dropout_is_off_while_coefficients_are_learned(world):
    def run(p):
        composition = world.composition()
        with_dropout(composition.model, p)
        fit(composition, CrossEntropy(world.target.train), SHORT)
        return bytes_of(composition.values)

    assert run(0.3) == run(0.0)


def test_the_mode_of_a_model_does_not_matter(world):
    found = []
    for mode in (True, False):
        composition = world.composition().train(mode)
        fit(composition, CrossEntropy(world.target.train), SHORT)
        found.append(bytes_of(composition.values))
    assert found[0] == found[1]


# steps by hand


@pytest.mark.parametrize("clip", [1e6, 1e-3])
def test_a_step_is_adamw_with_clipping_and_decay(world, clip):
    start = away_from_zero(world)
    schedule = Schedule(
        epochs=1, lr=0.02, batch_size=16, max_grad_norm=clip, weight_decay=0.3, lr_schedule="constant"
    )
    composition = world.composition()
    with torch.no_grad():
        composition.values.copy_(start)
    term = CrossEntropy(world.target.train)
    grad = gradient_of(world, composition, [(1.0, term)], schedule).double()
    grad *= min(1.0, clip / (float(grad.norm()) + 1e-6))
    first, second = 0.1 * grad / (1 - 0.9), 0.001 * grad**2 / (1 - 0.999)
    expected = start.double() * (1 - 0.02 * 0.3) - 0.02 * first / (second.sqrt() + 1e-8)
    fit(composition, term, schedule)
    torch.testing.assert_close(composition.values.detach().double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", ["cosine", "constant"])
def test_two_steps_with_warm_up_follow_the_schedule(world, shape):
    schedule = Schedule(
        epochs=10,
        lr=0.01,
        batch_size=8,
        warmup_steps=2,
        max_grad_norm=1e6,
        weight_decay=0.0,
        lr_schedule=shape,
    )
    steps = 20
    rates = [0.005, 0.01, 0.01]
    rates.append(0.01 if shape == "constant" else 0.005 * (1 + math.cos(math.pi * 1 / 18)))
    term = CrossEntropy(world.target.train)
    composition = world.composition()
    values = torch.zeros_like(composition.values, dtype=torch.double)
    first = second = torch.zeros_like(values)
    batches = [batches_of(world, [term], schedule, epoch=epoch) for epoch in (0, 1)]
    head = world.encoder.class_weights(term.split.classes)
    for n, (batch,) in enumerate([*batches[0], *batches[1]]):
        assert schedule.rate(n, steps) == pytest.approx(rates[n])
        loss = functional.cross_entropy(head.logits(composition(batch.inputs)), batch.labels)
        grad = torch.autograd.grad(loss, composition.values)[0].double()
        first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad**2
        corrected = first / (1 - 0.9 ** (n + 1)), second / (1 - 0.999 ** (n + 1))
        values = values - rates[n] * corrected[0] / (corrected[1].sqrt() + 1e-8)
        with torch.no_grad():
            composition.values.copy_(values)
    fitted = world.composition()
    seen = []
    fit(
        fitted,
        term,
        schedule,
        epoch_done=lambda row: seen.append(fitted.values.detach().clone()),
    )
    torch.testing.assert_close(seen[2].double(), values, rtol=1e-3, atol=1e-5)


def test_shapes_differ_once_the_cosine_falls(world):
    found = []
    for shape in ("cosine", "constant"):
        composition = world.composition()
        fit(composition, CrossEntropy(world.target.train), replace(SHORT, lr_schedule=shape))
        found.append(composition.values.detach().clone())
    assert not torch.equal(*found)
    assert float(found[1].norm()) > float(found[0].norm())


def test_taking_a_task_away_from_a_control_gives_the_difference_of_gradients(world):
    target, control = CrossEntropy(world.target.train), CrossEntropy(world.control.train)
    start = away_from_zero(world)
    composition = world.composition()
    with torch.no_grad():
        composition.values.copy_(start)
    found, _ = gradients_in(world, control - target, ONE_STEP, start)
    signed = [(1.0, control), (-1.0, target)]
    both = gradient_of(world, composition, signed, ONE_STEP)
    torch.testing.assert_close(found, both, rtol=1e-4, atol=1e-6)
    alone = [gradient_of(world, composition, [pair], replace(ONE_STEP, batch_size=8)) for pair in signed]
    torch.testing.assert_close(found, alone[0] + alone[1], rtol=1e-4, atol=1e-6)


def test_a_step_of_negation_raises_the_loss_on_the_target(world):
    term, still = CrossEntropy(world.target.train, "eval"), replace(ONE_STEP, lr=1e-12)
    losses = []
    for weight, schedule in ((1, replace(ONE_STEP, lr=0.02)), (1, still), (-1, replace(ONE_STEP, lr=0.02))):
        composition = world.composition()
        fit(composition, weight * term, schedule)
        losses.append(fit(composition, term, still).history[1].loss)
    assert losses[0] < losses[1] < losses[2]


def test_a_value_term_adds_its_own_gradient_once(world):
    start = away_from_zero(world)
    term, norm = CrossEntropy(world.target.train), CoefficientNorm()
    without, _ = gradients_in(world, term, ONE_STEP, start)
    expected = without + 0.5 * start.sign() / len(world.composition().index.blocks)
    for micro in (None, 3):
        found, losses = gradients_in(world, term + 0.5 * norm, replace(ONE_STEP, micro_batch=micro), start)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        assert losses[norm.name] == (pytest.approx(float(norm.loss(start, world.composition().index))), 1)


# slices


@pytest.mark.parametrize("micro", [1, 3, 5, 16])
def test_slices_of_a_step_give_the_gradient_of_the_whole(world, micro):
    start = away_from_zero(world)
    target, control = CrossEntropy(world.target.train), CrossEntropy(world.control.train)
    for objective in (target, control - 0.7 * target):
        whole, losses = gradients_in(world, objective, ONE_STEP, start)
        sliced, parts = gradients_in(world, objective, replace(ONE_STEP, micro_batch=micro), start)
        torch.testing.assert_close(sliced, whole, rtol=1e-4, atol=1e-6)
        assert {n: (pytest.approx(v, rel=1e-5), c) for n, (v, c) in losses.items()} == parts


@pytest.mark.parametrize("micro", [1, 3, 4])
def test_no_slice_has_more_pictures_than_was_asked_for(world, micro, monkeypatch):
    sizes = []
    forward = Composition.forward
    monkeypatch.setattr(Composition, "forward", lambda self, x: sizes.append(len(x)) or forward(self, x))
    objective = CrossEntropy(world.target.train) - CrossEntropy(world.control.train)
    fit(world.composition(), objective, Schedule(epochs=1, lr=0.01, batch_size=10, micro_batch=micro))
    assert set(sizes) <= set(range(1, micro + 1))


def test_a_short_last_batch_is_sliced_too(world):
    objective = CrossEntropy(world.target.train.take(range(9))) + CrossEntropy(world.control.train)
    schedule = Schedule(epochs=1, lr=0.01, batch_size=8, max_grad_norm=1e6)
    runs = [
        fit(world.composition(), objective, replace(schedule, micro_batch=micro)).history[1].loss
        for micro in (None, 3)
    ]
    assert runs[0] == pytest.approx(runs[1], rel=1e-4)


# precision


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_learns_nearly_the_same(world, precision, slow_halves):
    losses = []
    for kind in ("fp32", precision):
        composition = world.composition()
        done = fit(composition, CrossEntropy(world.target.train), replace(SHORT, epochs=3, precision=kind))
        assert composition.values.dtype == torch.float32
        losses.append(done.history[-1].loss)
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def test_gradients_are_clipped_after_they_are_scaled_back(world, slow_halves):
    """With plain descent in place of Adam, which would hide a factor, steps show the gradient's size."""
    found = {}
    for precision in ("fp32", "fp16"):
        composition = world.composition()
        schedule = Schedule(
            epochs=1,
            lr=1.0,
            batch_size=16,
            max_grad_norm=0.01,
            weight_decay=0.0,
            lr_schedule="constant",
            precision=precision,
            optimiser="sgd",
        )
        loop = Loop(
            Trainable.coefficients(composition), CrossEntropy(world.target.train) * 1.0, schedule, Last()
        )
        list(loop.run(lambda *_: None, lambda: None))
        found[precision] = composition.values.detach().clone()
    assert float(found["fp32"].norm()) == pytest.approx(0.01, rel=1e-3)
    assert float(found["fp16"].norm()) == pytest.approx(0.01, rel=1e-3)
    torch.testing.assert_close(found["fp16"], found["fp32"], rtol=0.1, atol=2e-4)


def test_a_step_that_overflows_in_half_precision_is_left_out(world, slow_halves):
    composition = world.composition()
    schedule = Schedule(epochs=1, lr=0.1, batch_size=16, precision="fp16")
    loop = Loop(Trainable.coefficients(composition), CrossEntropy(world.target.train) * 1.0, schedule, Last())
    loop._scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    list(loop.run(lambda *_: None, lambda: None))
    assert torch.equal(composition.values, torch.zeros_like(composition.values))
    assert loop._scaler.get_scale() == 2.0**119


def test_gradients_that_no_scale_makes_finite_are_an_error(world, slow_halves, refused):
    composition = world.composition()
    composition.values.register_hook(lambda grad: grad * math.nan)
    schedule = Schedule(epochs=2, lr=0.1, batch_size=1, precision="fp16")
    with refused("LEARN-NONFINITE", 6, "gradient"):
        fit(composition, CrossEntropy(world.target.train), schedule)


# weights in place of coefficients


@pytest.mark.parametrize("linearised", [False, True])
def test_weights_are_trained_and_the_base_is_left_alone(world, linearised):
    before = {key: value.clone() for key, value in world.encoder.state_dict().items()}
    trained = Trainable.weights(world.encoder, linearised=linearised)
    blocks = {part.key for block in world.encoder.layout.blocks for part in block.parts}
    assert set(trained.tensors) == blocks
    assert trained.count == sum(before[key].numel() for key in blocks)
    done = fit(trained, CrossEntropy(world.target.train), Schedule(epochs=3, lr=1e-3, batch_size=8))
    assert done.coefficients is None
    assert done.history[-1].loss < done.history[1].loss
    moved = tuned_weights(world.encoder, trained)
    for key, value in before.items():
        assert torch.equal(world.encoder.state_dict()[key], value)
        assert torch.equal(moved.read(key), value) == (key not in blocks)


@pytest.mark.parametrize("linearised", [False, True])
def test_kept_weights_are_those_of_the_kept_epoch(world, linearised):
    trained = Trainable.weights(world.encoder, linearised=linearised)
    seen = []
    done = fit(
        trained,
        CrossEntropy(world.target.train),
        Schedule(epochs=3, lr=3e-3, batch_size=8),
        keep=Best(world.target.val),
        epoch_done=lambda row: seen.append(trained.copied()),
    )
    assert all(torch.equal(trained.tensors[n], seen[done.kept][n]) for n in trained.tensors)


def test_a_linearised_composition_learns_like_any_other(world):
    composition = Composition(Linearised(world.encoder), world.bank)
    done = fit(composition, CrossEntropy(world.target.train), replace(SHORT, epochs=4))
    assert done.history[-1].loss < done.history[1].loss


@pytest.mark.parametrize("partition", ["whole", "random:2", "blocks@weight"])
def test_every_partition_learns(world, partition):
    composition = world.composition(Partition.parse(partition))
    done = fit(composition, CrossEntropy(world.target.train) + 0.001 * CoefficientNorm(2), SHORT)
    assert done.history[-1].loss < done.history[1].loss
    assert len(done.coefficients) == composition.index.count


# what is refused


def test_an_objective_needs_pictures(world, refused):
    with refused("OBJECTIVE", 2, "no split to learn from"):
        fit(world.composition(), CoefficientNorm(), SHORT)


def test_terms_about_coefficients_are_refused_for_weights(world, refused):
    with refused("OBJECTIVE", 2, "1-norm", "weights are trained"):
        fit(
            Trainable.weights(world.encoder),
            CrossEntropy(world.target.train) + 0.1 * CoefficientNorm(),
            SHORT,
        )


def test_the_same_term_twice_is_refused(world, refused):
    term = CrossEntropy(world.target.train)
    for objective in (term + term, term - 0.5 * CrossEntropy(world.target.train, "eval")):
        with refused("OBJECTIVE", 2, "target train", "twice"):
            fit(world.composition(), objective, SHORT)
    with refused("OBJECTIVE", 2, "1-norm", "twice"):
        fit(world.composition(), term + CoefficientNorm() + CoefficientNorm(), SHORT)


def test_what_is_no_encoder_cannot_be_trained(world, refused):
    layer = nn.Linear(2, 2)
    trained = Trainable(layer, {"weight": layer.weight}, {})
    with refused("MODEL-NAME", 2, "Linear"):
        fit(trained, CrossEntropy(world.target.train), SHORT)


def test_names_of_tasks_may_begin_with_anything(world, tmp_path):
    odd = colours.task(tmp_path / "#odd", {"train": 2, "val": 1})
    objective = CrossEntropy(odd.train) + CrossEntropy(world.target.train)
    row = fit(world.composition(), objective, SHORT).history[-1]
    assert set(row.terms) == {"#odd train", "target train"}
    assert row.loss == pytest.approx(sum(row.terms.values()))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("epochs", value) for value in (1.5, True)),
        *(("micro_batch", value) for value in (0, 1.5)),
        *(("warmup_steps", value) for value in (-1, 0.5)),
        ("batch_size", 2.5),
        ("min_steps_per_epoch", 0),
        ("lr_schedule", "linear"),
        ("precision", "fp8"),
    ],
)
def test_schedules_that_cannot_be_followed_are_refused(name, value, refused):
    with refused("USAGE", 2, name):
        Schedule(**{"epochs": 1, "lr": 1.0, name: value})


# what goes wrong


def test_a_loss_that_is_not_finite_names_its_pictures(world, refused):
    composition = world.composition()
    with torch.no_grad():
        composition.values.fill_(1e30)
    with refused("LEARN-NONFINITE", 6, "control train", "epoch 1, step 1", "learning rate") as refusal:
        fit(composition, CrossEntropy(world.control.train), Schedule(epochs=1, lr=0.1, batch_size=4))
    named = refusal.error.facts["images"]
    order = batches_of(world, [CrossEntropy(world.control.train)], Schedule(epochs=1, lr=0.1, batch_size=4))
    assert named == [world.control.train.items.describe(i) for i in order[0][0].indices]


def test_one_picture_that_is_not_finite_is_among_those_named(world, refused, monkeypatch):
    view = world.encoder.transforms.eval
    marked = view(world.control.train.open(0), torch.Generator())
    finish = type(view).finish

    def broken(self, pixels):
        out = finish(self, pixels)
        out[[torch.equal(one, marked) for one in pixels]] = math.nan
        return out

    monkeypatch.setattr(type(view), "finish", broken)
    objective = CrossEntropy(world.target.train, "eval") + CrossEntropy(world.control.train, "eval")
    with refused("LEARN-NONFINITE", 6, "control train") as refusal:
        fit(world.composition(), objective, Schedule(epochs=1, lr=1e-6, batch_size=8))
    named = refusal.error.facts["images"]
    assert world.control.train.items.describe(0) in named
    assert len(named) == 4


@pytest.mark.parametrize("linearised", [False, True])
def test_weights_that_are_not_finite_are_an_error(world, refused, linearised):
    trained = Trainable.weights(world.encoder, linearised=linearised)
    with torch.no_grad():
        next(iter(trained.tensors.values())).fill_(math.nan)
    with refused("LEARN-NONFINITE", 6, "target train"):
        fit(trained, CrossEntropy(world.target.train), SHORT)
    with refused("LEARN-NONFINITE", 6, "target val"):
        fit(trained, CrossEntropy(world.target.train), SHORT, keep=Best(world.target.val))


def test_a_single_class_teaches_nothing(world, tmp_path, refused):
    single = colours.task(tmp_path / "single", {"train": 4, "val": 1}, ("red",))
    with refused("LEARN-GRADIENT", 6, "gradient", "is zero", "single class"):
        fit(world.composition(), CrossEntropy(single.train), SHORT)


def test_a_step_that_does_not_fit_into_memory_says_what_would(world, refused, monkeypatch):
    def full(self, images):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(Composition, "forward", full)
    with refused("OUT-MEMORY", 5, "8 images", "--micro-batch 4"):
        fit(world.composition(), CrossEntropy(world.target.train), SHORT)
