"""Every code block of the documentation runs, in order, in a directory with the files that its page names.

A page has a function of its name below that writes these files, under the names that the page uses, and
returns what its Python blocks presuppose. Commands that take data or hours are only parsed.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import re
import shlex
import shutil
import socket
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import language
import pictures
import pytest
import runs
import sentences
import tiny
import torch
import towers
import typer
from adapters import random_adapter

import aniso as library
from aniso.cli.app import app
from aniso.data import read_examples
from aniso.data.card import read_card
from aniso.demo import write_tasks
from aniso.experiments.spec import Experiment, cells
from aniso.experiments.strict_yaml import parse_yaml, validated
from aniso.registry import MERGE_RULES, REGISTRIES
from aniso.weights import save_safetensors

ROOT = Path(__file__).parents[2]
PATTERNS = ("*.md", "docs/**/*.md", "experiments/*.md", "benchmarks/README.md")
PAGES = sorted(page for pattern in PATTERNS for page in ROOT.glob(pattern))
HOWTOS = sorted((ROOT / "docs/howto").glob("*.md"))
METHODS = sorted((ROOT / "docs/methods").glob("*.md"))
PARSED = (
    *("aniso demo", "aniso run experiments/", "aniso report experiments/"),
    *("aniso paper run tab:addition --data", "aniso explore "),
)
"""Commands that need data which are not ours, write into the repository, serve until they are stopped, or
have other tests."""
SLOW = (
    *("aniso verify-removal without-digits", "aniso compare --model mini --bank mini --task demo-out"),
    *("aniso run SPEC.yaml --data DIR --claim", "aniso run SPEC.yaml --data DIR --shard"),
    "aniso search addition --model mini --bank demo-out",
)
"""Commands that take longer, and have other tests as well: run with ``-m smoke``."""
SHORT = {"fit": ("--epochs", "1", "--min-steps-per-epoch", "1"), "report": ("--no-figures",)}
"""Options that save time."""
KNOWN = {"math", "sh", "python", "text", "toml", "yaml", "json"}
Scope = dict[str, Any]


def blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def shell_lines(page: Path) -> Iterator[str]:
    """Lines of shell blocks, continued ones joined."""
    for block in blocks(page, "sh"):
        yield from (line for line in block.replace("\\\n", " ").splitlines() if line.strip())


def commands(page: Path) -> list[list[str]]:
    lines = [line for line in shell_lines(page) if line.startswith("aniso ")]
    return [shlex.split(line, comments=True)[1:] for line in lines if not line.startswith(PARSED)]


# The files of every page


def _clip(path: Path) -> dict[str, torch.Tensor]:
    return tiny.hf_clip_state(tiny.hf_clip_directory(path))


def _tuned(base: dict[str, torch.Tensor], **seeds: int) -> dict[str, dict[str, torch.Tensor]]:
    return {name: tiny.tuned_vision(base, tiny.is_hf_vision, seed) for name, seed in seeds.items()}


def _adapter(path: Path, seed: int) -> None:
    from transformers import CLIPModel

    random_adapter(CLIPModel.from_pretrained("base"), path, seed, r=2, target_modules=r"vision_model.*fc1")


def _photos(root: Path = Path("photos")) -> None:
    pictures.folder(root / "train", {"red_apple": 6, "frog": 6})
    pictures.folder(root / "test", {"red_apple": 3, "frog": 3}, 50)


def _eurosat(root: Path) -> None:
    """In torchvision's layout, with as many images as its splits need: links to one."""
    pictures.picture(0).save("one.png")
    for name in read_card(ROOT / "src/aniso/data/catalogue/eurosat.toml").classes:
        folder = root / "eurosat/2750" / name
        folder.mkdir(parents=True)
        for i in range(570):
            (folder / f"{i}.png").hardlink_to("one.png")


def _analyse() -> Scope:
    pytest.importorskip("matplotlib")
    shelf = runs.shelf(Path("shelf"))
    for place, name in ((shelf.model, "base"), (shelf.data, "data"), (shelf.bank, "bank")):
        place.rename(name)
    bank = library.Bank.load("bank").only("cars", "dtd")
    added = library.Composition(library.load_model("base"), bank)
    added.values.data.fill_(0.5)
    added.coefficients.save("added.safetensors")
    return {}


