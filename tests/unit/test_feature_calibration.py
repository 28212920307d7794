"""Calibration of whole networks: order, streaming, padding, absent blocks, bad input; by a naive version."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import colours
import pytest
import sentences
import tiny
import torch
from torch import Tensor, nn
from torch.func import functional_call

from aniso.compose import Composition, Partition
from aniso.data import Unlabelled, load_task
from aniso.learn import (
    CalibrationRule,
    FeatCal,
    FeatureCache,
    RegMean,
    RegMeanPlusPlus,
    calibrate_features,
    features,
)
from aniso.learn import feature_calibration as calibration_module
from aniso.learn._layerwise.layers import calibrated_layers, explicit_attention
from aniso.learn._layerwise.trace import Trace, trace
from aniso.learn.calibration_rules import Moments
from aniso.learn.teacher import Teacher, with_vector
from aniso.models import Encoder, load_model
from aniso.vectors import Bank, TaskVector

RULES = (FeatCal(), RegMean(), RegMeanPlusPlus())
NO_CACHE = FeatureCache(None)


def banked(encoder: Encoder, *, names: tuple[str, ...] = ("one", "two"), size: float = 0.1) -> Bank:
    """Vectors of the blocks that the encoder's bank may change."""
    keys = set(encoder.layout.places)
    state = {key: tensor.detach().clone() for key, tensor in encoder.state_dict().items()}
    made = {}
    for seed, name in enumerate(names, 1):
        moved = tiny.tuned(state, seed, size)
        made[name] = {key: moved[key] if key in keys else tensor for key, tensor in state.items()}
    return Bank.build(encoder, made, allow_distant=True)


def teachers(encoder: Encoder, bank: Bank) -> dict[str, Teacher]:
    return {name: Teacher.of(encoder, bank, name, cache=NO_CACHE) for name in bank.names}


def applied(encoder: Encoder, vector: TaskVector) -> dict[str, Tensor]:
    return with_vector(encoder, Bank({vector.name: vector})).weights()


def merged(encoder: Encoder, bank: Bank, scale: float = 0.5) -> Composition:
    composition = Composition(encoder, bank, Partition.whole())
    composition.values.data.fill_(scale)
    return composition


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 2e-4) -> None:
    assert set(found) == set(expected)
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return load_model(tiny.hf_clip_directory(tmp_path_factory.mktemp("vit") / "model", seed=2))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Unlabelled]:
    root = tmp_path_factory.mktemp("images")
    made = {name: colours.task(root / name, {"train": 9}, ("red", "blue")) for name in ("one", "two")}
    return {name: task.splits["train"].unlabelled() for name, task in made.items()}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    sentences.save(tmp_path_factory.mktemp("bert"), "bert")
    return load_model(tmp_path_factory.getbasetemp() / next(
        path.name for path in tmp_path_factory.getbasetemp().iterdir() if path.name.startswith("bert")
    ))  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Unlabelled]:
    root = tmp_path_factory.mktemp("texts")
    out = {}
    for name, each in (("one", 7), ("two", 10)):
        split = next(iter(load_task(sentences.write_task(root / f"{name}.csv", each)).splits.values()))
        out[name] = split.unlabelled()
    return out


# against a naive version


