"""The documentation site: its generated pages, its links, what it says of installing; and the notebooks."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from statistics import mean

import pytest

from aniso import errors
from aniso.cli.app import app

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "docs"))  # where its modules find each other
try:
    import check
    import links
    import llms
    import numbers_pages
    import reference
finally:
    sys.path.pop(0)


def _script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generated():
    return {**reference.pages(), **numbers_pages.pages()}


# Generated pages


def test_every_command_and_option_has_a_row(generated):
    import click
    import typer

    def walk(command, words):
        context = click.Context(command)
        if hasattr(command, "list_commands"):
            for name in command.list_commands(context):
                walk(command.get_command(context, name), [*words, name])
            return
        page = generated[f"reference/cli/{words[0]}.md"]
        assert f"aniso {' '.join(words)}" in page
        options = {name for own in command.get_params(context) for name in own.opts if name[:2] == "--"}
        missing = {name for name in options - {"--help"} if name not in page}
        assert not missing, (words, missing)

    walk(typer.main.get_command(app), [])


def test_every_error_code_and_exit_code_is_listed(generated):
    assert all(f"`{code}`" in generated["reference/errors.md"] for code in errors.EXPLANATIONS)
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.AnisoError)]
    listed = re.findall(r"^\| (\d+) \|", generated["reference/exit-codes.md"], re.MULTILINE)
    assert {int(code) for code in listed} == {0} | {c.exit_code for c in classes}


def test_every_public_name_is_documented(generated):
    import aniso

    text = "\n".join(text for name, text in generated.items() if name.startswith("reference/python/"))
    for name in aniso._HOMES:
        assert f"::: aniso.{name}\n" in text
    for module in aniso._MODULES.values():
        assert f"::: {module}\n" in text


def test_schemas_accept_a_committed_record(generated):
    """As far as the required fields say."""
    from aniso.record_files import RecordStore

    schema = json.loads(generated["reference/schema/record.json"])
    record = next(iter(RecordStore(ROOT / "experiments/minilm-addition/records").finished().values()))
    assert {*schema["required"]} <= {*record.content()} and "spec" in schema["properties"]


def test_numbers_of_pages_are_those_of_the_results(generated):
    page = generated["numbers/resources.md"]
    bank = json.loads((ROOT / "benchmarks/results/bank.json").read_text())
    assert f"{bank['storages']['int8']['bytes_per_vector'] / 1e6:.1f}" in page
    engine = json.loads((ROOT / "benchmarks/results/engine.json").read_text())
    (steps,) = [
        value["2"] for name, value in engine["steps"].items() if name.startswith("n = 21") and "fp16" in name
    ]
    assert f"| int8 | {steps['int8']['median'] / steps['floor']['median']:.2f} |" in page
    assert "84.98" in generated["numbers/paper.md"] and "tab:addition" in generated["numbers/paper.md"]


def test_the_changelog_has_all_notes(generated):
    notes = [path.read_text().strip()[:60] for path in (ROOT / "changelog.d").glob("*-*.md")]
    assert all(note in generated["project/changelog.md"] for note in notes)


# Links


def test_links_of_the_repository_become_links_of_the_site():
    known = {"howto/learn.md", "gallery.md", "experiments/README.md", "adr/index.md", "project/security.md"}
    text, missing = links.rewritten(
        "[a](../../experiments/README.md#x) [b](learn.md) [c](../../SECURITY.md) [d](https://x.org) "
        "`[e](f)` [g](../../experiments/removal/mnist.json) [h](../adr)",
        "howto/removal.md",
        known,
    )
    assert text == (
        "[a](../experiments/README.md#x) [b](learn.md) [c](../project/security.md) [d](https://x.org) "
        "`[e](f)` [g](../experiments/removal/mnist.json) [h](../adr/index.md)"
    )
    assert missing == {"experiments/removal/mnist.json"}


def test_a_directory_is_shown_by_its_spec_or_not_linked():
    text, missing = links.rewritten("[a](few-shot) [`b`](mini/banks)", "experiments/README.md", set())
    assert text == "[a](few-shot/spec.yaml) `b`" and missing == {"experiments/few-shot/spec.yaml"}


def test_links_of_all_pages_lead_to_files_or_generated_pages(generated):
    places = {*generated, *links.copied_pages().values()}
    places |= {
        path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*") if path.is_file()
    }
    sources = {path.relative_to(ROOT / "docs").as_posix(): path for path in ROOT.glob("docs/**/*.md")}
    sources |= {place: ROOT / source for source, place in links.copied_pages().items()}
    texts = {place: path.read_text() for place, path in sources.items()}
    texts |= {name: text for name, text in generated.items() if name.endswith(".md")}
    for place, text in texts.items():
        shown, missing = links.rewritten(text, place, places)
        assert not [name for name in missing if name.endswith(".md")], (place, missing)  # not on the site
        prose = re.sub(r"^```.*?^```$|`[^`\n]+`", "", shown, flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^)\s#]+)", prose):
            if ":" in link:
                continue
            target = os.path.normpath(Path(place).parent / link)
            assert target in places | missing, (place, link)


def test_every_page_is_in_the_navigation():
    from ruamel.yaml import YAML

    config = YAML(typ="safe").load((ROOT / "mkdocs.yml").read_text())
    shown = {
        path for section in config["nav"] for content in section.values() for path in llms._paths(content)
    }
    own = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert {page for page in own if not page.startswith("adr/")} <= shown


# A built site


def test_the_check_finds_foreign_requests_heavy_pages_and_broken_links(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#there">b</a><a href="https://x.org">x</a>')
    (tmp_path / "b.html").write_text(
        '<h1 id="here">b</h1><a href="c.html">c</a><script src="//cdn.org/x.js"></script>'
    )
    (tmp_path / "d.html").write_text(" " * (check.HEAVIEST + 1))
    found = "\n".join(check.problems(tmp_path))
    for part in (
        "no such anchor",
        "c.html, which does not exist",
        "loads //cdn.org/x.js",
        "d.html: 300,001 bytes",
    ):
        assert part in found
    assert found.count("\n") == 3


def test_the_site_builds_without_a_warning(tmp_path):
    """``make docs`` is this in an environment of its own."""
    for package in ("mkdocs", "material", "mkdocstrings_handlers", "latex2mathml"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'aniso[docs]', or make docs")
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ran = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "site/llms.txt").read_text().count("\n- [") > 60
    assert (tmp_path / "site/howto/learn.md").is_file() and (
        tmp_path / "site/search/search_index.js"
    ).is_file()
    assert "<math" in (tmp_path / "site/start/one-page.html").read_text()


# Pages written by hand


def test_the_extras_of_the_installation_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs/start/install.md").read_text()
    names = [
        name
        for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    ]
    assert sorted(names) == sorted(project["optional-dependencies"])


def test_one_page_has_five_sentences_one_picture_one_formula_and_forty_lines():
    page = (ROOT / "docs/start/one-page.md").read_text()
    first = page.split("\n\n")[1]
    assert len(re.findall(r"\.(?: |$)", first)) == 5
    assert page.count("![") == 1 and page.count("```math") == 1
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert 35 <= len(code.splitlines()) <= 45


def test_the_demo_page_says_what_its_results_say():
    found = json.loads((ROOT / "experiments/demo/results.json").read_text())
    page = (ROOT / "docs/start/demo.md").read_text()

    def value(run, what, *tasks):
        names = tasks or tuple(found[run][what])
        return f"{100 * mean(found[run][what][name] for name in names):.1f}"

    def row(name, *tasks):
        searched = value(f"{name}-search", "accuracy", *tasks) if f"{name}-search" in found else ""
        own = value(name, "own vector", *tasks) if found[name]["own vector"] else ""
        return [value(name, "zero-shot", *tasks), searched, value(name, "accuracy", *tasks), own]

    rows = [row("few-shot"), row("addition"), row("negation", "digits"), row("negation", "colours")]
    for row in rows:
        cells = "".join(f" {cell} |" if cell else " |" for cell in row)
        assert f"|{cells}\n" in page, row


def test_what_is_said_of_when_it_works_is_what_was_recorded():
    page = (ROOT / "docs/concepts/when-it-works.md").read_text()
    overview = _script("overview")
    measured = [
        json.loads((ROOT / "experiments" / name / "disentanglement.json").read_text())
        for name in overview.BASES.values()
    ]
    for key, text, unit in (
        ("own gain", "a vector adds to its own task, points", ".1f"),
        ("change on other tasks", "it changes another task by, points", ".1f"),
        ("share of own gains kept in the sum", "the plain sum of eight keeps of these gains", ".0f"),
    ):
        cells = [f"{100 * found[key]:{unit}}" + (" %" if unit == ".0f" else "") for found in measured]
        assert f"| {text} | {' | '.join(cells)} |" in page, cells
    rows = {row[0]: row[1:] for row in overview.table()[1:]}
    names = {
        "zero-shot": "zero-shot",
        "one scale, searched": overview.ROWS["isotropic search"],
        "one coefficient per vector and block": overview.ROWS["learned anisotropic"],
        "each task's own model": overview.ROWS["own vector for each task"],
    }
    for name, row in names.items():
        assert f"| {name} | {' | '.join(rows[row])} |" in page, name
    scale, blocks = (
        float(rows[overview.ROWS[label]][1].split()[0])
        for label in ("isotropic search", "learned anisotropic")
    )
    assert f"pay most: {blocks - scale:.1f} points above one scale" in page


def test_the_picture_of_the_readme_shows_what_was_recorded():
    from PIL import Image

    overview = _script("overview")
    content = overview.OUT.read_bytes()
    assert len(content) <= overview.LARGEST
    with Image.open(overview.OUT) as image:
        assert json.loads(image.text["table"]) == overview.table()


# Notebooks


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_and_keeps_small_outputs(path, tmp_path):
    pytest.importorskip("matplotlib")
    notebooks = _script("notebooks")
    text = path.read_text()
    assert len(text) <= notebooks.LARGEST
    assert all(cell["outputs"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
    short = text.replace("epochs=5", "epochs=1").replace("min_steps_per_epoch=12", "min_steps_per_epoch=1")
    (tmp_path / path.name).write_text(short.replace("each=60", "each=8"))
    ran = json.loads(notebooks.run(tmp_path / path.name))
    assert [cell["source"] for cell in ran["cells"]]
    assert all(cell["outputs"] for cell in ran["cells"] if cell["cell_type"] == "code")
