"""Choosing vectors under a budget: exact gradients, each strategy against a plain one, and what is left."""

from __future__ import annotations

import math
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import naive
import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from aniso.classes import ClassList
from aniso.compose import Coefficients, Composition, Partition
from aniso.data import Labelled
from aniso.data.batches import Batches
from aniso.data.images import ArrayImages
from aniso.errors import AnisoError, UsageError
from aniso.learn import CoefficientNorm, CrossEntropy, Entropy, FixMatch
from aniso.learn.gradient import cell_gradients, weight_gradient
from aniso.learn.selection import (
    BlockwiseGradient,
    Budget,
    FeatureSimilarity,
    Pursuit,
    Random,
    Scores,
    SelectionInputs,
    SelectionRule,
    WholeGradient,
    mean_feature,
    new_selection_rule,
)
from aniso.learn.selection.selection_rule import cell_bytes
from aniso.models.encoder import Encoder, Family
from aniso.models.transforms import Pixels
from aniso.vectors import Bank, BlockSource, Dense, LowRank, Packed, Provenance, TaskVector
from aniso.vectors._files import segment_writer
from aniso.vectors._files.segment import _runs

Refused = Callable[..., AbstractContextManager[Any]]

SMALL = settings(deadline=None, max_examples=60, database=None, derandomize=True)
CLASSES = ("red", "green", "blue")
WIDTH = 24
GATE = "scale.gate"
KINDS = ("fp32", "bf16", "int8", "int4", "residual4", "low-rank", "mixed")


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.gate * x


class Network(nn.Module):
    """Convolution, linear layers, a norm and a scalar; sizes that fill no group of 64."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 9, 3)
        self.fc1 = nn.Linear(9, 33)
        self.ln = nn.LayerNorm(33)
        self.fc2 = nn.Linear(33, WIDTH, bias=False)
        self.scale = Scale()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.conv(x)).mean((2, 3))
        return self.fc2(self.scale(torch.tanh(self.ln(self.fc1(h)))))


def encoder_of(
    network: nn.Module, run: Callable[[Any, Tensor], Tensor] | None = None, side: int = 8
) -> Encoder:
    """In double, with a linear head of its own."""
    g = torch.Generator().manual_seed(7)
    head = torch.randn(len(CLASSES), WIDTH, generator=g, dtype=torch.float64)
    ask = run or (lambda network, x: network(x))
    family = Family(
        lambda network, x: ask(network, x.double()), own_head=lambda _: (head, None), own_classes=CLASSES
    )
    return Encoder("small", network.double(), family, Pixels(side))


def pictures(count: int = 7, side: int = 8, name: str = "made") -> Labelled:
    drawn = np.random.default_rng(3).integers(0, 256, (count, side, side, 3)).astype(np.uint8)
    return Labelled(name, ClassList(CLASSES), ArrayImages(drawn, name), tuple(i % 3 for i in range(count)))


SPLIT = pictures()
LOSS = CrossEntropy(SPLIT, "eval")
NAMES = ("ant", "bee", "cat", "dog", "eel")


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_small() -> Iterator[None]:
    """Blocks of a hundred numbers are packed, too."""
    with mock.patch.object(segment_writer, "SMALL", 100):
        yield


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return encoder_of(Network())


def changed(encoder: Encoder, count: int = len(NAMES)) -> dict[str, dict[str, Tensor]]:
    """Fine-tuned models, by name."""
    base = {k: v.float() for k, v in encoder.state_dict().items()}
    return {name: tiny.tuned(base, i, 0.5) for i, name in enumerate(NAMES[:count], 1)}


@pytest.fixture(scope="module")
def bank(encoder: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Bank:
    place = tmp_path_factory.mktemp("banks") / "bank"
    return Bank.build(encoder, changed(encoder), to=place, allow_distant=True)


def low_rank(encoder: Encoder, name: str = "low", seed: int = 5) -> TaskVector:
    ranks = {"conv.weight": 2, "fc1.weight": 3, "fc2.weight": 1}
    return naive.low_rank(BlockSource(encoder.weight_source()), ranks, name=name, seed=seed)


def stored(encoder: Encoder, kind: str, place: Path) -> Bank:
    tuned: dict[str, Any] = changed(encoder, 3)
    if kind == "low-rank":
        tuned = {f"low{i}": low_rank(encoder, f"low{i}", i) for i in range(3)}
        return Bank.build(encoder, tuned, to=place)
    if kind == "mixed":
        first = {"ant": tuned["ant"], "low": low_rank(encoder), "bee": tuned["bee"]}
        made = Bank.build(encoder, first, to=place, storage="int8", allow_distant=True)
        return made.add(encoder, {"cat": tuned["cat"]}, storage="bf16", allow_distant=True)
    return Bank.build(encoder, tuned, to=place, storage=kind, allow_distant=True)


def seen(encoder: Encoder, split: Labelled) -> tuple[Tensor, Tensor]:
    """All pictures at once as the evaluation sees them, and their labels."""
    (batch,) = Batches(split, encoder.transforms.eval, size=len(split))
    assert batch.labels is not None
    return batch.inputs, batch.labels


def by_autograd(encoder: Encoder, bank: Bank, split: Labelled = SPLIT) -> dict[str, dict[str, float]]:
    """Forward and backward through a composition at zero coefficients."""
    composition = Composition(encoder, bank)
    images, labels = seen(encoder, split)
    logits = encoder.class_weights(split.classes).logits(composition(images))
    functional.cross_entropy(logits, labels).backward()
    assert composition.values.dtype == torch.float64
    out: dict[str, dict[str, float]] = {name: {} for name in bank}
    assert composition.values.grad is not None
    for (vector, block, _), value in zip(
        composition.index.labels(), composition.values.grad.tolist(), strict=True
    ):
        out[vector][block] = value
    return out


def same(found: Scores, expected: Scores, tolerance: float = 1e-9) -> bool:
    """Of the same cells, up to a share of the largest number."""
    most = max(abs(x) for own in expected.values() for x in own.values())
    assert most > 0
    return found.keys() == expected.keys() and all(
        found[name].keys() == own.keys()
        and all(abs(found[name][b] - x) <= tolerance * most for b, x in own.items())
        for name, own in expected.items()
    )


def vector_of(bank: Bank, name: str, deltas: Mapping[str, Tensor]) -> TaskVector:
    """Made by hand over a bank's base."""
    cells = {block: (lambda values=values: Dense(values)) for block, values in deltas.items()}
    return TaskVector(
        name, bank.layout, bank[bank.names[0]]._base, cells, Provenance(name, "made by hand", name)
    )