def naive(
    encoder: Encoder, bank: Bank, splits: Mapping[str, Unlabelled], rule: FeatCal, scale: float
) -> dict[str, Tensor]:
    """FeatCal by whole forward passes, one layer at a time, all inputs in memory; linear layers and norms."""
    base = {key: tensor.clone() for key, tensor in encoder.state_dict().items()}
    own = {name: {**base, **with_vector(encoder, bank.only(name)).weights()} for name in bank.names}
    start = {**base, **merged(encoder, bank, scale).weights()}
    student, names = dict(start), list[str]()
    modules = {
        name: module
        for name, module in encoder.named_modules()
        if isinstance(module, nn.Linear | nn.LayerNorm) and f"{name}.weight" in encoder.layout.places
    }
    batches = {name: _inputs(encoder, split) for name, split in splits.items()}

    def seen(state: Mapping[str, Tensor], name: str, task: str) -> Tensor:
        found: list[Tensor] = []
        handle = modules[name].register_forward_hook(lambda m, args, out: found.append(args[0]))
        with torch.no_grad():
            functional_call(encoder, dict(state), (batches[task],))
        handle.remove()
        rows, mask = found[0], batches[task] != -1
        is_text = batches[task].dim() == 2
        rows = rows[mask] if is_text and rows.shape[:2] == mask.shape else rows.flatten(0, -2)
        return rows.double()

    handles = [module.register_forward_hook(lambda m, a, o, name=name: names.append(name))
               for name, module in modules.items()]  # fmt: skip
    with torch.no_grad():
        encoder(next(iter(batches.values())))
    for handle in handles:
        handle.remove()
    for name in names:
        weight, bias = f"{name}.weight", f"{name}.bias"
        has_bias = bias in base
        anchor = {k: rule.rho * start[k].double() + (1 - rule.rho) * base[k].double()
                  for k in (weight, bias)[: 1 + has_bias]}  # fmt: skip
        is_norm = isinstance(modules[name], nn.LayerNorm)
        left, right, offsets, total = 0, 0, 0, 0.0
        for task in splits:
            x = seen(student, name, task)
            w = own[task][weight].double()
            b = own[task][bias].double() if has_bias else torch.zeros(len(w)).double()
            if is_norm:
                x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
                ones = torch.ones_like(x)
                pair = torch.stack([x, ones], -1).movedim(0, 1)  # width x rows x 2
                target = (x * w + b).T.unsqueeze(-1)
                left = left + pair.mT @ pair / len(x)
                right = right + pair.mT @ target / len(x)
                continue
            y = rule.alpha * seen(own[task], name, task) + (1 - rule.alpha) * x
            size = (x.T @ x / len(x)).norm()
            left = left + x.T @ x / len(x) / size
            right = right + x.T @ y @ w.T / len(x) / size
            offsets = offsets + torch.stack([b + w @ y.mean(0)]) / size
            total = total + 1 / size
        if is_norm:
            joined = torch.stack([anchor[weight], anchor[bias]], 1).unsqueeze(-1)
            solved = torch.linalg.solve(left + rule.ridge * torch.eye(2), right + rule.ridge * joined)
            new, offset = solved[:, 0, 0], solved[:, 1, 0]
        else:
            eye = torch.eye(len(left)).double()
            new = torch.linalg.solve(left + rule.ridge * eye, right + rule.ridge * anchor[weight].T).T
            means = sum(new @ seen(student, name, task).mean(0) / (seen(student, name, task).T
                        @ seen(student, name, task) / len(seen(student, name, task))).norm()
                        for task in splits)  # fmt: skip
            offset = offsets[0] - means
            if has_bias:
                offset = (offset + rule.ridge * anchor[bias]) / (total + rule.ridge)
        student[weight] = new.float()
        if has_bias:
            student[bias] = offset.float()
    return student


def _inputs(encoder: Encoder, split: Unlabelled) -> Tensor:
    if encoder.transforms.kind == "texts":
        return encoder.family.tokens([split.open(i) for i in range(len(split))])[0]
    view = encoder.transforms.eval
    return view.finish(torch.stack([view(split.open(i), torch.Generator()) for i in range(len(split))]))


@pytest.mark.parametrize("family", ["vit", "bert"])
def test_featcal_is_what_a_naive_version_gives(family: str, request: pytest.FixtureRequest) -> None:
    encoder = request.getfixturevalue(family)
    splits = request.getfixturevalue({"vit": "images", "bert": "texts"}[family])
    bank = banked(encoder)
    rule = FeatCal(ridge=0.3, rho=1.4, alpha=0.3)
    found = calibrate_features(merged(encoder, bank), teachers(encoder, bank), splits, rule)
    expected = naive(encoder, bank, splits, rule, 0.5)
    weights = applied(encoder, found.vector)
    assert len(found.layers) > 10
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=3e-4, msg=name)


# what is changed and what is not


@pytest.mark.parametrize("family", ["vit", "bert"])
def test_teachers_equal_to_the_student_change_nothing_at_rho_1(
    family: str, request: pytest.FixtureRequest
) -> None:
    encoder = request.getfixturevalue(family)
    splits = request.getfixturevalue({"vit": "images", "bert": "texts"}[family])
    bank = banked(encoder, names=("one",))
    same = Bank({"one": bank["one"], "two": bank["one"].renamed("two")})
    student = with_vector(encoder, bank)
    found = calibrate_features(student, teachers(encoder, same), splits, FeatCal(rho=1.0))
    assert_same(applied(encoder, found.vector), student.weights())


