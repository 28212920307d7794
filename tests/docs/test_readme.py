"""What the README and the tour tell people to type works, in the order they tell it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import language
import pictures
import pytest
import tiny
import torch
from adapters import random_adapter

from aniso import Coefficients
from aniso.errors import EXPLANATIONS
from aniso.weights import save_safetensors

ROOT = Path(__file__).parents[2]
README, TOUR = ((ROOT / name).read_text() for name in ("README.md", "docs/start/tour.md"))


def snippets(language, page=TOUR):
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """The files that both pages name."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = tiny.hf_clip()
    base = {k: v.detach().clone() for k, v in model.state_dict().items()}
    model.save_pretrained(tmp_path / "base")
    save_safetensors(tmp_path / "cars.safetensors", tiny.tuned_vision(base, tiny.is_hf_vision, 1))
    (tmp_path / "legacy").mkdir()
    torch.save(tiny.tuned_vision(base, tiny.is_hf_vision, 2), tmp_path / "legacy/dtd.pt")
    lora = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=r"vision_model.*fc1"))
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "lora" in name:
                parameter.normal_(0, 0.02)
    lora.save_pretrained(tmp_path / "loras/sun397")
    language.save("gpt2", tmp_path / "gpt")
    for seed, name in enumerate(("news", "verse")):
        gpt = AutoModelForCausalLM.from_pretrained(tmp_path / "gpt")
        random_adapter(
            gpt, tmp_path / "loras" / name, seed, r=2, target_modules=["c_attn"], fan_in_fan_out=True
        )
    for name, place in (("examples", "mat"), ("held-out", "hat")):
        said = {"prompt": "the cat", "completion": f" sat on a {place}"}
        language.write_lines(tmp_path / f"{name}.jsonl", [said] * 3)
    pictures.folder(tmp_path / "photos/train", {"red_apple": 5, "frog": 5})
    pictures.folder(tmp_path / "photos/test", {"red_apple": 3, "frog": 3}, 50)
    pictures.folder(tmp_path / "unsorted", {"a": 4, "b": 4}, 90)
    pictures.folder(tmp_path / "flowers/train", {"rose": 6, "tulip": 6}, 100)
    pictures.folder(tmp_path / "flowers/test", {"rose": 3, "tulip": 3}, 150)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", [README, TOUR], ids=["readme", "tour"])
def test_every_aniso_command_runs_in_order(shelf, aniso, page):
    lines = [line for block in snippets("sh", page) for line in block.splitlines()]
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("aniso ")]
    assert len(commands) >= 3
    for command in commands:
        ran = aniso(*command)
        assert ran.code == 0, (command, ran.err)


def test_the_python_snippets_run_one_after_the_other(shelf, capsys):
    settings, vectors, learning, tasks = snippets("python")
    g = torch.Generator().manual_seed(0)
    scope: dict[str, object] = {
        "batches": [(torch.randn(4, 3, 16, 16, generator=g), torch.tensor([0, 1, 2, 0])) for _ in range(3)],
        "class_weights": torch.nn.functional.normalize(torch.randn(3, tiny.EMBED, generator=g), dim=-1),
    }
    exec(settings, scope)  # noqa: S102
    assert Coefficients.load("photos.safetensors").values.any() and len(scope["addition"].parts) == 2
    assert [weight for weight, _ in scope["negation"].parts] == [1, -1]
    assert "of 6" in capsys.readouterr().out
    exec(vectors, scope)  # noqa: S102
    assert set(scope["state_dict"]) == set(scope["exact"])
    assert "visual." in capsys.readouterr().out
    exec(learning, scope)  # noqa: S102
    learned = Coefficients.load("learned.safetensors")
    assert learned.vectors == ("cars", "sun397") and bool(learned.values.any())
    assert Path("learned-model.safetensors").exists()
    exec(tasks, scope)  # noqa: S102
    assert "of 6" in capsys.readouterr().out
    assert len(scope["shots"]) == 8 and not hasattr(scope["unlabelled"], "labels")
    assert scope["vector"].norm() > 0


def test_the_two_commands_are_in_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    targets = [shlex.split(line, comments=True)[1] for line in snippets("sh", README)[0].splitlines()]
    assert targets == ["demo", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_the_error_shown_is_the_error_made(shelf, aniso):
    (shown,) = snippets("text")
    wide = {k: torch.cat([v, v]) if v.ndim else v for k, v in _state(shelf / "base").items()}
    save_safetensors(shelf / "vit-l-14.safetensors", wide)
    ran = aniso("vector", "make", "vit-l-14.safetensors", "--base", "base", "-o", "v")
    words = [line.split()[0] for line in shown.strip().splitlines()]
    assert [line.split()[0] for line in ran.err.strip().splitlines()] == words
    assert shown.splitlines()[0] == ran.err.splitlines()[0]


def _state(path):
    from aniso.weights import open_weights

    source = open_weights(path)
    return {k: source.read(k) for k in source.tensors}


def test_links_lead_somewhere():
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert link.startswith("https://") or (page.parent / link).exists(), (page.name, link)


def test_the_exit_codes_listed_are_those_of_the_errors():
    from aniso import errors

    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.AnisoError)]
    (listed,) = re.findall(r"Exit codes: (.*?)\. `--json`", TOUR)
    assert {int(n) for n in re.findall(r"\b(\d+) [a-z]", listed)} == {0, 143} | {c.exit_code for c in classes}
    assert len(EXPLANATIONS) > 40
