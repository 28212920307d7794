"""Fault table D: task vectors that would be wrong without a word."""

from __future__ import annotations

import json

import pytest
import tiny
import torch

from aniso.vectors import Bank, BlockSource, KeyEdits, TaskVector
from aniso.weights import TensorMap, save_safetensors


@pytest.fixture
def base(tmp_path):
    state = tiny.plain()
    save_safetensors(tmp_path / "base.safetensors", state)
    return state


def make(aniso, tmp_path, tuned, *options):
    """``aniso vector make`` on a tuned model; a refusal must leave no output and no changed input."""
    save_safetensors(tmp_path / "tuned.safetensors", tuned, overwrite=True)
    inputs = {p: p.read_bytes() for p in tmp_path.glob("*.safetensors")}
    out = tmp_path / "out" / "v.safetensors"
    out.parent.mkdir(exist_ok=True)
    out.unlink(missing_ok=True)
    ran = aniso("vector", "make", "--base", tmp_path / "base.safetensors", tmp_path / "tuned.safetensors",
                "-o", out, "--overwrite", *options)  # fmt: skip
    assert all(p.read_bytes() == data for p, data in inputs.items())
    assert out.exists() == (ran.code == 0)
    assert list(out.parent.iterdir()) == ([out] if ran.code == 0 else [])
    return ran


def test_a10_nan_in_one_tensor_is_named(base, aniso, tmp_path):
    tuned = tiny.tuned(base)
    tuned["layers.1.fc.weight"][2, 7] = float("nan")
    tuned["layers.1.fc.weight"][3, 0] = float("inf")
    ran = make(aniso, tmp_path, tuned)
    assert ran.code == 3
    for text in ("WEIGHT-NONFINITE", "layers.1.fc.weight", "2 values", f"element {2 * 64 + 7}"):
        assert text in ran.err
    looked = aniso("inspect", "--hash", tmp_path / "tuned.safetensors")
    assert looked.code == 3
    assert "layers.1.fc.weight has 2 values" in looked.err
    allowed = aniso("inspect", "--hash", "--allow-nonfinite", tmp_path / "tuned.safetensors")
    assert allowed.code == 0
    assert "layers.1.fc.weight has 2 values" in allowed.err


def test_d1_another_base_of_the_same_shape_is_refused(base, aniso, tmp_path):
    ran = make(aniso, tmp_path, tiny.plain(99))
    assert ran.code == 3
    assert "VECTOR-DISTANT" in ran.err
    assert "--allow-distant" in ran.err
    assert make(aniso, tmp_path, tiny.plain(99), "--allow-distant").code == 0


def test_d1_a_large_change_is_a_warning(base, aniso, tmp_path):
    ran = make(aniso, tmp_path, tiny.tuned(base, scale=0.4))
    assert ran.code == 0
    assert "warning: " in ran.err
    assert "is the base right?" in ran.err
    assert "is the base right?" not in make(aniso, tmp_path, tiny.tuned(base, scale=0.02)).err


@pytest.mark.parametrize(
    "damaged", [{"layers.1.fc.weight": 1e6}, {"layers.2.fc.bias": 1e6}, {"layers.0.gate": 1e8}], ids=str
)
def test_d1_one_block_that_was_scaled_is_refused_by_name(base, aniso, tmp_path, damaged):
    tuned = tiny.tuned(base)
    ((key, factor),) = damaged.items()
    tuned[key] *= factor
    ran = make(aniso, tmp_path, tuned)
    assert ran.code == 3, ran.err
    assert "VECTOR-DISTANT" in ran.err and key in ran.err and "--allow-distant" in ran.err
    allowed = make(aniso, tmp_path, tuned, "--allow-distant")
    assert allowed.code == 0
    assert "warning: 1 blocks changed more than fine-tuning does" in allowed.err and key in allowed.err
    files = ("--base", tmp_path / "base.safetensors", f"a={tmp_path / 'tuned.safetensors'}")
    built = aniso("bank", "build", *files, "-o", tmp_path / "bank")
    assert built.code == 3 and key in built.err
    assert not (tmp_path / "bank").exists()


def test_d1_one_block_that_moved_far_is_a_warning(base, aniso, tmp_path):
    tuned = tiny.tuned(base)
    tuned["layers.1.fc.weight"] *= 3
    ran = make(aniso, tmp_path, tuned)
    assert ran.code == 0
    assert "warning: 1 blocks changed more than fine-tuning does: layers.1.fc.weight by 2" in ran.err


def test_d1_a_matrix_that_started_at_zero_does_not_look_damaged(base, aniso, tmp_path):
    base["layers.1.fc.weight"] *= 0
    save_safetensors(tmp_path / "base.safetensors", base, overwrite=True)
    ran = make(aniso, tmp_path, tiny.tuned(base))
    assert ran.code == 0 and "more than fine-tuning" not in ran.err