@pytest.mark.parametrize("rule", [RegMean(), RegMeanPlusPlus()], ids=str)
def test_regmean_of_one_task_is_its_teacher(
    vit: Encoder, images: dict[str, Unlabelled], rule: CalibrationRule
) -> None:
    bank = banked(vit, names=("one",))
    one = {"one": images["one"]}
    found = calibrate_features(merged(vit, bank, 0.2), teachers(vit, bank), one, rule)
    assert_same(applied(vit, found.vector), with_vector(vit, bank).weights())


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_order_of_tasks_changes_nothing(
    bert: Encoder, texts: dict[str, Unlabelled], rule: CalibrationRule
) -> None:
    bank = banked(bert)
    found = calibrate_features(merged(bert, bank), teachers(bert, bank), texts, rule)
    turned = dict(reversed(texts.items()))
    other = bank.only("two", "one")
    again = calibrate_features(merged(bert, other), teachers(bert, other), turned, rule)
    assert_same(applied(bert, found.vector), applied(bert, again.vector))


def test_the_given_model_is_not_changed(vit: Encoder, images: dict[str, Unlabelled]) -> None:
    bank = banked(vit)
    student = merged(vit, bank)
    before, base = student.weights(), {k: t.clone() for k, t in vit.state_dict().items()}
    known = features(student, images["one"])
    calibrate_features(student, teachers(vit, bank), images)
    assert all(torch.equal(before[key], tensor) for key, tensor in student.weights().items())
    assert all(torch.equal(base[key], tensor) for key, tensor in vit.state_dict().items())
    assert torch.equal(features(student, images["one"]), known)


def test_a_model_with_given_weights_is_calibrated_as_the_composition(
    vit: Encoder, images: dict[str, Unlabelled], tmp_path: Path
) -> None:
    bank = banked(vit)
    student = merged(vit, bank)
    expected = calibrate_features(student, teachers(vit, bank), images).vector
    student.bake().save(tmp_path / "merged.safetensors")
    loaded = load_model(str(vit.home), tmp_path / "merged.safetensors")
    found = calibrate_features(loaded, teachers(vit, bank), images).vector
    assert_same(applied(vit, found), applied(vit, expected))


def test_a_block_that_a_vector_does_not_have_is_the_base_there(
    vit: Encoder, images: dict[str, Unlabelled]
) -> None:
    bank = banked(vit)
    names = [block.name for block in bank["one"].blocks]
    fewer = Bank({"one": bank["one"].within(names[::2]), "two": bank["two"]})
    zero = {"one": bank["one"].within(names[::2]) + 0.0 * bank["one"], "two": bank["two"]}
    found = calibrate_features(merged(vit, fewer), teachers(vit, fewer), images)
    same = calibrate_features(merged(vit, Bank(zero)), teachers(vit, Bank(zero)), images)
    assert_same(applied(vit, found.vector), applied(vit, same.vector))


def test_blocks_that_no_vector_changes_are_kept(vit: Encoder, images: dict[str, Unlabelled]) -> None:
    bank = banked(vit)
    kept = [b.name for b in bank["one"].blocks if ".0." in b.name and "mlp" in b.name]
    names = [block.name for block in bank["one"].blocks if block.name not in kept]
    fewer = Bank({name: bank[name].within(names) for name in bank.names})
    found = calibrate_features(merged(vit, fewer), teachers(vit, fewer), images)
    assert kept and not set(kept) & {block.name for block in found.vector.blocks}
    assert not any(".0.mlp" in name for name in found.layers)


def test_what_is_not_calibrated_is_kept_or_averaged(vit: Encoder, images: dict[str, Unlabelled]) -> None:
    bank = banked(vit)
    student, key = merged(vit, bank), "vision_model.embeddings.patch_embedding.weight"
    found = calibrate_features(student, teachers(vit, bank), images)
    torch.testing.assert_close(applied(vit, found.vector)[key], student.weights()[key])
    assert any("3 of" in note and "kept as merged" in note for note in found.notes)
    mean = sum(with_vector(vit, bank.only(name)).weights()[key] for name in bank.names) / 2
    for rule in (RegMean(), RegMeanPlusPlus()):
        again = calibrate_features(student, teachers(vit, bank), images, rule)
        torch.testing.assert_close(applied(vit, again.vector)[key], mean)


