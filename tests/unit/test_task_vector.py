"""Task vectors: the identities they are defined by, arithmetic, files."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import tiny
import torch
from hypothesis import given, settings

from aniso.vectors import Bank, BlockSource, KeyEdits, Layout, TaskVector
from aniso.weights import TensorMap, save_safetensors


def equal(a, b):
    """Equal as bits: -0.0 is not 0.0."""
    return set(a) == set(b) and all(
        a[k].dtype == b[k].dtype and torch.equal(*(t[k].reshape(-1).view(torch.uint8) for t in (a, b)))
        for k in a
    )


@pytest.fixture
def pair():
    base = tiny.plain()
    return base, tiny.tuned(base)


def test_one_is_the_tuned_model_and_zero_the_base_bit_for_bit(pair, tmp_path):
    base, tuned = pair
    save_safetensors(tmp_path / "base.safetensors", base)
    save_safetensors(tmp_path / "tuned.safetensors", tuned)
    vector = TaskVector.between(tmp_path / "base.safetensors", tmp_path / "tuned.safetensors")
    assert equal(vector.apply(base, 1.0), tuned)
    assert equal(vector.apply(base, 0.0), base)
    vector.save(tmp_path / "v.safetensors")
    assert equal(TaskVector.load(tmp_path / "v.safetensors").apply(base), tuned)


@given(st.integers(0, 2**31), st.sampled_from([1e-4, 0.02, 0.2]))
@settings(deadline=None, max_examples=20)
def test_one_is_the_tuned_model_for_any_weights(seed, scale):
    base = tiny.plain(seed)
    tuned = tiny.tuned(base, seed + 1, scale)
    assert equal(TaskVector.between(base, tuned).apply(base), tuned)


def test_half_precision_checkpoints_are_reproduced_in_float32(pair):
    base, tuned = pair
    for dtype in (torch.float16, torch.bfloat16):
        narrow = {k: v.to(dtype) if v.is_floating_point() else v for k, v in tuned.items()}
        applied = TaskVector.between(base, narrow).apply(base)
        assert all(torch.equal(applied[k], narrow[k].to(base[k].dtype)) for k in base)


def test_arithmetic_against_plain_tensors(pair):
    base, tuned = pair
    other = tiny.tuned(base, 7)
    a, b = (TaskVector.between(base, t, name=n) for t, n in ((tuned, "a"), (other, "b")))
    key = "layers.1.fc.weight"
    da, db = tuned[key] - base[key], other[key] - base[key]
    assert torch.allclose((a + b)[key].dense(), da + db)
    assert torch.allclose((a - b)[key].dense(), da - db, atol=1e-7)
    assert torch.allclose((2 * a)[key].dense(), 2 * da)
    assert torch.allclose((-a)[key].dense(), -da)
    flat = [
        torch.cat([(t[k] - base[k]).reshape(-1) for k in base if k != "steps"]).double()
        for t in (tuned, other)
    ]
    assert a.dot(b) == pytest.approx(float(flat[0] @ flat[1]), rel=1e-6, abs=1e-12)
    assert a.norm() == pytest.approx(float(flat[0].norm()), rel=1e-6)
    expected = float(flat[0] @ flat[1] / flat[0].norm() / flat[1].norm())
    assert a.cosine(b) == pytest.approx(expected, rel=1e-5, abs=1e-9)
    assert a.cosine(a) == pytest.approx(1.0)
    assert a.cosine(-a) == pytest.approx(-1.0)


def test_vectors_over_different_bases_do_not_mix(pair, refused):
    base, tuned = pair
    other = tiny.plain(5)
    with refused("VECTOR-BASE", 3):
        TaskVector.between(base, tuned) + TaskVector.between(other, tiny.tuned(other))
    with refused("BANK-LAYOUT", 3):
        smaller = {k: v for k, v in base.items() if not k.startswith("layers.2")}
        TaskVector.between(base, tuned).dot(TaskVector.between(smaller, tiny.tuned(smaller)))


def test_unchanged_blocks_are_absent(pair, tmp_path):
    base, tuned = pair
    tuned["layers.0.fc.weight"] = base["layers.0.fc.weight"].clone()
    vector = TaskVector.between(base, tuned)
    assert "layers.0.fc.weight" not in vector
    assert any("did not change" in note for note in vector.notes)
    assert equal(vector.apply(base), tuned)
    vector.save(tmp_path / "v.safetensors")
    assert "layers.0.fc.weight" not in TaskVector.load(tmp_path / "v.safetensors")


@pytest.mark.parametrize("storage", ["fp32", "fp16", "bf16", "int8", "int4", "residual4", "residual2"])
def test_stored_error_is_the_true_error(pair, tmp_path, storage):
    base, tuned = pair
    vector = TaskVector.between(base, tuned)
    vector.save(tmp_path / "v.safetensors", storage=storage)
    stored = TaskVector.load(tmp_path / "v.safetensors")
    assert stored.relative_error == pytest.approx(
        (stored - vector).norm() / vector.norm(), rel=1e-3, abs=1e-9
    )
    again = {b.name: stored[b.name].norm() for b in stored.blocks}
    assert again == pytest.approx(dict(stored.norms), rel=1e-5)


def test_saving_twice_gives_the_same_bytes(pair, tmp_path):
    base, tuned = pair
    hashes = {TaskVector.between(base, tuned, name="v").save(tmp_path / f"{i}") for i in range(2)}
    assert len(hashes) == 1
    reloaded = TaskVector.load(tmp_path / "0").save(tmp_path / "2")
    assert reloaded in hashes


def test_a_vector_is_not_applied_to_another_base_unless_asked(refused):
    """512 x 512, so that some elements carry exact values, which belong to one base only."""
    g = torch.Generator().manual_seed(0)
    a, b = ({"w": torch.randn(512, 512, generator=g) * 0.02} for _ in range(2))
    tuned = {"w": a["w"]}
    for _ in range(10):  # steps of training, each with its own rounding
        tuned["w"] = tuned["w"] + 0.0005 * torch.randn(512, 512, generator=g)
    vector = TaskVector.between(a, tuned)
    assert vector["w"].exact is not None
    with refused("BANK-BASE", 3, "any_base"):
        vector.apply(b)
    moved = vector.apply(b, any_base=True)["w"]
    assert torch.equal(moved, b["w"] + vector["w"].values)


def test_a_base_whose_files_do_not_say_the_activation_is_still_the_base(pair):
    base, tuned = pair
    known = BlockSource(TensorMap(base, activation="quick_gelu"))
    vector = TaskVector.between(known, tuned)
    assert equal(vector.apply(base), tuned)


def test_only_the_sign_of_zero_changes(tmp_path):
    base = {"w": torch.zeros(4, 4), "v": torch.ones(4)}
    tuned = {"w": -torch.zeros(4, 4), "v": torch.ones(4) + 0.01}
    vector = TaskVector.between(base, tuned)
    vector.save(tmp_path / "v")
    for found in (vector, TaskVector.load(tmp_path / "v")):
        assert equal(found.apply(base), tuned)


def test_errors_of_packing_follow_a_vector_through_arithmetic(pair, tmp_path):
    base, tuned = pair
    exact = TaskVector.between(base, tuned, name="a")
    other = TaskVector.between(base, tiny.tuned(base, 5), name="b")
    exact.save(tmp_path / "int4", storage="int4")
    packed = TaskVector.load(tmp_path / "int4")
    for total, true in (
        (packed + other, exact + other),
        (other + packed, other + exact),
        (3 * packed, 3 * exact),
    ):
        error = (total - true).norm() / true.norm()
        assert total.relative_error == pytest.approx(error, rel=0.05)
    assert packed.checked().relative_error == packed.relative_error
    total = other + packed
    assert total.renamed("x").relative_error == total.relative_error
    assert Bank({"x": total}).save(tmp_path / "bank")["x"].relative_error == pytest.approx(
        total.relative_error
    )
    assert sum([exact, other]).norm() == pytest.approx((exact + other).norm())


def test_a_difference_that_is_not_a_number_is_never_taken_for_none(pair, tmp_path, refused):
    base, tuned = pair
    broken = TaskVector.between(base, tuned) * float("nan")
    assert broken.norm() != 0
    for use in (
        broken.checked,
        lambda: broken.save(tmp_path / "v"),
        lambda: Bank({"v": broken}).save(tmp_path / "b"),
    ):
        with refused("VECTOR-RANGE", 6, "NaN or infinite"):
            use()
    assert list(tmp_path.iterdir()) == []


def test_a_tie_outlives_the_name_that_is_left_out():
    w = torch.randn(8, 4)
    base = {"b": w, "c": w}
    tuned = dict.fromkeys("abc", w + 0.01)
    vector = TaskVector.between(base, tuned, edits=KeyEdits(("a",)))
    assert equal(vector.apply(base), {name: tuned[name] for name in "bc"})


NAMES = ("shared", "encoder", "decoder", "lm_head")


@pytest.mark.parametrize("base_names", [NAMES, NAMES[::-1], ("shared",), ("decoder", "lm_head")])
@pytest.mark.parametrize(
    "tuned_names", [NAMES, NAMES[::-1], ("shared",), ("lm_head",), ("encoder", "shared")]
)
@pytest.mark.parametrize("untied", [False, True])
def test_files_may_hold_any_names_of_a_tied_tensor(base_names, tuned_names, untied, tmp_path, refused):
    """Some writers keep all of them, some one, some copies; what pairs is the tensor."""
    w, x = torch.randn(8, 4), torch.randn(4)
    m = w + torch.randn(8, 4) * 0.01
    base = dict.fromkeys(base_names, w) | {"x": x}
    tuned = {name: m.clone() if untied else m for name in tuned_names} | {"x": x + 0.01}
    torch.save(base, tmp_path / "base.pt")
    torch.save(tuned, tmp_path / "tuned.pt")
    foreign = untied and set(tuned_names) - set(base_names)
    if foreign or not set(base_names) & set(tuned_names):
        # a copy under a name that the base does not have is another tensor
        with refused("CKPT-KEYS", 3):
            TaskVector.between(tmp_path / "base.pt", tmp_path / "tuned.pt")
        return
    vector = TaskVector.between(tmp_path / "base.pt", tmp_path / "tuned.pt")
    applied = vector.apply(tmp_path / "base.pt")
    assert set(applied) == set(base)
    assert all(torch.equal(applied[name], m) for name in base_names)
    assert len({applied[name].data_ptr() for name in base_names}) == 1


@pytest.mark.parametrize("tied", ["both", "base", "tuned"])
@pytest.mark.parametrize("order", ["same", "reversed"])
def test_ties_are_matched_whatever_the_order_and_whoever_has_them(tied, order, tmp_path, refused):
    w = torch.randn(8, 8)
    base = {"wte": w, "lm": w if tied != "tuned" else w.clone(), "x": torch.randn(8, 8)}
    m = w + 0.01
    names = ("lm", "wte") if order == "reversed" else ("wte", "lm")
    tuned = {names[0]: m, names[1]: m if tied != "base" else m.clone(), "x": base["x"] + 0.01}
    vector = TaskVector.between(base, tuned)
    assert equal(vector.apply(base), tuned)
    if tied == "base":
        with refused("CKPT-KEYS", 3, "under two names"):
            TaskVector.between(base, tuned | {"lm": m + 1})


def test_tied_tensors_are_one_block_and_come_back_tied(tmp_path):
    base = tiny.plain()
    base["head.weight"] = base["layers.0.fc.weight"]
    layout = Layout.of(TensorMap(base))
    assert "head.weight" not in layout.by_name or "layers.0.fc.weight" not in layout.by_name
    torch.save(base, tmp_path / "base.pt")
    tuned = tiny.tuned(base)
    tuned["head.weight"] = tuned["layers.0.fc.weight"]
    torch.save(tuned, tmp_path / "tuned.pt")
    vector = TaskVector.between(tmp_path / "base.pt", tmp_path / "tuned.pt")
    assert equal(vector.apply(tmp_path / "base.pt"), tuned)


def test_views_and_transposed_parameters(tmp_path):
    whole = torch.randn(64, 96)
    base = {"a": whole[:32], "b": whole.T, "c": whole[:, ::2]}
    tuned = {k: v + 0.01 * torch.randn(v.shape) for k, v in base.items()}
    torch.save(base, tmp_path / "base.pt")
    vector = TaskVector.between(tmp_path / "base.pt", tuned)
    assert equal(vector.apply(tmp_path / "base.pt"), tuned)


def test_fingerprint_is_of_values_not_of_storage(pair, tmp_path):
    base, _ = pair
    half = {k: v.half() if v.is_floating_point() else v for k, v in base.items()}
    wide = {k: v.float() if v.is_floating_point() else v for k, v in half.items()}
    torch.save(wide, tmp_path / "wide.pt")
    fingerprints = {BlockSource.of(x).identity().content for x in (half, wide, tmp_path / "wide.pt")}
    assert len(fingerprints) == 1
    wide["layers.0.fc.bias"][3] += 1e-3
    assert BlockSource.of(wide).identity().content not in fingerprints
    quick, plain = (
        BlockSource(TensorMap(half, activation=name)).identity() for name in ("quick_gelu", "gelu")
    )
    assert quick.content == plain.content and not quick.is_same_as(plain)  # the activation is named beside


def test_memory_of_comparing_is_two_tensors_not_two_models(tmp_path):
    """Peak of live tensor bytes while a vector is made and saved."""
    base = {f"w{i}": torch.randn(512, 512) for i in range(12)}
    save_safetensors(tmp_path / "b", base)
    save_safetensors(tmp_path / "t", {k: v + 0.01 * torch.randn(512, 512) for k, v in base.items()})
    del base
    one = 512 * 512 * 4
    from torch.profiler import ProfilerActivity, profile

    vector = TaskVector.between(tmp_path / "b", tmp_path / "t", check=False)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        vector.save(tmp_path / "v")
    live, peak = 0, 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert 0 < peak < 5 * one, peak / one