def test_d1_fresh_biases_do_not_look_like_another_base(base, aniso, tmp_path):
    for key in base:
        if key.endswith("bias"):
            base[key] *= 1e-6
    save_safetensors(tmp_path / "base.safetensors", base, overwrite=True)
    tuned = tiny.tuned(base)
    for key in tuned:
        if key.endswith("bias"):
            tuned[key] += 0.01
    assert make(aniso, tmp_path, tuned).code == 0


def test_d2_a_copy_of_the_base_is_an_error(base, aniso, tmp_path):
    ran = make(aniso, tmp_path, base)
    assert ran.code == 3
    assert "nothing was fine-tuned" in ran.err


def test_d2_unchanged_blocks_are_listed_and_left_out(base, aniso, tmp_path):
    tuned = tiny.tuned(base)
    tuned["layers.1.ln.weight"] = base["layers.1.ln.weight"]
    ran = make(aniso, tmp_path, tuned)
    assert ran.code == 0
    assert "1 blocks did not change" in ran.err
    assert "layers.1.ln.weight" in ran.err
    shown = json.loads(aniso("vector", "show", "--json", tmp_path / "out/v.safetensors").out)
    assert shown["blocks"]["layers.1.ln.weight"] is None


def test_d3_missing_and_extra_names_are_a_table(base, aniso, tmp_path):
    tuned = tiny.tuned(base)
    tuned["head.weight"] = torch.zeros(3, 3)
    tuned["layers.0.fc.WEIGHT"] = tuned.pop("layers.0.fc.weight")
    ran = make(aniso, tmp_path, tuned)
    assert ran.code == 3
    for text in ("CKPT-KEYS", "head.weight", "layers.0.fc.WEIGHT", "layers.0.fc.weight", "--skip-key"):
        assert text in ran.err
    fixed = make(aniso, tmp_path, tuned, "--skip-key", "head.*", "--rename",
                 "layers.0.fc.WEIGHT=layers.0.fc.weight")  # fmt: skip
    assert fixed.code == 0
    assert "left out on request" in fixed.err
    assert "renamed" in fixed.err


def test_d3_a_new_name_that_is_taken_is_an_error(base, aniso, tmp_path):
    tuned = tiny.tuned(base)
    tuned = {"ema.weight": tuned["layers.0.fc.weight"] * 2} | tuned
    options = ("--rename", "ema.weight=layers.0.fc.weight")
    ran = make(aniso, tmp_path, tuned, *options)
    assert ran.code == 2
    assert "two tensors called 'layers.0.fc.weight'" in ran.err
    assert make(aniso, tmp_path, tuned, *options, "--skip-key", "layers.0.fc.weight").code == 0


def test_d3_an_exception_need_fit_only_one_of_several_files(base, aniso, tmp_path):
    save_safetensors(tmp_path / "a.safetensors", tiny.tuned(base, 1) | {"head": torch.zeros(3)})
    save_safetensors(tmp_path / "b.safetensors", tiny.tuned(base, 2))
    ran = aniso("bank", "build", "--base", tmp_path / "base.safetensors", tmp_path / "a.safetensors",
                tmp_path / "b.safetensors", "-o", tmp_path / "bank", "--skip-key", "head")  # fmt: skip
    assert ran.code == 0, ran.err


def test_d3_two_keys_that_come_to_have_one_name_are_an_error(refused):
    base = {f"clip.{k}": v.detach().clone() for k, v in tiny.hf_clip().state_dict().items()}
    with refused("CKPT-AMBIGUOUS", 3, "clip.logit_scale", "logit_scale"):
        BlockSource(TensorMap(base | {"logit_scale": torch.tensor(9.0)}))


@pytest.mark.parametrize("key", ["x." + "9" * 5000, "1²", "layers.٣.weight", "a.00000000001.b"])
def test_d3_numbers_in_names_are_only_names(key, aniso, tmp_path):
    save_safetensors(tmp_path / "x.safetensors", {key: torch.zeros(2, 2), "b": torch.zeros(2)})
    assert aniso("inspect", tmp_path / "x.safetensors").code == 0


@pytest.mark.parametrize("key", ["w|exact.index", "aniso.index"])
def test_d3_names_that_the_format_needs_are_refused(key, tmp_path, refused):
    base = {"w": torch.randn(4, 4), key: torch.randn(4, 4)}
    with refused("CKPT-KEYS", 3, key):
        Bank.build(base, {"a": tiny.tuned(base)}, to=tmp_path / "bank")
    assert not (tmp_path / "bank").exists()


def test_d3_an_exception_that_matches_nothing_is_an_error(base, aniso, tmp_path):
    ran = make(aniso, tmp_path, tiny.tuned(base), "--skip-key", "heads.*")
    assert ran.code == 2
    assert "heads.*" in ran.err