def _align() -> Scope:
    towers.timm_directory(Path("IMAGE_TOWER"))
    sentences.save(Path("TEXT_TOWER"))
    _photos()
    _photos(Path("other"))
    files = sorted(Path("photos/train").glob("*/*.png"))
    rows = [f"{file},{text}" for file, text in zip(files, itertools.cycle(sentences.TEXTS[:3]), strict=False)]
    Path("captions.csv").write_text("\n".join(["image,caption", *rows]) + "\n")
    return {}


def _banks() -> Scope:
    for name, state in _tuned(_clip(Path("base")), cars=1, mnist=2).items():
        save_safetensors(Path(f"{name}.safetensors"), state)
    _adapter(Path("loras/svhn"), 3)
    return {}


def _compose() -> Scope:
    weights = "{filter: attn, value: [0, 0.5]}, {value: 0.25}"
    merged = f"models: [{{model: org/cars, parameters: {{weight: [{weights}]}}}}]"
    Path("merge.yml").write_text(f"merge_method: task_arithmetic\nbase_model: org/base\n{merged}\n")
    library.Bank.build("base", _tuned(_clip(Path("base")), cars=1, mnist=2), to="bank")
    for seed, name in enumerate(("a", "b")):
        _adapter(Path("adapters") / name, seed)
    loras = library.Bank.build("base", {name: f"adapters/{name}" for name in "ab"}, to="loras")
    adapted = library.Composition(library.load_model("base"), loras, library.Partition.whole())
    adapted.values.data.fill_(0.5)
    adapted.coefficients.save("loras.safetensors")
    model = tiny.open_clip_vit()
    base = {key: value.detach().clone() for key, value in model.state_dict().items()}
    tuned = {n: tiny.tuned_vision(base, tiny.is_open_clip_vision, i) for i, n in enumerate(("cars", "mnist"))}
    return {
        "aniso": library,
        "torch": torch,
        "model": model,
        "bank": library.Bank.build(base, tuned, to="open-clip-bank"),
        "images": torch.randn(4, 3, 16, 16),
        "labels": torch.tensor([0, 1, 2, 0]),
        "head": lambda outputs: outputs[0],  # open_clip's own forward pass returns several things
        "cross_entropy": torch.nn.functional.cross_entropy,
        "world_size": 1,
    }


def _export() -> Scope:
    _photos()
    _adapters("a", "b")
    library.Bank.build("BASE", {name: Path(name) for name in "ab"}, to="loras")
    language.write_lines(Path("texts.jsonl"), [{"prompt": "the cat", "completion": " sat on a mat"}] * 3)
    return {"image": pictures.picture(0)}


def _explore() -> Scope:
    _photos()
    return {}


def _extend() -> Scope:
    _photos()
    return {}


def _language() -> Scope:
    _adapters("ADAPTER_1", "ADAPTER_2")
    for name, place in (("examples", "mat"), ("more", "hat"), ("rest", "cat")):
        example = {"prompt": "the cat", "completion": f" sat on a {place}"}
        language.write_lines(Path(f"{name}.jsonl"), [example] * 3)
    return {}


def _texts() -> Scope:
    sentences.save(Path("MODEL"))
    sentences.write_task(Path("reviews.csv"), 20)
    sentences.write_task(Path("other.csv"), 14)
    return {}


def _learn() -> Scope:
    """Two cells of the spec that the page shows."""
    for name in ("eurosat", "dtd10"):
        runs.coloured(Path("DIR") / name, 12)
    (spec,) = blocks(ROOT / "docs/howto/learn.md", "yaml")
    grid = "grid: { task: [./eurosat], shots: [1] }"
    short = spec.replace("schedule: { lr: 0.03 }", "schedule: { lr: 0.03, epochs: 1 }, compare: false")
    shelf = runs.shelf(Path("shelf"))
    small = short.replace("model: mini, bank: mini", f"model: {shelf.model}, bank: {shelf.bank}")
    Path("SPEC.yaml").write_text(re.sub(r"grid: .*", grid, small))
    target, control = (library.load_task(str(shelf.data / name)) for name in ("cars", "dtd"))
    composition = library.Composition(library.load_model(str(shelf.model)), library.Bank.load(shelf.bank))
    return {
        "aniso": library,
        "tasks": [target, control],
        "target": target,
        "control": control,
        "composition": composition,
    }