def test_the_vector_says_how_it_was_made(vit: Encoder, images: dict[str, Unlabelled]) -> None:
    bank = banked(vit)
    found = calibrate_features(merged(vit, bank), teachers(vit, bank), images, items=5)
    words = found.vector.provenance.formula
    assert found.vector.name == "featcal" and dict(found.items) == {"one": 5, "two": 5}
    assert "featcal(ridge=0.05, rho=2.2, alpha=0.25) of composition" in words
    assert "5 items of one, 5 items of two, without labels" in words


# streaming


def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away the chain, so that every layer's inputs come from whole forward passes."""

    def whole(*args: Any) -> Trace:
        return Trace(tuple((-1, group) for _, group in trace(*args).groups), None)

    monkeypatch.setattr(calibration_module, "trace", whole)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("family", ["vit", "bert"])
def test_stages_give_what_whole_passes_give(
    family: str, rule: CalibrationRule, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = request.getfixturevalue(family)
    splits = request.getfixturevalue({"vit": "images", "bert": "texts"}[family])
    bank = banked(encoder)
    found = calibrate_features(merged(encoder, bank), teachers(encoder, bank), splits, rule)
    untraced(monkeypatch)
    again = calibrate_features(merged(encoder, bank), teachers(encoder, bank), splits, rule)
    assert found.layers == again.layers
    assert_same(applied(encoder, found.vector), applied(encoder, again.vector))


def test_only_one_groups_moments_are_in_memory(
    bert: Encoder, texts: dict[str, Unlabelled], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[Moments] = weakref.WeakSet()
    most = 0

    class Watched(Moments):  # type: ignore[misc]  # final in the library
        def __init__(self, *, by_dimension: bool = False) -> None:
            nonlocal most
            super().__init__(by_dimension=by_dimension)
            if not by_dimension:
                gc.collect()
                alive.add(self)
                most = max(most, len(alive))

    monkeypatch.setattr(calibration_module, "Moments", Watched)
    bank = banked(bert)
    found = calibrate_features(merged(bert, bank), teachers(bert, bank), texts)
    assert len(found.layers) > 10 and most <= 2  # one that is summed, one that is replaced


def test_items_are_read_a_few_times_whatever_the_depth(
    bert: Encoder, texts: dict[str, Unlabelled], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = 0
    plain = calibration_module.Batches

    def counted(*args: Any, **more: Any) -> Any:
        nonlocal passes
        passes += 1
        return plain(*args, **more)

    monkeypatch.setattr(calibration_module, "Batches", counted)
    bank = banked(bert)
    calibrate_features(merged(bert, bank), teachers(bert, bank), texts)
    stages = 1 + len(texts) * 2 * 3  # a trace; of 2 models: the embedding's norm, the first stage, the pooler
    assert passes <= stages


@pytest.mark.parametrize("kind", sentences.KINDS)
def test_the_layers_of_a_sentence_encoder_are_a_chain(kind: str, tmp_path: Path) -> None:
    sentences.save(tmp_path / kind, kind)
    encoder = load_model(tmp_path / kind)
    ids, _ = encoder.family.tokens(sentences.TEXTS)
    layers = calibrated_layers(encoder)
    with torch.no_grad():
        found = trace(encoder, layers, lambda: encoder(ids))
    assert found.chain is not None and len(found.chain.modules) == 2
    assert [len(group) for stage, group in found.groups if stage == 0] == [3, 1, 1, 1, 1, 1]
    assert sum(len(group) for _, group in found.groups) == len(layers)


def test_layers_that_run_twice_are_left_out() -> None:
    shared = nn.Linear(4, 4)
    network = nn.Sequential(nn.Linear(4, 4), shared, nn.ReLU(), shared)
    found = trace(network, calibrated_layers(network), lambda: network(torch.zeros(2, 4)))
    assert [layer.name for _, group in found.groups for layer in group] == ["0"]


# attention as torch has it


def test_torchs_attention_is_the_same_with_its_projection_as_a_module() -> None:
    torch.manual_seed(0)
    for batch_first in (True, False):
        module = nn.MultiheadAttention(8, 2, batch_first=batch_first).double().eval()
        x = torch.randn(3, 5, 8, dtype=torch.float64)
        with torch.no_grad():
            expected = module(x, x, x, need_weights=False)[0]
            with explicit_attention(module):
                found = module(x, x, x, need_weights=False)[0]
                other = module(x, x + 1, x, need_weights=True)
            torch.testing.assert_close(found, expected)
            assert other[1] is not None and torch.equal(other[0], module(x, x + 1, x)[0])
        assert "forward" not in vars(module)


def test_open_clips_fused_attention_is_calibrated_as_separate_projections_are(
    vit: Encoder, images: dict[str, Unlabelled], tmp_path: Path
) -> None:
    pytest.importorskip("open_clip", reason="needs open_clip")
    bank = banked(vit)
    Composition(vit, bank).bake().save(tmp_path / "fused", to="open_clip")
    fused = load_model(tmp_path / "fused")
    names = set(calibrated_layers(fused))
    assert any(name.endswith("attn.in_proj") for name in names)
    found = calibrate_features(merged(vit, bank), teachers(vit, bank), images)
    again = calibrate_features(merged(fused, bank), teachers(fused, bank), images)
    # open_clip's projection is a parameter, and its last norm sees all tokens
    mine, theirs = found.vector, again.vector
    for block in mine.layout.blocks:
        if block.name in mine and block.name not in (
            "visual.proj",
            "visual.ln_post.weight",
            "visual.ln_post.bias",
        ):
            torch.testing.assert_close(
                mine[block.name].dense(), theirs[block.name].dense(), rtol=1e-3, atol=1e-3, msg=block.name
            )


# padding


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_padding_does_not_matter(
    bert: Encoder, texts: dict[str, Unlabelled], rule: CalibrationRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = banked(bert)
    lengths = bert.transforms.eval.lengths(texts["one"].items)
    assert len(set(lengths)) > 1  # so that there is padding
    padded = calibrate_features(merged(bert, bank), teachers(bert, bank), texts, rule)
    monkeypatch.setattr(calibration_module, "_BATCH", 1)
    alone = calibrate_features(merged(bert, bank), teachers(bert, bank), texts, rule)
    assert_same(applied(bert, padded.vector), applied(bert, alone.vector))


# few items, bad input


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_one_item_of_each_task_gives_finite_weights(
    vit: Encoder, images: dict[str, Unlabelled], rule: CalibrationRule
) -> None:
    bank = banked(vit)
    found = calibrate_features(merged(vit, bank), teachers(vit, bank), images, rule, items=1)
    student = with_vector(vit, Bank({"made": found.vector}))
    assert features(student, images["one"]).isfinite().all()


def test_items_are_drawn_by_seed_and_few_are_noted(vit: Encoder, images: dict[str, Unlabelled]) -> None:
    bank = banked(vit)
    norms = {
        seed: calibrate_features(merged(vit, bank), teachers(vit, bank), images, items=4, seed=seed)
        for seed in (0, 0, 1)
    }
    assert norms[0].vector.norm() != norms[1].vector.norm()
    assert not any("fewer items" in note for note in norms[0].notes)
    found = calibrate_features(merged(vit, bank), teachers(vit, bank), images, items=1000)
    assert sum("16 of 1000 items" in note for note in found.notes) == 2


def test_inputs_that_are_not_finite_name_layer_and_task(
    vit: Encoder, images: dict[str, Unlabelled], refused: Any
) -> None:
    bank = banked(vit)
    with refused("LEARN-NONFINITE", 6, "an input of layer 'vision_model", "items of one", "too large"):
        calibrate_features(merged(vit, bank, 1e20), teachers(vit, bank), images)


def test_tasks_must_match_and_hold_no_labels(
    vit: Encoder, images: dict[str, Unlabelled], tmp_path: Path, refused: Any
) -> None:
    bank = banked(vit)
    with refused("USAGE", 2, "one teacher and one split"):
        calibrate_features(merged(vit, bank), teachers(vit, bank), {"one": images["one"]})
    with refused("USAGE", 2, "invalid number of items: 0"):
        calibrate_features(merged(vit, bank), teachers(vit, bank), images, items=0)
    labelled = colours.task(tmp_path / "task", {"train": 2}).splits["train"]
    with refused("USAGE", 2, "learns from no label", "unlabelled()"):
        calibrate_features(merged(vit, bank), teachers(vit, bank), {**images, "two": labelled})
    with refused("DATA-MISSING", 3, "is empty"):
        calibrate_features(merged(vit, bank), teachers(vit, bank), {**images, "two": images["two"].take([])})


def test_another_base_is_refused(
    vit: Encoder, bert: Encoder, images: dict[str, Unlabelled], refused: Any
) -> None:
    bank = banked(vit)
    with refused("BANK-BASE", 3, "not over the base of its teachers"):
        calibrate_features(bert, teachers(vit, bank), images)