def test_d3_a_block_missing_on_request_is_absent(base, aniso, tmp_path):
    ran = make(aniso, tmp_path, tiny.tuned(base), "--skip-key", "layers.2.*")
    assert ran.code == 0
    shown = json.loads(aniso("vector", "show", "--json", tmp_path / "out/v.safetensors").out)
    assert [n for n, norm in shown["blocks"].items() if norm is None] == [
        b for b in shown["blocks"] if b.startswith("layers.2.")
    ]


def test_d3_the_order_of_names_plays_no_part(base):
    tuned = tiny.tuned(base)
    shuffled = dict(sorted(tuned.items(), key=lambda item: item[0][::-1]))
    a, b = TaskVector.between(base, tuned), TaskVector.between(dict(reversed(base.items())), shuffled)
    assert a.base.content == b.base.content
    assert dict(a.norms) == dict(b.norms)


def test_d4_another_shape_is_an_error_and_nothing_is_resized(base, aniso, tmp_path):
    tuned = tiny.tuned(base)
    tuned["layers.0.fc.weight"] = torch.randn(96, 65)
    ran = make(aniso, tmp_path, tuned)
    assert ran.code == 3
    for text in ("CKPT-SHAPE", "layers.0.fc.weight", "(96, 64)", "(96, 65)"):
        assert text in ran.err
    larger = {k: torch.cat([v, v]) if v.ndim else v for k, v in tiny.tuned(base).items()}
    ran = make(aniso, tmp_path, larger)
    assert "a model of another size" in ran.err
    assert "more blocks differ" in ran.err


@pytest.mark.parametrize(("dtype", "loud"), [(torch.float16, False), (torch.bfloat16, True)])
def test_d5_rounding_of_half_precision_is_estimated(base, aniso, tmp_path, dtype, loud):
    exact = tiny.tuned(base, scale=0.01)
    tuned = {k: v.to(dtype) if v.is_floating_point() else v for k, v in exact.items()}
    ran = make(aniso, tmp_path, tuned)
    assert ran.code == 0
    assert ("warning: stored as" in ran.err) == loud
    # the estimate against the truth, which only this test knows
    lost = sum(float((tuned[k].float() - exact[k]).norm()) ** 2 for k in base if k != "steps") ** 0.5
    true = lost / TaskVector.between(base, exact).norm()
    said = float(ran.err.split("rounding is about ")[1].split("%")[0]) / 100
    assert said == pytest.approx(true, rel=0.2, abs=0.0006)


def test_d5_files_with_some_tensors_in_half_precision(base, aniso, tmp_path):
    """The usual form of CLIP: matrices in half precision, norms and embeddings in full."""
    tuned = {k: v.half() if v.ndim == 2 else v for k, v in tiny.tuned(base).items()}
    ran = make(aniso, tmp_path, tuned)
    assert "stored as F16, rounding is about" in ran.err
    double = {k: v.double() if v.is_floating_point() else v for k, v in tiny.tuned(base).items()}
    assert "stored as F64, computed in float32" in make(aniso, tmp_path, double).err


def test_d6_leaving_the_range_of_half_precision_is_named(base, refused, tmp_path):
    vector = TaskVector.between(base, tiny.tuned(base))
    with refused("VECTOR-RANGE", 6, "float16", "bf16"):
        vector.apply(base, 1e8, dtype=torch.float16)
    with refused("VECTOR-RANGE", 6):
        vector.apply(base, 1e30, dtype=torch.float16)
    assert vector.apply(base, 1e8, dtype=torch.bfloat16)
    huge = dict(base, **{"layers.0.fc.weight": base["layers.0.fc.weight"] + 70000.0})
    far = TaskVector.between(base, huge, allow_distant=True)
    with refused("VECTOR-RANGE", 6, "layers.0.fc.weight"):
        far.save(tmp_path / "v", storage="fp16")
    assert not (tmp_path / "v").exists()


def test_d7_integers_are_copied_listed_and_must_agree(base, aniso, tmp_path):
    ran = make(aniso, tmp_path, tiny.tuned(base))
    assert "never scaled: buffer" in ran.err
    tuned = tiny.tuned(base)
    tuned["steps"] = tuned["steps"] + 1
    ran = make(aniso, tmp_path, tuned)
    assert ran.code == 3
    assert "CKPT-BUFFER" in ran.err
    assert "steps" in ran.err
    assert make(aniso, tmp_path, tuned, "--skip-key", "steps").code == 0


