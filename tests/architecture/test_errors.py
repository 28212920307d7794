"""One tree of errors: every code is explained, every explanation is needed, every error travels."""

from __future__ import annotations

import ast
import copy
import inspect
import json
import pickle
import re
from pathlib import Path

import pytest
import torch

import aniso
from aniso import errors
from aniso.errors import EXPLANATIONS, AnisoError, printable

ROOT = Path(aniso.__file__).parent
TREES = {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, AnisoError)]
CODE = re.compile(r"[A-Z]+(-[A-Z]+)*")


def constants(node: ast.AST) -> list[str]:
    """The strings an expression can be, for those written out in it."""
    if isinstance(node, ast.IfExp):
        return constants(node.body) + constants(node.orelse)
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def raised() -> list[tuple[str, str]]:
    """Every code an error is made with, and where."""
    names = {kind.__name__ for kind in KINDS}
    found = []
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in names and node.args:
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                found += [(code, place) for code in constants(node.args[0])]
    return found


def test_every_code_is_explained():
    found = raised()
    assert len(found) > 50
    assert [(code, place) for code, place in found if code not in EXPLANATIONS] == []


def test_every_code_has_the_form_of_a_code():
    assert [code for code, _ in raised() if not CODE.fullmatch(code)] == []
    assert [code for code in EXPLANATIONS if not CODE.fullmatch(code)] == []


def test_every_explanation_belongs_to_an_error():
    used = {
        node.value
        for path, tree in TREES.items()
        if path.name != "errors.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and CODE.fullmatch(node.value)
    }
    assert sorted(EXPLANATIONS.keys() - used) == []


def test_every_explanation_is_a_sentence():
    assert [code for code, text in EXPLANATIONS.items() if not re.match(r"[A-Za-z`-].{20,}", text)] == []


def test_every_kind_has_an_exit_code_of_its_own_and_the_docstring_draws_it():
    codes = {kind.__name__: kind.exit_code for kind in KINDS}
    assert len(set(codes.values())) == len(codes)
    assert codes == {
        "AnisoError": 1,
        "UsageError": 2,
        "InputError": 3,
        "UnsafeError": 4,
        "ResourceError": 5,
        "NumericalError": 6,
        "CellsError": 7,
        "LockedError": 8,
        "StoppedError": 130,
    }
    drawn = dict(re.findall(r"\* (\w+) +exit (\d+)", errors.__doc__))
    assert drawn == {name: str(code) for name, code in codes.items() if name != "AnisoError"}


def example(kind: type[AnisoError]) -> AnisoError:
    return kind(
        "CKPT-SHAPE",
        "'a' does not fit 'b'",
        likely="another model",
        fix="type this",
        key="visual.proj",
        expected="(768, 512)",
        found=["x", "y"],
        dtype=torch.float16,
        nothing=None,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_errors_cross_processes_whole(kind, protocol):
    error = example(kind)
    twin = pickle.loads(pickle.dumps(error, protocol))
    assert type(twin) is kind
    assert str(twin) == str(error)
    assert twin.to_json() == error.to_json()
    assert twin.facts == error.facts


def test_an_error_changed_on_its_way_crosses_as_it_is_now():
    error = example(AnisoError)
    error.message = "said more clearly"
    assert "said more clearly" in str(pickle.loads(pickle.dumps(error)))
    assert str(copy.copy(error)) == str(error)


def test_an_error_says_all_it_knows():
    assert str(example(AnisoError)).splitlines() == [
        "error[CKPT-SHAPE]: 'a' does not fit 'b'",
        "  key       visual.proj",
        "  expected  (768, 512)",
        "  found     x",
        "            y",
        "  dtype     torch.float16",
        "  likely    another model",
        "  fix       type this      (aniso explain CKPT-SHAPE)",
    ]


def test_an_error_for_programs_is_json():
    progress = json.loads(json.dumps(example(AnisoError).to_json()))
    assert progress["error"] == "CKPT-SHAPE"
    assert progress["exit"] == 1
    assert progress["facts"]["found"] == ["x", "y"]
    assert (progress["likely"], progress["fix"]) == ("another model", "type this")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("Größe 模型 🙂", "Größe 模型 🙂"),
        ("a\nb", r"a\nb"),
        ("a\r\tb", r"a\r\tb"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\x1b]8;;http://x\x07", r"\x1b]8;;http://x\x07"),
        ("\x00\x7f\x9b", r"\x00\x7f\x9b"),
        ("\u202eevil", r"\u202eevil"),
        ("\u2028\u200b\ufeff", r"\u2028\u200b\ufeff"),
        ("\udc80", r"\udc80"),
        (Path("a/b\n"), r"a/b\n"),
        (None, "None"),
    ],
    ids=ascii,
)
def test_control_characters_are_shown_escaped(text, shown):
    assert printable(text) == shown
    assert printable(text).isprintable()


def test_long_text_is_cut_and_it_shows():
    assert printable("x" * 160) == "x" * 160
    assert printable("x" * 161) == "x" * 159 + "…"
    assert printable("\n" * 161) == (r"\n" * 80)[:159] + "…"
    assert printable("x" * 10**7, 10) == "x" * 9 + "…"


def test_no_part_of_an_error_reaches_the_terminal_raw():
    bad = "a\x1b[2Jb\n\rc"
    error = AnisoError("USAGE", bad, likely=bad, fix=bad, key=bad, found=[bad, bad])
    assert str(error).count(r"a\x1b[2Jb\n\rc") == 6
    assert "\x1b" not in str(error)
    assert "\r" not in str(error)
    assert len(str(error).splitlines()) == 6


def test_every_error_says_what_to_type_next():
    """The ``fix`` of an error is never left out, whichever module raises it."""
    names = {kind.__name__ for kind in KINDS}
    silent = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in names
        and not any(keyword.arg == "fix" for keyword in node.keywords)
    ]
    assert not silent