def _merge() -> Scope:
    library.Bank.build("base", _tuned(_clip(Path("base")), cars=1, dtd=2, mnist=3), to="bank")
    for seed, name in enumerate(("a", "b")):
        _adapter(Path("adapters") / name, seed)
    library.Bank.build("base", {name: f"adapters/{name}" for name in "ab"}, to="loras")
    for first, name in enumerate(("cars", "dtd", "mnist")):
        for second, (part, count) in enumerate((("train", 2), ("val", 4), ("test", 3))):
            runs.coloured(Path("data") / name / part, count, 100 * first + 10 * second)
    return {}


def _paper() -> Scope:
    pytest.importorskip("matplotlib")
    Path("DATA").mkdir()
    return {}


def _predict() -> Scope:
    _photos()
    pictures.folder(Path("holiday"), {".": 3, "more": 2})
    Path("names.txt").write_text("cat\ndog\n")
    sentences.save(Path("MODEL"))
    sentences.write_task(Path("reviews.csv"), 20)
    Path("new.csv").write_text("number,comment\n1,the cat sat\n2,rain\n")
    return {}


def _selection() -> Scope:
    _photos()
    shelf = runs.shelf(Path("shelf"))
    for place, name in ((shelf.model, "BASE"), (shelf.data, "DIR"), (shelf.bank, "bank")):
        place.rename(name)
    Path("base").symlink_to("BASE")
    for seed, name in enumerate(("one", "two")):
        _adapter(Path("adapters") / name, seed)
    encoder, bank = library.load_model("BASE"), library.Bank.load("bank")
    return {"encoder": encoder, "bank": bank, "photos": library.load_task("DIR/photos")}


def _tasks() -> Scope:
    _eurosat(Path("data"))
    return {}


def _test_time() -> Scope:
    _photos()
    pictures.folder(Path("holiday"), {"a": 4, "b": 4})
    Path("classes.txt").write_text("cat\ndog\n")
    return {}


def _which_method() -> Scope:
    _photos()
    return {}


def _removal() -> Scope:
    shelf = runs.shelf(Path("shelf"))
    for place, name in ((shelf.model, "BASE"), (shelf.data, "DIR"), (shelf.bank, "bank")):
        place.rename(name)
    return {}


def _teachers() -> Scope:
    """Two tasks named like vectors of the bundled bank."""
    for first, name in ((0, "mnist"), (300, "svhn")):
        for part, count in (("train", 4), ("val", 8), ("test", 4)):
            runs.coloured(Path("DATA") / name / part, count, first)
            first += 20
    return {
        "aniso": library,
        "encoder": library.load_model("mini"),
        "bank": library.Bank.load("mini").only("mnist", "svhn"),
        "tasks": [library.load_task(f"DATA/{name}") for name in ("mnist", "svhn")],
    }


@functools.cache
def _demo_files() -> Path:
    """What the demo leaves: some of its images, and a bank of three vectors with its names."""
    place = Path(tempfile.mkdtemp(prefix="aniso-pages-"))
    atexit.register(shutil.rmtree, place)
    write_tasks(place / "data", lambda *_: None, each=10)
    mini = library.Bank.load("mini")
    sources = {"digits": "mnist", "patterns": "dtd10", "colours": "eurosat"}
    library.Bank({name: mini[source] for name, source in sources.items()}).save(place / "bank")
    return place


def _demo() -> Scope:
    Path("demo-out").symlink_to(_demo_files())
    return {}


def _one_page() -> Scope:
    _photos()
    pictures.folder(Path("flowers/train"), {"rose": 6, "tulip": 6}, 100)
    pictures.folder(Path("flowers/test"), {"rose": 3, "tulip": 3}, 150)
    return {}


def _text_tutorial() -> Scope:
    _texts()
    Path("new.csv").write_text("number,comment\n1,the cat sat\n2,rain\n")
    return {}


def _adapters(*names: str) -> None:
    """A language model in BASE, and adapters for it."""
    from transformers import AutoModelForCausalLM

    language.save("gpt2", Path("BASE"))
    for seed, name in enumerate(names):
        how = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True}
        random_adapter(AutoModelForCausalLM.from_pretrained("BASE"), Path(name), seed, **how)


def _language_tutorial() -> Scope:
    _language()
    for number, name in ((1, "news"), (2, "verse")):
        Path(f"ADAPTER_{number}").rename(name)
    return {}


def _peft() -> Scope:
    _adapters("a", "b")
    language.write_lines(Path("texts.jsonl"), [{"prompt": "the cat", "completion": " sat on a mat"}] * 3)
    return {}