def cells_of(bank: Bank) -> set[tuple[str, str]]:
    return {(name, block.name) for name in bank for block in bank[name].blocks}


# gradients


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_cells_are_those_of_autograd_through_a_composition(
    encoder: Encoder, kind: str, tmp_path: Path
) -> None:
    bank = stored(encoder, kind, tmp_path / "bank")
    found = BlockwiseGradient(encoder, LOSS, 1).scores(bank)
    # a mean in bfloat16 and what is left of it make a sum that float32 rounds
    assert same(found, by_autograd(encoder, bank), 1e-6 if kind == "residual4" else 1e-9)
    kinds = {type(bank[name][block]) for name, block in cells_of(bank)}
    assert {
        "low-rank": {LowRank},
        "mixed": {LowRank, Packed, Dense},
        "fp32": {Dense},
        "bf16": {Dense},
    }.get(kind, {Packed}) <= kinds


def test_gradients_are_the_inner_products_of_naive_sums(encoder: Encoder, tmp_path: Path) -> None:
    bank = stored(encoder, "mixed", tmp_path / "bank")
    blocks = weight_gradient(encoder, LOSS * 1.0).blocks(bank)
    assert {g.dtype for g in blocks.values()} == {torch.float64}
    expected = {
        name: {
            b.name: float((naive.dense(bank[name][b.name]) * blocks[b.name]).sum()) for b in bank[name].blocks
        }
        for name in bank
    }
    assert same({name: cell_gradients(bank[name], blocks) for name in bank}, expected, 1e-12)


@pytest.mark.parametrize("name", ["open_clip", "hugging face"])
@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
def test_query_key_and_value_may_be_one_block_or_three(name: str, split: bool) -> None:
    if name == "open_clip":
        encoder = encoder_of(tiny.open_clip_vit(), lambda m, x: m.encode_image(x), 16)
        is_vision: Callable[[str], bool] = tiny.is_open_clip_vision
    else:
        encoder = encoder_of(
            tiny.hf_clip(), lambda m, x: m.visual_projection(m.vision_model(x).pooler_output), 16
        )
        is_vision = tiny.is_hf_vision
    shots = pictures(4, 16)
    base = {k: v.float() if v.is_floating_point() else v for k, v in encoder.state_dict().items()}
    source = BlockSource(encoder.weight_source(), split=split)
    bank = Bank.build(source, {n: tiny.tuned_vision(base, is_vision, i) for i, n in enumerate("ab", 1)})
    assert any(b.name.endswith("in_proj_weight.k") for b in bank.layout.blocks) == split
    found = WholeGradient(encoder, CrossEntropy(shots, "eval"), 1).scores(bank)
    assert same(found, by_autograd(encoder, bank, shots))