def test_d7_logit_scale_and_text_tower_stay_the_bases(refused):
    base = {k: v.detach().clone() for k, v in tiny.hf_clip().state_dict().items()}
    tuned = tiny.tuned_vision(base, tiny.is_hf_vision)
    vector = TaskVector.between(base, tuned)
    assert not [b for b in vector.layout.blocks if "text" in b.name or "logit" in b.name]
    assert torch.equal(vector.apply(base)["logit_scale"], base["logit_scale"])
    with refused("CKPT-BUFFER", 3, "logit_scale"):
        TaskVector.between(base, tuned | {"logit_scale": torch.tensor(4.0)})
    moved = "text_model.encoder.layers.0.mlp.fc1.weight"
    with refused("CKPT-BUFFER", 3, moved, "text tower"):
        TaskVector.between(base, tuned | {moved: base[moved] + 0.1})
    TaskVector.between(base, tuned | {moved: base[moved] + 0.1}, edits=KeyEdits(("text_model.*",)))


def test_d8_statistics_stay_the_bases_and_it_is_said():
    base = {k: v.detach().clone() for k, v in tiny.open_clip_resnet().state_dict().items()}
    tuned = tiny.tuned_vision(base, tiny.is_open_clip_vision)
    for key in tuned:
        if key.endswith("running_var"):
            tuned[key] = tuned[key] * 0.1
    vector = TaskVector.between(base, tuned)
    assert any("BatchNorm statistics differ; the base's are kept" in note for note in vector.notes)
    for coefficient in (1.0, -5.0):
        composed = vector.apply(base, coefficient)
        assert all(torch.equal(composed[k], base[k]) for k in base if k.endswith("running_var"))


def test_d9_the_activation_is_part_of_the_identity(tmp_path, refused, aniso):
    model = tiny.hf_clip(activation="quick_gelu")
    model.save_pretrained(tmp_path / "quick")
    base = {k: v.detach().clone() for k, v in model.state_dict().items()}
    other = tiny.hf_clip(activation="gelu")
    other.load_state_dict(tiny.tuned_vision(base, tiny.is_hf_vision))
    other.save_pretrained(tmp_path / "gelu")
    with refused("CKPT-ACTIVATION", 3, "quick_gelu", "gelu"):
        TaskVector.between(tmp_path / "quick", tmp_path / "gelu")
    ran = aniso("vector", "make", "--base", tmp_path / "quick", tmp_path / "gelu", "-o", tmp_path / "v")
    assert ran.code == 3
    quick, plain, unknown = (
        BlockSource(TensorMap(base, activation=a)).identity() for a in ("quick_gelu", "gelu", None)
    )
    assert not quick.is_same_as(plain)
    assert quick.is_same_as(unknown) and plain.is_same_as(unknown)


def test_d10_tied_tensors_are_one_block_and_the_result_loads_in_transformers(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=16))
    base = model.state_dict()
    tuned = tiny.tuned(base)
    tuned["lm_head.weight"] = tuned["transformer.wte.weight"]
    vector = TaskVector.between(base, tuned)
    names = [b.name for b in vector.layout.blocks]
    assert ("lm_head.weight" in names) != ("transformer.wte.weight" in names)
    composed = vector.apply(base)
    assert composed["lm_head.weight"].data_ptr() == composed["transformer.wte.weight"].data_ptr()
    model.load_state_dict(composed)
    model.save_pretrained(tmp_path / "out")
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert torch.equal(again.lm_head.weight, composed["lm_head.weight"])


def test_d12_different_bases_and_duplicates(base, refused, tmp_path):
    tuned = tiny.tuned(base)
    other = tiny.plain(3)
    a = TaskVector.between(base, tuned, name="a")
    b = TaskVector.between(other, tiny.tuned(other), name="b")
    with refused("VECTOR-BASE", 3):
        a.cosine(b)
    save_safetensors(tmp_path / "t.safetensors", tuned)
    bank = Bank.build(base, {"x": tmp_path / "t.safetensors", "y": tmp_path / "t.safetensors"})
    assert any(note.startswith("warning:") and "same file" in note for note in bank.notes)


def test_d13_a_linearised_checkpoint_is_not_taken_for_a_standard_one(base, aniso, tmp_path):
    linearised = {f"model.params.{i}": v for i, v in enumerate(base.values()) if v.is_floating_point()}
    linearised |= {f"model.params0.{i}": v for i, v in enumerate(base.values()) if v.is_floating_point()}
    ran = make(aniso, tmp_path, {k: v.clone() for k, v in linearised.items()})
    assert ran.code == 3
    assert "CKPT-LINEARISED" in ran.err


def test_d14_no_vector_at_all(base, refused):
    with refused("BANK-NAME", 2):
        Bank.build(base, {})


def test_integer_weights_are_named(base, aniso, tmp_path):
    tuned = tiny.tuned(base)
    tuned["layers.0.fc.weight"] = (tuned["layers.0.fc.weight"] * 100).to(torch.int8)
    ran = make(aniso, tmp_path, tuned)
    assert ran.code == 3
    for text in ("WEIGHT-DTYPE", "layers.0.fc.weight", "I8"):
        assert text in ran.err