def _mergekit() -> Scope:
    weights = "{filter: attn, value: [0, 0.5]}, {value: 0.25}"
    merged = f"models: [{{model: org/cars, parameters: {{weight: [{weights}]}}}}]"
    Path("merge.yml").write_text(f"merge_method: task_arithmetic\nbase_model: org/base\n{merged}\n")
    for name, state in _tuned(_clip(Path("base")), cars=1, mnist=2).items():
        save_safetensors(Path(f"{name}.safetensors"), state)
    for first, name in enumerate(("cars", "mnist")):
        for second, part in enumerate(("train", "val", "test")):
            runs.coloured(Path("data") / name / part, 2, 100 * first + 10 * second)
    return {}


def _open_clip() -> Scope:
    model = tiny.open_clip_vit()
    base = {key: value.detach().clone() for key, value in model.state_dict().items()}
    tuned = {"cars": tiny.tuned_vision(base, tiny.is_open_clip_vision, 0)}
    bank = library.Bank.build(base, tuned, to="open-clip-bank")
    return {"model": model, "bank": bank, "images": torch.randn(4, 3, 16, 16)}


def _mini() -> Scope:
    pictures.folder(Path("DIR"), {"forest": 10, "river": 10})
    return {}


FILES: dict[str, Callable[[], Scope]] = {
    "docs/howto/align.md": _align,
    "docs/howto/analyse.md": _analyse,
    "docs/howto/banks.md": _banks,
    "docs/howto/compose.md": _compose,
    "docs/howto/explore.md": _explore,
    "docs/howto/export.md": _export,
    "docs/howto/extend.md": _extend,
    "docs/howto/heads.md": dict,
    "docs/howto/language.md": _language,
    "docs/howto/learn.md": _learn,
    "docs/howto/merge.md": _merge,
    "docs/howto/paper.md": _paper,
    "docs/howto/predict.md": _predict,
    "docs/howto/selection.md": _selection,
    "docs/howto/tasks.md": _tasks,
    "docs/howto/test-time.md": _test_time,
    "docs/howto/texts.md": _texts,
    "docs/howto/removal.md": _removal,
    "docs/howto/which-method.md": _which_method,
    "docs/methods/components.md": _teachers,
    "docs/methods/featcal.md": _teachers,
    "docs/methods/regmean.md": _teachers,
    "docs/methods/rounds.md": _teachers,
    "docs/methods/teachers.md": _teachers,
    "docs/mini.md": _mini,
    "docs/howto/clusters.md": _learn,
    "docs/howto/mergekit.md": _mergekit,
    "docs/howto/open-clip.md": _open_clip,
    "docs/howto/peft.md": _peft,
    "docs/start/demo.md": dict,
    "docs/start/install.md": dict,
    "docs/start/one-page.md": _one_page,
    "docs/tutorials/addition-without-labels.md": _demo,
    "docs/tutorials/few-shots.md": _demo,
    "docs/tutorials/first-composition.md": _demo,
    "docs/tutorials/language-models.md": _language_tutorial,
    "docs/tutorials/removal.md": _demo,
    "docs/tutorials/texts.md": _text_tutorial,
}


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """An empty working directory, which is also the user's home; one process of torch's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    for name, value in {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    yield tmp_path
    for registry in REGISTRIES:  # pages register classes of their own
        for name in [n for n, cls in registry._classes.items() if not cls.__module__.startswith("aniso")]:
            del registry._classes[name]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("page", FILES)
def test_commands_and_python_blocks_of_a_page_run_in_order(page, directory, aniso):
    _run_page(page, aniso, leave_out=SLOW)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "page",
    [
        "docs/howto/clusters.md",
        "docs/tutorials/addition-without-labels.md",
        "docs/tutorials/few-shots.md",
        "docs/tutorials/removal.md",
    ],
)
def test_slow_commands_of_a_page_run_in_order(page, directory, aniso):
    _run_page(page, aniso)


def _run_page(page: str, aniso: Callable[..., Any], leave_out: tuple[str, ...] = ()) -> None:
    pytest.importorskip("peft")
    scope = FILES[page]()
    for words in commands(ROOT / page):
        if leave_out and " ".join(("aniso", *words)).startswith(leave_out):
            continue
        merges = words[0] == "fit" and set(words) & set(MERGE_RULES.names) and "--start" not in words
        ran = aniso(*words, *(() if merges else SHORT.get(words[0], ())))  # a merge has no epochs
        assert ran.code == 0, (words, ran.err)
    for block in blocks(ROOT / page, "python"):
        exec(compile(block, page, "exec", dont_inherit=True), scope)  # noqa: S102


def test_every_page_with_code_has_its_files_here():
    """The README and the tour have tests of their own."""
    run = {page for page in PAGES if list(shell_lines(page)) or blocks(page, "python")}
    others = {ROOT / name for name in ("README.md", "CONTRIBUTING.md", "docs/start/tour.md")} | {
        *(ROOT / "experiments").glob("*.md")
    }
    assert {str(page.relative_to(ROOT)) for page in {*run, *HOWTOS} - others} == set(FILES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_are_of_kinds_that_are_checked(page):
    kinds = re.findall(r"^```(\w*)\n.*?^```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert set(kinds) <= KNOWN


# What is not run: every command exists and has the options that it is shown with


def _command(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that words begin with, and the other words."""
    command: click.Command = typer.main.get_command(app)
    while hasattr(command, "get_command") and words:
        found = command.get_command(click.Context(command), words[0])
        if found is None:
            break
        command, words = found, words[1:]
    return command, words