@pytest.mark.parametrize("way", [False, True], ids=["one bank", "bank of the other naming"])
def test_a_peft_adapter_has_exact_gradients_too(way: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(
        tiny.hf_clip(),
        peft.LoraConfig(r=2, lora_alpha=8, target_modules=r"vision_model.*(q_proj|v_proj|fc1)"),
    )
    with torch.no_grad():
        for key, parameter in wrapped.named_parameters():
            if "lora_B" in key and "vision" in key:
                parameter.normal_(0, 0.1)
    wrapped.save_pretrained(tmp_path / "adapter")
    encoder = encoder_of(
        tiny.hf_clip(), lambda m, x: m.visual_projection(m.vision_model(x).pooler_output), 16
    )
    source = BlockSource(encoder.weight_source(), split=way)
    bank = Bank.build(source, {"lora": tmp_path / "adapter"})
    if not way:
        bank = bank.save(tmp_path / "bank")
    assert {type(bank["lora"][b.name]) for b in bank["lora"].blocks} == {LowRank}
    shots = pictures(4, 16)
    found = BlockwiseGradient(encoder, CrossEntropy(shots, "eval"), 1).scores(bank)
    assert same(found, by_autograd(encoder, bank, shots))


class Tied(Network):
    """Two layers share one matrix; by the alphabet another of its names comes first than by registration."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        setattr(self, first, nn.Linear(WIDTH, WIDTH))
        setattr(self, second, nn.Linear(WIDTH, WIDTH))
        getattr(self, second).weight = getattr(self, first).weight
        self.names = (first, second)

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        for name in self.names:
            h = torch.tanh(getattr(self, name)(h))
        return h


@pytest.mark.parametrize(
    "names",
    [
        ("one", "two"),
        pytest.param(("two", "one")),
    ],
)
def test_a_tied_matrix_is_one_cell_whichever_name_it_has(names: tuple[str, str]) -> None:
    encoder = encoder_of(Tied(*names))
    base = {k: v.float() for k, v in encoder.state_dict().items()}
    tuned = tiny.tuned(base, 1, 0.5)
    tuned["two.weight"] = tuned["one.weight"]
    bank = Bank.build(encoder, {"ant": tuned}, allow_distant=True)
    assert same(BlockwiseGradient(encoder, LOSS, 1).scores(bank), by_autograd(encoder, bank))


class Buffered(Network):
    def __init__(self) -> None:
        super().__init__()
        self.scale.register_buffer("shift", torch.linspace(0.1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x) + self.scale.shift)


def test_a_float_buffer_that_vectors_change_has_a_gradient_as_well() -> None:
    encoder = encoder_of(Buffered())
    bank = Bank.build(encoder, changed(encoder, 1), allow_distant=True)
    assert "scale.shift" in bank["ant"]
    assert same(BlockwiseGradient(encoder, LOSS, 1).scores(bank), by_autograd(encoder, bank))


class Rooted(Network):
    """With a parameter in no module but the network itself, as class tokens of timm's transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.linspace(0.1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x) + self.token)


def test_a_parameter_of_the_network_itself_has_a_gradient_and_is_composed() -> None:
    encoder = encoder_of(Rooted())
    bank = Bank.build(encoder, changed(encoder, 1), allow_distant=True)
    assert "token" in bank["ant"]
    assert same(BlockwiseGradient(encoder, LOSS, 1).scores(bank), by_autograd(encoder, bank))


@pytest.mark.parametrize("batch", [1, 2, 3, 100])
def test_several_batches_give_the_same_as_one(encoder: Encoder, bank: Bank, batch: int) -> None:
    found = BlockwiseGradient(encoder, LOSS, 1, batch_size=batch).scores(bank)
    assert same(found, BlockwiseGradient(encoder, LOSS, 1, batch_size=len(SPLIT)).scores(bank), 1e-12)


def test_terms_are_summed_with_their_signs_and_values_play_no_part(encoder: Encoder, bank: Bank) -> None:
    other = CrossEntropy(pictures(4, name="other"), "eval")
    one, two = (BlockwiseGradient(encoder, term, 1).scores(bank) for term in (LOSS, other))
    objective = 2.0 * LOSS - 0.5 * other + CoefficientNorm()
    found = BlockwiseGradient(encoder, objective, 1).scores(bank)
    expected = {n: {b: 2 * one[n][b] - 0.5 * two[n][b] for b in one[n]} for n in one}
    assert same(found, expected, 1e-12)


def test_terms_without_labels_can_be_chosen_by_and_are_those_of_autograd(
    encoder: Encoder, bank: Bank
) -> None:
    found = BlockwiseGradient(encoder, Entropy(SPLIT.unlabelled()), 1).scores(bank)
    composition = Composition(encoder, bank)
    logits = encoder.class_weights(SPLIT.classes).logits(composition(seen(encoder, SPLIT)[0]))
    (-(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()).backward()
    expected = composition.values.grad
    assert expected is not None
    made = torch.tensor([found[v][b] for v, b, _ in composition.index.labels()], dtype=torch.float64)
    assert naive.close(made, expected, 1e-9)


def test_the_model_is_as_it_was_before(encoder: Encoder) -> None:
    encoder.train()
    before = {k: v.clone() for k, v in encoder.state_dict().items()}
    try:
        weight_gradient(encoder, LOSS * 1.0)
        assert encoder.training
    finally:
        encoder.eval()
    assert all(torch.equal(before[k], v) for k, v in encoder.state_dict().items())
    assert not any(p.requires_grad or p.grad is not None for p in encoder.parameters())


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_groups_of_vectors_as_the_paper_takes_them_give_the_same_gradients(
    encoder: Encoder, bank: Bank, size: int
) -> None:
    """The paper composes a group at a time; the gradient at zero does not depend on who else is there."""
    found = BlockwiseGradient(encoder, LOSS, 2).scores(bank)
    groupwise: dict[str, dict[str, float]] = {}
    for start in range(0, len(bank), size):
        groupwise |= by_autograd(encoder, bank.only(*bank.names[start : start + size]))
    assert same(found, groupwise)
    best = {
        block.name: sorted(bank, key=lambda n, b=block.name: -abs(groupwise[n][b]))[:2]
        for block in bank.layout.blocks
    }
    kept = BlockwiseGradient(encoder, LOSS, 2).choose(bank).bank
    assert cells_of(kept) == {(name, block) for block, names in best.items() for name in names}


def test_a_low_rank_inner_product_is_as_good_for_a_gradient_in_sixteen_bits() -> None:
    g = torch.Generator().manual_seed(0)
    low = LowRank((40, 30), naive.low_rank({"w": torch.zeros(40, 30)}, {"w": 3}, name="v")["w"].terms)
    direction = torch.randn(40, 30, generator=g).bfloat16()
    expected = float((naive.dense(low) * direction.double()).sum())
    assert Dense(naive.dense(low)).along(direction) == pytest.approx(expected, rel=1e-6)
    assert low.along(direction) == pytest.approx(expected, rel=1e-5)


def test_a_vector_that_is_not_finite_is_named(encoder: Encoder, bank: Bank, refused: Refused) -> None:
    odd = vector_of(bank, "odd", {"fc1.bias": torch.full((33,), math.inf)})
    with refused("LEARN-NONFINITE", 6, "'odd'", "fc1.bias"):
        WholeGradient(encoder, LOSS, 1).scores(Bank({"ant": bank["ant"], "odd": odd}))


# what is read


def test_one_pass_over_the_pictures_and_one_cell_in_memory_serve_any_number_of_vectors(
    bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, passes, back, read = Network(), [], [], []
    alive: list[weakref.ref[Any]] = []

    def run(network: Any, x: Tensor) -> Tensor:
        passes.append(len(x))
        return network(x)

    backward, getitem = Tensor.backward, TaskVector.__getitem__

    def counted(self: TaskVector, block: str) -> Any:
        assert not [one for one in alive if one() is not None], "another cell is still held"
        read.append((self.name, block))
        delta = getitem(self, block)
        alive.append(weakref.ref(delta))
        return delta

    monkeypatch.setattr(Tensor, "backward", lambda self, *args: back.append(1) or backward(self, *args))
    monkeypatch.setattr(TaskVector, "__getitem__", counted)
    strategy = BlockwiseGradient(encoder_of(network, run), LOSS, 2, batch_size=3)
    strategy.choose(bank)
    assert passes == [3, 3, 1] and len(back) == 3
    assert sorted(read) == sorted(cells_of(bank))
    strategy.choose(bank.only("ant", "bee"))
    assert len(passes) == 3, "the gradient of the weights serves any bank"


def test_a_choice_by_chance_reads_nothing(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TaskVector, "__getitem__", lambda *_: pytest.fail("a cell was read"))
    Random(2).choose(bank)
    Random("6kB").choose(bank)


@SMALL
@given(st.sets(st.integers(0, 30)))
def test_rows_are_read_at_once_or_in_runs_of_neighbours(rows: set[int]) -> None:
    wanted = sorted(rows)
    found = [row for start, stop in _runs(wanted) for row in range(start, stop)]
    assert found == sorted(set(found)) and rows <= set(found)
    assert len(found) < 2 * max(1, len(rows))
    if len(found) > len(rows):
        assert len(_runs(wanted)) == 1


@pytest.mark.parametrize("storage", ["fp32", "int8", "residual4"])
def test_any_vectors_of_a_block_are_read_as_they_are_alone(
    encoder: Encoder, storage: str, tmp_path: Path
) -> None:
    bank = Bank.build(encoder, changed(encoder), to=tmp_path / "bank", storage=storage, allow_distant=True)
    for names in (("ant", "eel"), ("bee",), ("ant", "cat", "dog"), NAMES):
        for name, delta in bank.only(*names).read_block("conv.weight").items():
            assert torch.equal(delta.dense(), bank[name]["conv.weight"].dense())


# strategies


def test_whole_vectors_are_those_with_the_largest_sum_of_sizes(encoder: Encoder, bank: Bank) -> None:
    expected = by_autograd(encoder, bank)
    order = sorted(bank, key=lambda n: -sum(abs(x) for x in expected[n].values()))
    for budget in range(1, 6):
        choice = WholeGradient(encoder, LOSS, budget).choose(bank)
        assert choice.bank.names == tuple(n for n in bank if n in order[:budget])
        assert cells_of(choice.bank) == {c for c in cells_of(bank) if c[0] in order[:budget]}
        assert (choice.rule, choice.notes) == ("gradient", ())
        assert same(choice.scores, expected)


def test_cells_are_the_best_of_every_block(encoder: Encoder, bank: Bank) -> None:
    expected = by_autograd(encoder, bank)
    for budget in (1, 2, 4):
        choice = BlockwiseGradient(encoder, LOSS, budget).choose(bank)
        for block in bank.layout.blocks:
            best = sorted(bank, key=lambda n, b=block.name: -abs(expected[n][b]))[:budget]
            assert set(choice.bank.read_block(block.name)) == set(best)
    spread = BlockwiseGradient(encoder, LOSS, 1).choose(bank)
    assert len(spread.bank) > 1, "more vectors take part than the budget says"
    assert spread.summary()["cells"] == len(bank.layout.blocks)
    assert sum(spread.summary()["vectors"].values()) == len(bank.layout.blocks)


def test_chance_depends_on_the_seed_and_on_names_but_not_on_order(bank: Bank) -> None:
    backwards = Bank({name: bank[name] for name in reversed(NAMES)})
    drawn = {}
    for seed in range(12):
        kept = [set(Random(count, seed=seed).choose(bank).bank) for count in range(1, 6)]
        assert [len(k) for k in kept] == [1, 2, 3, 4, 5]
        assert all(few < more for few, more in pairwise(kept))
        assert kept == [set(Random(count, seed=seed).choose(backwards).bank) for count in range(1, 6)]
        drawn[seed] = kept[0]
    assert len(set.union(*drawn.values())) >= 4
    first = Random(2, seed=1).choose(bank).bank
    assert first.names == tuple(n for n in bank if n in first)


def test_chance_does_not_favour_vectors_with_many_blocks(bank: Bank) -> None:
    thin = bank.only_cells({n: [GATE] if n != "ant" else [GATE, "fc1.bias", "ln.bias"] for n in bank})
    assert [Random(1, seed=s).choose(thin).bank.names for s in range(6)] == [
        Random(1, seed=s).choose(bank).bank.names for s in range(6)
    ]


def test_features_are_compared_by_their_angle_whatever_their_length(encoder: Encoder, bank: Bank) -> None:
    own = mean_feature(encoder, SPLIT)
    assert own.shape == (WIDTH,)
    g = torch.Generator().manual_seed(2)
    aside = torch.randn(WIDTH, generator=g)
    aside -= (aside @ own) / (own @ own) * own
    aside *= own.norm() / aside.norm()
    angles = {"ant": 2.0, "bee": 0.3, "cat": 3.0, "dog": 1.1, "eel": 0.6}
    sources = {
        name: (1 + i) * (math.cos(a) * own + math.sin(a) * aside)
        for i, (name, a) in enumerate(angles.items())
    }
    order = sorted(angles, key=angles.__getitem__)
    for budget in range(1, 6):
        choice = FeatureSimilarity(encoder, SPLIT, budget, sources=sources).choose(bank)
        assert set(choice.bank) == set(order[:budget])
    for name, found in choice.scores.items():
        assert sum(found.values()) == pytest.approx(1 + math.cos(angles[name]), abs=1e-5)


def test_features_come_from_the_bank_or_are_asked_for(
    encoder: Encoder, bank: Bank, tmp_path: Path, refused: Refused
) -> None:
    with refused("BANK-FEATURES", 3, "5 vectors", "ant, bee", "aniso bank features"):
        FeatureSimilarity(encoder, SPLIT, 2).choose(bank)
    own = mean_feature(encoder, SPLIT)
    copy = bank.save(tmp_path / "bank").with_features({n: own if n == "dog" else -own for n in NAMES[1:]})
    with refused("BANK-FEATURES", 3, "1 vectors", "ant"):
        FeatureSimilarity(encoder, SPLIT, 2).choose(copy)
    assert FeatureSimilarity(encoder, SPLIT, 1).choose(copy.without("ant")).bank.names == ("dog",)


def test_features_of_another_width_are_refused(encoder: Encoder, bank: Bank, refused: Refused) -> None:
    with refused("BANK-FEATURES", 3):
        FeatureSimilarity(encoder, SPLIT, 2, sources=dict.fromkeys(NAMES, torch.ones(5))).choose(bank)


def test_features_that_cannot_be_compared_are_refused(encoder: Encoder, bank: Bank, refused: Refused) -> None:
    sources = {name: torch.ones(WIDTH) for name in NAMES} | {"cat": torch.full((WIDTH,), math.inf)}
    with refused("BANK-FEATURES", 3, "'cat'"):
        FeatureSimilarity(encoder, SPLIT, 2, sources=sources).choose(bank)


def pursued(gradient: Tensor, columns: Mapping[str, Tensor], count: int) -> list[str]:
    """By least squares over all that could come next: whoever leaves least of the gradient."""
    taken: list[str] = []
    for _ in range(count):
        left = {}
        for name in columns:
            matrix = torch.stack([columns[n] for n in (*taken, name)], 1)
            if name in taken or int(torch.linalg.matrix_rank(matrix, rtol=1e-5)) <= len(taken):
                continue
            solved = torch.linalg.lstsq(matrix, gradient[:, None], driver="gelsd").solution
            left[name] = float((gradient - (matrix @ solved)[:, 0]).norm())
        if not left:
            break
        least = min(left.values()) + 1e-6 * float(gradient.norm())  # of those as good, the first
        taken.append(next(name for name, value in left.items() if value <= least))
    return taken


@pytest.mark.parametrize("budget", [1, 2, 3, 5])
def test_pursuit_takes_what_least_squares_would(encoder: Encoder, bank: Bank, budget: int) -> None:
    blocks = weight_gradient(encoder, LOSS * 1.0).blocks(bank)
    chosen = Pursuit(encoder, LOSS, budget).choose(bank).bank
    for block, gradient in blocks.items():
        columns = {n: naive.dense(d).reshape(-1) for n, d in bank.read_block(block).items()}
        assert set(chosen.read_block(block)) == set(pursued(gradient.reshape(-1), columns, budget)), block


@pytest.mark.parametrize("kind", ["int8", "low-rank", "mixed"])
def test_pursuit_takes_what_least_squares_would_of_any_kind_of_vector(
    encoder: Encoder, kind: str, tmp_path: Path
) -> None:
    bank = stored(encoder, kind, tmp_path / "bank")
    blocks = weight_gradient(encoder, LOSS * 1.0).blocks(bank)
    chosen = Pursuit(encoder, LOSS, 2).choose(bank).bank
    for block, gradient in blocks.items():
        columns = {n: naive.dense(d).reshape(-1) for n, d in bank.read_block(block).items()}
        if columns:
            assert set(chosen.read_block(block)) == set(pursued(gradient.reshape(-1), columns, 2)), block


def once(bank: Bank, *names: str) -> bool:
    """Whether each block has one of the vectors at most."""
    return all(len(set(bank.read_block(b.name)) & set(names)) <= 1 for b in bank.layout.blocks)


def test_pursuit_never_takes_the_same_vector_twice(encoder: Encoder, bank: Bank) -> None:
    twice = Bank({**{n: bank[n] for n in bank}, "again": bank["bee"], "minus": -2.0 * bank["bee"]})
    for budget in (2, 4, 7):
        chosen = Pursuit(encoder, LOSS, budget).choose(twice).bank
        assert once(chosen, "bee", "again", "minus")
    assert any("bee" in bank[n].name or n == "bee" for n in chosen)
    assert not once(BlockwiseGradient(encoder, LOSS, 6).choose(twice).bank, "bee", "again", "minus")


def test_pursuit_does_not_take_a_sum_of_what_it_has(encoder: Encoder, bank: Bank) -> None:
    three = Bank({"ant": bank["ant"], "bee": bank["bee"], "sum": bank["ant"] + 0.5 * bank["bee"]})
    chosen = Pursuit(encoder, LOSS, 3).choose(three).bank
    wide = [b.name for b in bank.layout.blocks if b.numel > 1]
    assert {len(chosen.read_block(name)) for name in wide} == {2}
    assert len(chosen.read_block(GATE)) == 1, "of scalars one says it all"


def test_pursuit_sees_that_a_dense_vector_is_an_adapter_written_out(encoder: Encoder, bank: Bank) -> None:
    low = low_rank(encoder)
    dense = vector_of(bank, "dense", {b.name: low[b.name].dense() for b in low.blocks})
    both = Bank({"low": low, "dense": dense, **{n: bank[n] for n in ("ant", "bee")}})
    assert once(Pursuit(encoder, LOSS, 4).choose(both).bank, "low", "dense")


@pytest.mark.parametrize(
    "scale",
    [
        1e-3,
        1e-6,
        pytest.param(1e-9),
    ],
)
def test_pursuit_knows_small_vectors_from_large_ones_by_direction_alone(
    encoder: Encoder, bank: Bank, scale: float
) -> None:
    small = scale * bank["bee"]
    mixed = Bank({"ant": bank["ant"], "small": small, "again": small, "cat": bank["cat"]})
    plain = Bank({"ant": bank["ant"], "small": bank["bee"], "again": bank["bee"], "cat": bank["cat"]})
    for budget in (2, 3, 4):
        found, expected = (Pursuit(encoder, LOSS, budget).choose(b).bank for b in (mixed, plain))
        assert once(found, "small", "again")
        # of scalars all are as good, but for a rounding
        assert {c for c in cells_of(found) ^ cells_of(expected) if c[1] != GATE} == set()


def test_pursuit_keeps_within_bytes_and_begins_with_the_best_cell(encoder: Encoder, bank: Bank) -> None:
    scores = Pursuit(encoder, LOSS, 1).scores(bank)
    gains = {c: abs(scores[c[0]][c[1]]) / bank[c[0]][c[1]].norm() for c in cells_of(bank)}
    best = max(gains, key=gains.__getitem__)
    alone = Pursuit(encoder, LOSS, f"{cell_bytes(bank, *best)}B").choose(bank)
    assert max(gains[cell] for cell in cells_of(alone.bank)) == pytest.approx(gains[best], rel=1e-6)
    for said in ("300B", "2kB", "9kB", "1MB"):
        choice = Pursuit(encoder, LOSS, said).choose(bank)
        assert 0 < choice.nbytes <= Budget.of(said).nbytes
    # one number is the same for all vectors but for its size
    assert cells_of(choice.bank) < cells_of(bank)
    assert {block for _, block in cells_of(bank) - cells_of(choice.bank)} == {GATE}


# budgets


@pytest.mark.parametrize("said", [0, -1, "0", "0MB", "0.4B", False])
def test_budgets_that_leave_nothing_are_refused(said: Any, refused: Refused) -> None:
    with refused("USAGE", 2):
        Random(said)


@pytest.mark.parametrize("said", ["-3", "many", "", "5 vectors", True, None, "1e3"])
def test_budgets_that_are_none_are_refused(said: Any) -> None:
    with pytest.raises(AnisoError):
        Budget.of(said)


def test_a_digit_that_is_no_number_is_refused(refused: Refused) -> None:
    with refused("USAGE", 2):
        Budget.of("²")


def test_what_is_wrong_with_a_budget_is_not_said_of_memory(refused: Refused) -> None:
    with refused("USAGE", 2, "--budget") as refusal:
        Budget.of("-3")
    assert "--memory" not in str(refusal.error)


def test_a_number_in_words_is_the_number() -> None:
    assert Budget.of("5") == Budget.of(" 5 ") == Budget.of(5) == Budget.of(Budget(count=5)) == Budget(5)
    assert Budget.of("200kB") == Budget(nbytes=200_000)
    assert Budget.of("1 KiB") == Budget(nbytes=1024)
    assert (str(Budget.of(5)), str(Budget.of("200kB"))) == ("5", "200 kB")


def strategies(encoder: Encoder, budget: Any) -> list[SelectionRule]:
    own = mean_feature(encoder, SPLIT)
    g = torch.Generator().manual_seed(2)
    sources = {n: own + torch.randn(WIDTH, generator=g) for n in (*NAMES, "odd")}
    return [
        Random(budget, seed=1),
        FeatureSimilarity(encoder, SPLIT, budget, sources=sources),
        WholeGradient(encoder, LOSS, budget),
        BlockwiseGradient(encoder, LOSS, budget),
        Pursuit(encoder, LOSS, budget),
    ]


def test_more_than_there_is_keeps_everything_and_says_so(encoder: Encoder, bank: Bank) -> None:
    for strategy in strategies(encoder, 6):
        choice = strategy.choose(bank)
        assert choice.bank.names == bank.names
        if strategy.kind != "pursuit":  # which takes no scalar twice
            assert cells_of(choice.bank) == cells_of(bank)
            assert choice.bank.content_hash == bank.content_hash
            assert len(choice.notes) == 1 and "6" in choice.notes[0] and "5 vectors" in choice.notes[0]
    assert all(not s.choose(bank).notes for s in strategies(encoder, 5))


def test_pursuit_does_not_say_that_all_are_kept_if_they_are_not(encoder: Encoder, bank: Bank) -> None:
    twice = Bank({"bee": bank["bee"], "again": bank["bee"]})
    choice = Pursuit(encoder, LOSS, 3).choose(twice)
    assert len(choice.bank) == 1
    assert not [note for note in choice.notes if "all are kept" in note]


def test_a_bank_of_one_vector_stays_as_it_is(encoder: Encoder, bank: Bank) -> None:
    for strategy in strategies(encoder, 1):
        choice = strategy.choose(bank.only("cat"))
        assert cells_of(choice.bank) == cells_of(bank.only("cat")) and not choice.notes


def test_a_block_that_only_one_vector_has_is_kept_cell_by_cell(encoder: Encoder, bank: Bank) -> None:
    others = [b.name for b in bank.layout.blocks if b.name != "fc2.weight"]
    thin = bank.only_cells({n: [*others, "fc2.weight"] if n == "dog" else others for n in bank})
    for strategy in strategies(encoder, 1)[3:]:
        assert list(strategy.choose(thin).bank.read_block("fc2.weight")) == ["dog"]
    odd = Bank({"ant": bank["ant"], "odd": vector_of(bank, "odd", {GATE: torch.tensor(0.5)})})
    for strategy in strategies(encoder, 1):
        found = strategy.choose(odd).bank
        assert len(found.read_block(GATE)) == 1
        if strategy.whole:
            assert len(found) == 1


def test_a_block_that_no_vector_has_is_no_trouble(encoder: Encoder, bank: Bank) -> None:
    thin = bank.only_cells({n: ["fc1.weight", "ln.bias"] for n in bank})
    for strategy in strategies(encoder, 2):
        assert {block for _, block in cells_of(strategy.choose(thin).bank)} == {"fc1.weight", "ln.bias"}


@pytest.mark.parametrize("storage", ["fp32", "bf16", "int8", "int4"])
def test_bytes_are_never_exceeded(encoder: Encoder, storage: str, tmp_path: Path) -> None:
    bank = Bank.build(encoder, changed(encoder), to=tmp_path / "bank", storage=storage, allow_distant=True)
    for said in ("6kB", "9kB", "20kB"):
        for strategy in strategies(encoder, said):
            choice = strategy.choose(bank)
            held = sum(_stored(choice.bank[n][b]) for n, b in cells_of(choice.bank))
            assert 0 < held <= Budget.of(said).nbytes
            assert choice.nbytes == held == choice.summary()["bytes"]
            assert not choice.notes


def _stored(delta: Any) -> int:
    """Without the few exact values, which are beside the delta."""
    values = delta.values if isinstance(delta, Dense) else None
    return delta.nbytes if values is None else values.numel() * values.element_size()


def test_bytes_are_filled_with_whoever_still_fits(encoder: Encoder, bank: Bank) -> None:
    expected = by_autograd(encoder, bank)
    order = sorted(
        ((n, b.name) for n in bank for b in bank[n].blocks), key=lambda c: -abs(expected[c[0]][c[1]])
    )
    left, kept = 5000, set()
    for name, block in order:
        size = 4 * bank.layout.by_name[block].numel
        if size <= left:
            left, kept = left - size, {*kept, (name, block)}
    assert cells_of(BlockwiseGradient(encoder, LOSS, "5kB").choose(bank).bank) == kept


def test_a_budget_too_small_for_anything_is_refused_with_what_would_do(
    encoder: Encoder, bank: Bank, refused: Refused
) -> None:
    for strategy in strategies(encoder, "3B"):
        more = ("whole vector",) if strategy.whole else ()
        with refused("USAGE", 3, "no vector fits into a budget of 3 B", "at least 4 B", "--budget", *more):
            strategy.choose(bank)


def test_the_same_bank_gives_the_same_choice_in_the_banks_order(encoder: Encoder, bank: Bank) -> None:
    for said in (2, "2", "7kB"):
        for one, two in zip(strategies(encoder, said), strategies(encoder, said), strict=True):
            first, second = one.choose(bank), two.choose(bank)
            assert first.cells == second.cells and first.scores == second.scores
            assert first.bank.content_hash == second.bank.content_hash
            assert list(first.cells) == [n for n in bank if n in first.cells]
            layout = [b.name for b in bank.layout.blocks]
            assert all(list(own) == [b for b in layout if b in own] for own in first.cells.values())


def test_of_equals_the_first_in_the_bank_is_kept(encoder: Encoder, bank: Bank) -> None:
    for names in (("x", "y"), ("y", "x")):
        twice = Bank(dict.fromkeys(names, bank["bee"]))
        for strategy in strategies(encoder, 1)[2:]:
            assert strategy.choose(twice).bank.names == names[:1]


def test_progress_is_told(encoder: Encoder, bank: Bank) -> None:
    said: list[tuple[str, int, int]] = []
    Pursuit(encoder, LOSS, 1, batch_size=4, progress=lambda *one: said.append(one)).choose(bank)
    gradients = [("gradient on made", 4, 7), ("gradient on made", 7, 7)]
    vectors = [("gradients of vectors", i, 5) for i in range(1, 6)]
    assert said == [*gradients, *vectors, *(("inner products of vectors", i, 8) for i in range(1, 9))]


def test_what_learns_from_its_own_answers_has_no_gradient_to_choose_by(
    encoder: Encoder, bank: Bank, refused: Refused
) -> None:
    for kind in (WholeGradient, BlockwiseGradient, Pursuit):
        with refused("OBJECTIVE", 2, "its own predictions", "at random or by features"):
            kind(encoder, LOSS + FixMatch(SPLIT.unlabelled()), 2).choose(bank)
    assert not encoder.training


# smaller banks


@pytest.fixture(scope="module")
def smaller(encoder: Encoder, bank: Bank) -> Bank:
    return bank.select(BlockwiseGradient(encoder, LOSS, 2))


def learned(encoder: Encoder, bank: Bank, partition: Partition | None = None) -> Composition:
    composition = Composition(encoder, bank, partition)
    naive.randomise(composition)
    return composition


PARTITIONS = [Partition.blocks(), Partition.whole(), Partition.rows(), Partition.kinds("weight")]


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_coefficients_of_a_smaller_bank_are_those_of_its_cells_and_fit_the_whole_one(
    encoder: Encoder, bank: Bank, smaller: Bank, partition: Partition, tmp_path: Path
) -> None:
    composition = learned(encoder, smaller, partition)
    labels = {(v, b) for v, b, _ in composition.index.labels()}
    covered = {c for c in cells_of(smaller) if partition.covers(bank.layout.by_name[c[1]])}
    assert labels == ({(v, "*") for v in smaller} if partition.is_shared else covered)
    composition.coefficients.save(tmp_path / "coefficients")
    again = Composition.of(encoder, bank, Coefficients.load(tmp_path / "coefficients"))
    x = seen(encoder, SPLIT)[0]
    with torch.no_grad():
        expected = composition(x)
        assert torch.equal(again(x), expected)
        assert not torch.equal(expected, encoder(x))
    if not partition.is_shared:
        assert set(cells_of(again.bank)) & set(labels) == labels


def test_a_smaller_banks_composition_is_that_of_the_whole_one_with_zeros(
    encoder: Encoder, bank: Bank, smaller: Bank
) -> None:
    few, all_ = learned(encoder, smaller), Composition(encoder, bank)
    with torch.no_grad():
        for vector, block, _, value in few.coefficients.items():
            all_.values[all_.index.cell(vector, block)] = value
        x = seen(encoder, SPLIT)[0]
        assert naive.close(few(x), all_(x), 1e-12)


def test_coefficients_of_whole_vectors_fit_the_whole_bank(encoder: Encoder, bank: Bank) -> None:
    composition = learned(encoder, bank.select(Random(2)))
    again = Composition.of(encoder, bank, composition.coefficients)
    assert again.bank.content_hash == composition.bank.content_hash
    assert torch.equal(again.values, composition.values)


def test_a_cell_that_is_gone_is_said(encoder: Encoder, bank: Bank, smaller: Bank) -> None:
    name = smaller.names[0]
    blocks = [b.name for b in smaller[name].blocks]
    assert len(blocks) > 1
    poorer = bank.only_cells(
        {n: [b.name for b in bank[n].blocks if n != name or b.name != blocks[0]] for n in bank}
    )
    with pytest.raises(AnisoError) as caught:
        Composition.of(encoder, poorer, learned(encoder, smaller).coefficients)
    assert blocks[0] in str(caught.value) and name in str(caught.value)


@pytest.mark.parametrize("storage", ["fp32", "int8"])
def test_a_smaller_bank_is_saved_and_opened_as_what_it_is(
    smaller: Bank, storage: str, tmp_path: Path
) -> None:
    written = smaller.save(tmp_path / "smaller", storage=storage)
    assert written.names == smaller.names and cells_of(written) == cells_of(smaller)
    assert written.check() == [] == smaller.check()
    for name, block in cells_of(smaller):
        one, two = smaller[name][block].dense(), written[name][block].dense()
        assert torch.equal(one, two) if storage == "fp32" else torch.allclose(one, two, atol=0.02)
    if storage == "fp32":
        assert all(written[n].norms == pytest.approx(smaller[n].norms) for n in smaller)
    opened = Bank.load(tmp_path / "smaller")
    assert opened.content_hash == written.content_hash


def test_a_smaller_bank_is_pickled_as_its_cells(encoder: Encoder, bank: Bank, smaller: Bank) -> None:
    again = pickle.loads(pickle.dumps(smaller))
    assert cells_of(again) == cells_of(smaller) and again.content_hash == smaller.content_hash
    composition = learned(encoder, smaller)
    values = pickle.loads(pickle.dumps(composition.bank))
    assert Composition(encoder, values).index.count == composition.index.count


def test_the_content_hash_tells_choices_apart(encoder: Encoder, bank: Bank, tmp_path: Path) -> None:
    view = Bank.build(encoder, changed(encoder), allow_distant=True)
    for own in (bank, view):
        every = {n: [b.name for b in own[n].blocks] for n in own}
        cells = {**every, "ant": [GATE, "fc1.bias"]}
        hashes = [
            own.only_cells(c).content_hash
            for c in (every, cells, {**every, "ant": [GATE]}, {**every, "ant": [GATE, "ln.bias"]})
        ]
        assert hashes[0] == own.content_hash and len(set(hashes)) == 4
        turned = {n: list(reversed(blocks)) for n, blocks in reversed(cells.items())}
        assert own.only_cells(turned).content_hash == hashes[1]
        twice = own.only_cells(cells).only_cells({"ant": [GATE]})
        assert twice.content_hash == own.only_cells({"ant": [GATE]}).content_hash


def test_cells_that_are_not_there_are_refused(bank: Bank, smaller: Bank, refused: Refused) -> None:
    with refused("BANK-NAME", 2, "'fox'"):
        bank.only_cells({"fox": [GATE]})
    with refused("BANK-NAME", 2, "'ant'", "'fc9'"):
        bank.only_cells({"ant": [GATE, "fc9"]})
    with refused("BANK-NAME", 2):
        bank.only_cells({"ant": []})
    assert bank.only_cells({"ant": [], "bee": [GATE]}).names == ("bee",)
    with refused("CKPT-KEYS", 3, GATE):
        bank["ant"].within({"fc1.bias"})[GATE]


def test_naming_a_cell_twice_is_naming_it_once(bank: Bank) -> None:
    blocks = len(bank["ant"].blocks)
    assert cells_of(bank.only_cells({"ant": [GATE] * blocks})) == {("ant", GATE)}


def test_a_selection_of_cells_cannot_be_added_to(
    encoder: Encoder, bank: Bank, tmp_path: Path, refused: Refused
) -> None:
    copy = bank.save(tmp_path / "bank")
    thin = copy.only_cells({name: ["fc1.weight"] for name in copy})
    with refused("BANK-NAME", 2, "selection"):
        thin.add(encoder, {"fox": tiny.tuned(changed(encoder)["ant"], 9, 0.1)}, allow_distant=True)


def test_choosing_from_what_was_chosen_is_choosing_less(encoder: Encoder, smaller: Bank) -> None:
    least = smaller.select(BlockwiseGradient(encoder, LOSS, 1))
    assert cells_of(least) < cells_of(smaller)
    assert {len(least.read_block(b.name)) for b in smaller.layout.blocks} == {1}


# what settings ask for


def test_a_name_becomes_a_selection_rule(encoder: Encoder, bank: Bank) -> None:
    kinds = {
        "random": Random,
        "features": FeatureSimilarity,
        "gradient": WholeGradient,
        "blockwise-gradient": BlockwiseGradient,
        "pursuit": Pursuit,
    }
    for word, kind in kinds.items():
        made = new_selection_rule(word, SelectionInputs(encoder, LOSS * 1.0, Budget.of("2"), seed=1))
        assert type(made) is kind and made.kind == word and made.budget == Budget(2)
        if kind is not FeatureSimilarity:
            assert made.choose(bank).bank.names
    with pytest.raises(UsageError, match="needs a task to select vectors for"):
        new_selection_rule("gradient", SelectionInputs(encoder, None, Budget(2), seed=1))
