"""Mistakes on the command line are reported before torch is imported; early checks list what exists."""

from __future__ import annotations

import subprocess
import sys

import pytest

from aniso.cli import checks, merge, options
from aniso.data.card import known_tasks
from aniso.merge.merging import CHOICES
from aniso.merge.ties_rule import FORMS
from aniso.vectors import Storage, list_banks
from aniso.vectors.convert import DTYPES

MISTAKES = [
    "bake no.safetensors --bank mini --base mini -o out",
    "bake no.safetensors --bank mini --base mini -o out --to gguf",
    "eval mini --task no-such-task",
    "eval mini --task cifar10 --split validation",
    "eval mini --task cifar10 --on-bad-image perhaps",
    "eval mini --task cifar10 --bank nobank --vector x",
    "eval gpt2 --texts no.txt",
    "bank ls nobank",
    "bank build x=no.pt --base mini -o bank",
    "bank quantise mini -o q --storage int3",
    "bank merge tsvm --bank mini -o v.safetensors",
    "bank merge tsv --bank nobank -o v.safetensors",
    "bank merge tsv --bank mini",
    "bank merge tsv --bank mini -o v.safetensors --qkv both",
    "bank merge tsv --bank mini -o v.safetensors --scale 0",
    "bank merge tsv --bank mini -o v.safetensors --option keep",
    "bank merge tsv --bank mini --bake out",
    "coefficients make cars --bank mini -o c.safetensors",
    "convert no.pt -o x.safetensors",
    "inspect no.safetensors",
    "task show no-such-task",
    "vector make no.pt --base mini -o v.safetensors",
    "report no-such-directory -o page",
    "run no.yaml",
    "demo -o .",
    "analyse similarity --bank nobank",
    "analyse similarity --bank mini --by depth",
    "analyse similarity --bank mini -o figure.pdf",
    "analyse disentanglement --model mini --bank mini --task cifar10",
    "analyse disentanglement --model mini --bank mini --task cifar10 --task no-such-task",
    "analyse disentanglement --model mini --bank nobank --task cifar10 --task mnist",
    "analyse significance --model mini --bank mini --task cifar10 --scale nan",
    "analyse significance --model mini --bank mini --task x=no-such-task",
    "analyse distributions --model mini --task cifar10",
    "analyse distributions --task cifar10 --task mnist",
    "compare --model mini --task cifar10 --also nothing",
    "compare addition --model mini --bank mini --task cifar10 --methods tvs",
    "compare addition --model mini --bank nobank --task cifar10",
    "compare addition --model mini --bank mini --task ./no-such-task",
    "compare addition --model mini --bank mini --task cifar10 --folds 1",
]


def test_mistakes_are_reported_without_importing_torch(tmp_path):
    """One process for all of them; its own modules say whether torch was needed."""
    (tmp_path / "file").touch()
    code = (
        "import sys\nfrom aniso.cli import main\n"
        f"for line in {MISTAKES!r}:\n"
        "    code = main(line.split())\n"
        "    print(code, 'torch' in sys.modules, line)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    lines = ran.stdout.splitlines()
    assert len(lines) == len(MISTAKES), ran.stderr
    assert [line for line in lines if not line.startswith(("2 False", "3 False"))] == []


def test_early_checks_list_the_values_that_exist():
    assert set(checks.STORAGES) == {storage.value for storage in Storage}
    assert set(checks.DTYPES) == set(DTYPES)
    early = {"qkv": merge._QKV, "embeddings": merge._EMBEDDINGS, "small": merge._SMALL, "space": merge._SPACE}
    assert early == CHOICES
    assert merge._FORMS == FORMS
    assert all(storage in options.Storage.__metadata__[0].help for storage in checks.STORAGES)


def test_early_checks_accept_every_bundled_bank_and_known_task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (*list_banks(), "random:4", "random:4:1"):
        checks.existing_bank(name)
    for name in (*known_tasks(), "./not-there", "card.toml"):
        checks.existing_task(name)
    for ref in ("mini", "ViT-B-32:openai", "owner/name", "owner/name@main", "hub:owner/x.bin"):
        checks.existing_weights(ref)


@pytest.mark.parametrize("check", [checks.existing_bank, checks.existing_weights, checks.existing_task])
def test_near_misses_name_the_argument(check, refused):
    with pytest.raises(checks.InputError, match=r"no-such\.pt"):
        check("no-such.pt")


def test_an_invalid_value_lists_the_choices(refused):
    checks.one_of("--to", None, ("a", "b", "c"))
    with refused("USAGE", 2, "invalid value 'x' for --to: choose a, b or c", "--to a"):
        checks.one_of("--to", "x", ("a", "b", "c"))