def _options(command: click.Command) -> set[str]:
    context = click.Context(command)
    return {name for own in command.get_params(context) for name in (*own.opts, *own.secondary_opts)}


def _all_options(command: click.Command) -> set[str]:
    """Options of a command, and of all its subcommands."""
    found = _options(command)
    if hasattr(command, "list_commands"):
        context = click.Context(command)
        for name in command.list_commands(context):
            found |= _all_options(command.get_command(context, name))
    return found


def _spans(page: Path) -> list[str]:
    """Commands within sentences."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`(aniso [a-z][^`]*)`", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_have_the_options_they_are_shown_with(page):
    lines = [*(line for line in shell_lines(page) if line.startswith("aniso ")), *_spans(page)]
    for line in lines:
        command, rest = _command(line.split("#")[0].replace("…", " ").split()[1:])
        given = {word.split("=")[0] for word in rest if word.startswith("--") and len(word) > 2}
        assert given <= _all_options(command), (line, given - _all_options(command))
        assert command.name != "aniso" or not rest, line


def test_options_named_within_sentences_exist():
    known = _all_options(typer.main.get_command(app))
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")):
        for span in re.findall(r"`(--[a-z][^`]*)`", page.read_text()):
            given = {word.split("=")[0] for word in span.split() if word.startswith("--")}
            assert given <= known, (page.name, span)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_other_programs_are_given_files_and_targets_that_exist(page):
    makefile = (ROOT / "Makefile").read_text()
    spans = re.findall(r"`((?:python|torchrun|make) [^`]*)`", page.read_text())
    lines = [line for line in shell_lines(page) if not line.startswith("aniso ")]
    for words in (shlex.split(line, comments=True) for line in (*lines, *spans)):
        scripts = [word for word in words if word.endswith(".py")]
        modules = [words[i + 1] for i, word in enumerate(words) if word == "-m"]
        targets = words[1:] if words[0] == "make" else []
        assert scripts or modules or targets, words
        assert all((ROOT / script).is_file() for script in scripts), words
        assert all((ROOT / module.replace(".", "/")).is_dir() for module in modules), words
        assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets), words


# Other kinds of blocks


def test_specs_are_specs():
    for page in (*HOWTOS, *METHODS):
        for text in blocks(page, "yaml"):
            document = parse_yaml(text, page.name)
            assert len(cells(validated(Experiment, document), document)) > 1


def test_cards_and_entry_points_are_toml(tmp_path):
    for page in HOWTOS:
        for text in blocks(page, "toml"):
            if "entry-points" in text:
                groups = tomllib.loads(text)["project"]["entry-points"]
                assert {group.partition(".")[0] for group in groups} == {"aniso"}
            else:
                (tmp_path / "task.toml").write_text(text)
                assert read_card(tmp_path / "task.toml").prompts


def test_examples_of_texts_are_read(tmp_path):
    for page in HOWTOS:
        for text in blocks(page, "json"):
            (tmp_path / "examples.jsonl").write_text(text)
            assert len(read_examples(str(tmp_path / "examples.jsonl"))) == len(text.splitlines())
