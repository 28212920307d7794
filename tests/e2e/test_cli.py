"""The commands as a user meets them, on small real models."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import tiny
import torch

from aniso.vectors import Bank, TaskVector
from aniso.weights import save_safetensors


@pytest.fixture
def shelf(tmp_path):
    """A base and three ways in which a fine-tuned model comes: safetensors, pickle, directory."""
    model = tiny.hf_clip(activation="quick_gelu")
    model.save_pretrained(tmp_path / "base")
    base = {k: v.detach().clone() for k, v in model.state_dict().items()}
    tuned = [tiny.tuned_vision(base, tiny.is_hf_vision, seed) for seed in (1, 2, 3)]
    save_safetensors(tmp_path / "cars.safetensors", tuned[0])
    torch.save(
        {"state_dict": {f"module.{k}": v for k, v in tuned[1].items()}, "epoch": 3}, tmp_path / "dtd.pt"
    )
    model.load_state_dict(tuned[2])
    model.save_pretrained(tmp_path / "sun397")
    return tmp_path, base, tuned


def test_from_files_to_a_checked_compact_bank(shelf, aniso):
    root, _, tuned = shelf
    ran = aniso("bank", "build", "--base", root / "base", root / "cars.safetensors", root / "dtd.pt",
                f"sun={root / 'sun397'}", "-o", root / "bank")  # fmt: skip
    assert ran.code == 0, ran.err
    assert "weights taken from entry 'state_dict'" in ran.err
    assert "prefix 'module.' removed" in ran.err
    assert "hf-clip-vit, 32 blocks" in ran.out
    bank = Bank.load(root / "bank")
    assert bank.names == ("cars", "dtd", "sun")
    for name, state in zip(bank, tuned, strict=True):
        applied = bank[name].apply(root / "base")
        assert all(torch.equal(applied[k], v) for k, v in state.items())

    assert aniso("bank", "check", root / "bank").code == 0
    ran = aniso("bank", "quantise", root / "bank", "-o", root / "small", "--storage", "int4", "--json")
    report = json.loads(ran.out)
    assert report["storage"] == "int4"
    assert all(v["relative_error"] < 0.12 for v in report["vectors"])
    listed = aniso("bank", "ls", root / "small")
    assert listed.code == 0
    assert "int4" in listed.out


def test_add_then_list_as_json(shelf, aniso):
    root, _, _ = shelf
    aniso("bank", "build", "--base", root / "base", root / "cars.safetensors", "-o", root / "bank")
    ran = aniso("bank", "add", root / "bank", root / "dtd.pt", "--base", root / "base", "--json")
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    assert [v["name"] for v in report["vectors"]] == ["cars", "dtd"]
    assert report["base"]["activation"] == "quick_gelu"
    assert str(root) not in json.dumps(report["vectors"])  # records carry no paths


def test_vectors_make_show_cosine(shelf, aniso):
    root, base, tuned = shelf
    for name in ("cars.safetensors", "dtd.pt"):
        ran = aniso("vector", "make", root / name, "--base", root / "base", "-o", root / f"{name}.vector")
        assert ran.code == 0, ran.err
    shown = aniso("vector", "show", root / "cars.safetensors.vector")
    assert "visual.transformer.resblocks.1.mlp.c_fc.weight" in shown.out
    assert "attention weight" in shown.out
    ran = aniso("vector", "cosine", root / "cars.safetensors.vector", root / "dtd.pt.vector", "--json")
    matrix = json.loads(ran.out)["cosine"]
    a, b = (TaskVector.between(base, t) for t in tuned[:2])
    assert matrix[0][1] == pytest.approx(a.cosine(b), abs=1e-6)
    assert matrix[0][0] == 1.0


def test_inspect_says_what_a_pickle_would_have_called(tmp_path, aniso):
    class Evil:
        def __reduce__(self):
            return (tmp_path / "marker").write_text, ("x",)

    torch.save({"w": torch.zeros(2, 2), "evil": Evil()}, tmp_path / "evil.pt")
    ran = aniso("inspect", tmp_path / "evil.pt")
    assert ran.code == 4
    assert "would have called" in ran.out
    assert json.loads(aniso("inspect", "--json", tmp_path / "evil.pt").out)["would_call"]
    refused = aniso("convert", tmp_path / "evil.pt", "-o", tmp_path / "out.safetensors")
    assert refused.code == 4
    assert "--tensors-only" in refused.err
    assert (
        aniso("convert", "--tensors-only", tmp_path / "evil.pt", "-o", tmp_path / "out.safetensors").code == 0
    )
    assert not (tmp_path / "marker").exists()


def test_inspect_hashes_do_not_depend_on_the_naming(shelf, aniso):
    root, _, _ = shelf
    aniso("convert", root / "base", "-o", root / "oc", "--to", "open_clip")
    reports = [json.loads(aniso("inspect", "--hash", "--json", root / d).out) for d in ("base", "oc")]
    assert reports[0]["fingerprint"] == reports[1]["fingerprint"]
    assert reports[0]["sha256"] != reports[1]["sha256"]
    assert [len(r["blocks"]) for r in reports] == [32, 32]


def test_convert_back_and_forth_through_the_command_line(shelf, aniso):
    root, base, _ = shelf
    assert aniso("convert", root / "base", "-o", root / "oc", "--to", "open_clip").code == 0
    assert aniso("convert", root / "oc", "-o", root / "hf", "--to", "huggingface").code == 0
    from transformers import CLIPModel

    again = CLIPModel.from_pretrained(root / "hf").state_dict()
    assert all(torch.equal(again[k], base[k]) for k in base)


def test_errors_as_json(tmp_path, aniso):
    ran = aniso("inspect", "--json", tmp_path / "nothing.safetensors")
    assert ran.code == 3
    error = json.loads(ran.err)
    assert error["error"] == "FILE-MISSING"
    assert error["exit"] == 3
    assert error["fix"]


def test_explain_knows_every_code(aniso):
    assert "Pairing is by name" in aniso("explain", "ckpt-keys").out
    assert aniso("explain", "NO-SUCH").code == 2


def test_usage_errors_are_exit_2(aniso):
    assert aniso("bank", "build").code == 2
    assert aniso("nonsense").code == 2
    assert aniso("--help").code == 0


@pytest.mark.parametrize("pair", ["x", "=y", "x="])
def test_rename_needs_two_names(shelf, aniso, pair):
    root, _, _ = shelf
    ran = aniso("bank", "build", "--base", root / "base", root / "cars.safetensors", "-o", root / "b",
                "--rename", pair)  # fmt: skip
    assert ran.code == 2


def test_odd_but_plausible_command_lines(shelf, aniso, monkeypatch):
    root, _, tuned = shelf
    long = "x" * 300
    build = ("bank", "build", "--base", root / "base")
    for command, code in (
        (("inspect", long), 3),
        (("bank", "ls", long), 3),
        (("vector", "cosine", long, long), 3),
        (("vector", "show", root / "cars.safetensors"), 3),
        (("bank", "ls", root), 3),
        (("convert", root / "cars.safetensors", "-o", root / long), 5),
        ((*build, root / "cars.safetensors", "-o", root / long), 5),
        ((*build, root / "cars.safetensors", "-o", root / "cars.safetensors"), 2),
        ((*build, "-o", root / "b"), 2),
    ):
        ran = aniso(*command)
        assert ran.code == code, (command, ran.code, ran.err)
        assert "BUG" not in ran.err
    runs = root / "lr=1e-5"
    runs.mkdir()
    save_safetensors(runs / "model.safetensors", tuned[0])
    monkeypatch.chdir(root)
    assert aniso(*build, "lr=1e-5/model.safetensors", "-o", root / "b1").code == 0
    assert aniso(*build, "named=lr=1e-5/model.safetensors", "-o", root / "b2").code == 0
    assert Bank.load(root / "b2").names == ("named",)


def test_a_vector_file_is_known_for_what_it_is(shelf, aniso):
    root, _, _ = shelf
    aniso("vector", "make", root / "cars.safetensors", "--base", root / "base", "-o", root / "v")
    assert "over base" in aniso("inspect", root / "v").out
    ran = aniso(
        "bank", "build", f"cars={root / 'v'}", root / "dtd.pt", "--base", root / "base", "-o", root / "b"
    )
    assert ran.code == 0, ran.err
    assert "2 vectors" in aniso("bank", "check", root / "b").out
    both = json.loads(aniso("vector", "cosine", root / "b", root / "v", "--json").out)
    assert both["names"] == ["cars", "dtd", "cars"]
    assert both["cosine"][0][2] == pytest.approx(1.0)


def test_a_vector_file_is_not_taken_for_a_model(shelf, aniso):
    root, _, _ = shelf
    aniso("vector", "make", root / "cars.safetensors", "--base", root / "base", "-o", root / "v")
    for command in (
        ("vector", "make", root / "v", "--base", root / "base", "-o", root / "x"),
        ("vector", "make", root / "cars.safetensors", "--base", root / "v", "-o", root / "x"),
        ("convert", root / "v", "-o", root / "x"),
    ):
        ran = aniso(*command)
        assert ran.code == 3
        assert "is a task vector, not a model" in ran.err


def test_help_without_arguments_is_help(aniso):
    ran = aniso("bank")
    assert ran.code == 2
    assert "error" not in ran.err
    assert "quantise" in ran.err + ran.out


def test_usage_errors_are_json_for_programs(aniso):
    error = json.loads(aniso("bank", "build", "--json").err)
    assert (error["error"], error["exit"]) == ("USAGE", 2)


def test_running_out_of_memory_is_said(aniso, monkeypatch, tmp_path):
    from aniso import weights

    def full(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 TB")

    monkeypatch.setattr(weights, "open_weights", full)
    ran = aniso("inspect", tmp_path)
    assert ran.code == 5
    assert "OUT-MEMORY" in ran.err


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_tables_reach_any_reader_whole(shelf, encoding):
    """A pipe has no width, and maybe an old encoding."""
    import os

    root, _, _ = shelf
    save_safetensors(
        root / "long.safetensors", {"layer." * 20 + "weight": torch.zeros(2), "é" * 300: torch.zeros(2)}
    )
    env = {k: v for k, v in os.environ.items() if k != "COLUMNS"} | {"PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "aniso", "inspect", "--keys", str(root / "long.safetensors")]
    done = subprocess.run(command, capture_output=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    assert ("layer." * 20 + "weight").encode() in done.stdout


def test_doctor(aniso):
    report = json.loads(aniso("doctor", "--json").out)
    assert {p["name"]: p["ok"] for p in report["packages"]}["torch"]
    assert report["machine"]["offline"] == "HF_HUB_OFFLINE"


def test_a_closed_pipe_is_not_an_error(shelf):
    root, _, _ = shelf
    command = f"{sys.executable} -m aniso inspect --keys {root / 'base'} | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_names_from_files_cannot_write_to_the_terminal(tmp_path, aniso):
    nasty = "layer.\x1b[31mred\x07.weight"
    save_safetensors(tmp_path / "x.safetensors", {nasty: torch.zeros(2), "a" * 60_000: torch.zeros(1)})
    ran = aniso("inspect", "--keys", tmp_path / "x.safetensors")
    assert ran.code == 0
    assert "\x1b[31m" not in ran.out
    assert "\x07" not in ran.out
    assert len(ran.out) < 5000


def test_the_storages_offered_are_those_there_are(shelf, aniso):
    from aniso.vectors import Storage

    shown = aniso("bank", "build", "--help").out
    assert all(storage in shown for storage in Storage)
    ran = aniso("bank", "build", "x", "--base", shelf[0] / "base", "-o", shelf[0] / "b", "--storage", "int3")
    assert ran.code in (2, 3)
