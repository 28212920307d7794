"""SetFit: pairs of shots, the cosine-similarity loss, and the method from pairs to a logistic regression."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import colours
import pytest
import sentences
import torch

import aniso
from aniso.data import load_task
from aniso.data.pairs import pairs
from aniso.experiments.session import Session
from aniso.learn import CosinePairs, Schedule, Trainable, accuracy, fit, predict
from aniso.learn.objectives import TermInputs

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("setfit")
    sentences.save(root / "base", length=20)
    sentences.write_task(root / "reviews.csv", 20)
    return root


@pytest.fixture(scope="module")
def shots(place):
    return load_task(place / "reviews.csv").train.shots(3)


def members(drawn):
    """The indices of both items of every pair."""
    return list(drawn.items._pairs)


# pairs


@pytest.mark.parametrize("iterations", [1, 4])
def test_every_item_gets_a_pair_of_each_kind_in_every_iteration(shots, iterations):
    drawn = pairs(shots, iterations=iterations)
    assert len(drawn) == 2 * iterations * len(shots)
    assert Counter(drawn.labels) == {1: iterations * len(shots), 0: iterations * len(shots)}
    firsts = Counter((one, same) for (one, _), same in zip(members(drawn), drawn.labels, strict=True))
    assert set(firsts.values()) == {iterations} and len(firsts) == 2 * len(shots)


@pytest.mark.parametrize("how", ["iterations", "oversampling"])
def test_labels_say_whether_classes_are_equal_and_no_item_is_paired_with_itself(shots, how):
    drawn = pairs(shots, how)
    for (one, other), same in zip(members(drawn), drawn.labels, strict=True):
        assert one != other and same == (shots.labels[one] == shots.labels[other])
    assert drawn.open(0) == tuple(shots.open(i) for i in members(drawn)[0])
    assert len(set(drawn.ids)) == len(drawn)


def test_oversampling_has_every_pair_and_as_many_of_each_kind(shots):
    drawn = pairs(shots, "oversampling")
    found = {frozenset(pair) for pair in members(drawn)}
    assert found == {frozenset(pair) for pair in combinations(range(6), 2)}
    assert Counter(drawn.labels) == {
        1: 9,
        0: 9,
    }  # 9 pairs of two classes, and 3 + 3 of one, some of them twice
    counts = Counter(frozenset(pair) for pair in members(drawn))
    assert set(counts.values()) == {1, 2}


def test_pairs_depend_on_the_seed_and_not_on_the_order_of_items(shots):
    def contents(split, seed):
        return Counter(drawn.open(i) for drawn in [pairs(split, seed=seed)] for i in range(len(drawn)))

    turned = shots.take(list(reversed(range(len(shots)))))
    assert contents(shots, 0) == contents(turned, 0) != contents(shots, 1)
    assert pairs(shots).manifest == pairs(shots).manifest != pairs(shots, seed=1).manifest


def test_a_class_with_one_item_has_no_pairs_of_its_own_and_one_class_is_refused(shots, refused):
    single = shots.take([i for i in range(6) if shots.labels[i] == 0] + [shots.labels.index(1)])
    alone = len(single) - 1
    assert not any(pair == (alone, alone) for pair in members(pairs(single)))
    assert Counter(pairs(single, iterations=1).labels) == {1: 3, 0: 4}
    with refused("OBJECTIVE", 2, "two classes"):
        pairs(shots.take([i for i in range(6) if shots.labels[i] == 0]))
    with refused("OBJECTIVE", 2, "at least one iteration"):
        pairs(shots, iterations=0)


# the loss


def test_the_loss_is_the_mean_squared_error_of_cosines(shots):
    term = CosinePairs(pairs(shots))
    rng = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 5, 7, generator=rng)
    labels = torch.tensor([1, 0, 0, 1, 1])
    found = term.loss(TermInputs((one, other), (), labels))
    expected = 0.0
    for a, b, y in zip(one, other, labels.tolist(), strict=True):
        expected += (float(a @ b / (a.norm() * b.norm())) - y) ** 2 / 5
    assert float(found) == pytest.approx(expected, rel=1e-5)
    assert float(term.loss(TermInputs((one, one), (), torch.ones(5)))) == pytest.approx(0, abs=1e-10)


def test_pairs_are_needed_and_not_of_test_items(shots, place, refused):
    with refused("OBJECTIVE", 2, "pairs"):
        CosinePairs(shots)
    with refused("LEARN-TEST", 2, "testing"):
        CosinePairs(pairs(load_task(place / "reviews.csv").test))
    with refused("OBJECTIVE", 2, "strong"):
        CosinePairs(pairs(shots), view="strong")


def test_training_moves_pairs_of_one_class_together_on_texts_and_on_images(place, shots, tmp_path):
    world = colours.world(tmp_path)
    schedule = Schedule(epochs=3, lr=3e-3, batch_size=8, warmup_steps=0, weight_decay=0.0)
    for encoder, split in (
        (aniso.load_model(place / "base"), shots),
        (world.encoder, world.target.train.shots(2)),
    ):
        done = fit(Trainable.weights(encoder), CosinePairs(pairs(split, iterations=4)), schedule)
        losses = [row.loss for row in done.history if row.loss is not None]
        assert losses[-1] < 0.7 * losses[0]


# the method


def setting(place, **more):
    given = {"model": str(place / "base"), "task": str(place / "reviews.csv"), "shots": 3, "seed": 1}
    return aniso.recipes.setting("few-shot", method="setfit", **given, **more)


def test_setfit_fine_tunes_on_pairs_and_ends_with_a_logistic_regression(place):
    made = setting(place, schedule={"lr": 1e-2, "epochs": 2})
    session = Session(made)
    plan = session.plan()
    assert plan.steps == 30 and list(plan.learned_from.values()) == [240]  # 2 x 20 pairs of 6 shots, by 16
    result = session.run()
    assert result.metrics.epochs == 2 and result.head is not None and result.head.kind == "linear"
    assert result.head.settings()["decay"] == pytest.approx(1 / 6)
    tuned = aniso.load_model(place / "base", result.weights)
    assert accuracy(predict(tuned, session.shots, head=result.head), session.shots).value == 1.0
    assert result.metrics.accuracy["reviews"].total == 8
    again = Session(setting(place, schedule={"lr": 1e-2, "epochs": 2})).run()
    assert all(torch.equal(result.weights.read(k), again.weights.read(k)) for k in result.weights.tensors)
    assert again.metrics.accuracy == result.metrics.accuracy


def test_the_recipe_is_setfit_s_own(place):
    spec = setting(place).spec()
    assert (spec["iterations"], spec["pairs"]) == (20, "iterations")
    found = {key: spec["schedule"][key] for key in ("epochs", "lr", "batch_size", "weight_decay")}
    assert found == {"epochs": 1, "lr": 2e-5, "batch_size": 16, "weight_decay": 0.01}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"head": "linear"}, "head of its own"),
        ({"linearised": True}, "linearisation"),
        ({"pairs": "oversampling", "iterations": 3}, "no effect"),
    ],
)
def test_options_that_do_not_fit_are_refused(place, more, message):
    with pytest.raises(aniso.errors.AnisoError, match=message):
        Session(setting(place, **more))


def test_the_head_is_scikit_learn_s_logistic_regression(place, shots):
    """The optimum of C * sum of losses + |w|²/2 at C = 1, found by gradient descent on that very sum."""
    from aniso.learn.heads import new_head

    encoder = aniso.load_model(place / "base")
    rng = torch.Generator().manual_seed(3)
    seen = torch.nn.functional.normalize(torch.randn(6, 16, generator=rng), dim=-1)
    labels = torch.tensor(shots.labels)
    head = new_head("linear", encoder.class_weights(shots.classes), {"decay": 1 / 6})
    head.fit(seen[None], labels)
    weight, bias = torch.zeros(2, 16, requires_grad=True), torch.zeros(2, requires_grad=True)
    optimiser = torch.optim.SGD([weight, bias], lr=0.1)
    for _ in range(5000):
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(seen @ weight.T + bias, labels, reduction="sum")
        (loss + weight.square().sum() / 2).backward()
        optimiser.step()
    assert torch.allclose(head.weight, weight, atol=1e-3)
