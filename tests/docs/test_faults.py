"""The tables of docs/faults.md name tests that exist, and every test named after a row has one."""

from __future__ import annotations

import ast
import os
import re
import signal
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from aniso import errors

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "faults.md").read_text()
HEADER = ["id", "priority", "fault", "what happens", "exit", "test"]
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")
ROW_IDS = re.compile(r"^test_((?:[a-i]\d+_)+)", re.IGNORECASE)


@dataclass(frozen=True)
class Row:
    """One fault."""

    id: str
    priority: str
    fault: str
    happens: str
    exit: str
    test: str

    @property
    def tests(self) -> list[tuple[str, str]]:
        """Path below ``tests/`` and the beginning of functions' names."""
        return NAMED.findall(self.test)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def sections() -> dict[str, list[list[str]]]:
    """The lines of every lettered section's table, by its letter."""
    found = re.findall(r"^## ([A-Z])\. .*?\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return {
        letter: [cells(line) for line in text.splitlines() if line.startswith("|")] for letter, text in found
    }


ROWS = [Row(*line) for lines in sections().values() for line in lines[2:]]


@cache
def functions(path: str) -> frozenset[str]:
    """The test functions of a file, without importing it."""
    tree = ast.parse((TESTS / path).read_text())
    return frozenset(
        node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def known_exit_codes() -> set[int]:
    kinds = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.AnisoError)]
    signals = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    ended = {errors.StoppedError("STOPPED", "", signal=int(number)).exit_code for number in signals}
    return {0} | {kind.exit_code for kind in kinds} | ended


def test_every_table_has_the_same_columns_and_its_own_letter():
    assert list(sections()) == list("ABCDEFGHIJ")
    for letter, lines in sections().items():
        assert lines[0] == HEADER and set("".join(lines[1])) == {"-"}, letter
        assert [line[0] for line in lines[2:]] == [f"{letter}{i}" for i in range(1, len(lines) - 1)]
        assert {len(line) for line in lines} == {len(HEADER)}, letter


def test_ids_are_unique_and_every_cell_says_something():
    assert len(ROWS) > 100 and len({row.id for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert re.fullmatch(r"P[012]", row.priority) and all(vars(row).values()), row


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_every_row_names_tests_that_exist(row):
    for path, name in row.tests:
        assert (TESTS / path).is_file(), path
        assert any(function.startswith(name) for function in functions(path)), (path, name)
    rest = re.sub(r"[\s,]", "", NAMED.sub("", row.test))
    if row.tests:
        assert not rest, rest  # a name that is misspelt
    else:
        assert row.priority != "P0" and row.test == "not covered"


def test_every_test_that_carries_the_id_of_a_row_has_that_row():
    """Tests with the number 0 read an intact file, so that refusals of the others mean something."""
    known, seen = {row.id for row in ROWS}, set()
    for path in sorted(TESTS.glob("faults/test_*.py")):
        for name in functions(path.relative_to(TESTS).as_posix()):
            found = ROW_IDS.match(name)
            ids = [word.upper() for word in found[1].strip("_").split("_")] if found else []
            assert {i for i in ids if i[1:] != "0"} <= known, (path.name, name)
            seen |= {*ids}
    assert len(seen) > 70


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_exit_codes_are_known(row):
    codes = {int(number) for number in re.findall(r"\d+", row.exit)}
    assert codes <= known_exit_codes() and bool(codes) == bool(row.tests)


def test_the_list_of_exit_codes_is_complete():
    text = PAGE.partition("| exit code | meaning |")[2].partition("\n## ")[0]
    listed = [
        number for line in re.findall(r"^\| ([\d, ]+) \|", text, re.MULTILINE) for number in line.split(",")
    ]
    assert {int(number) for number in listed} == known_exit_codes()
    assert len(listed) == len(set(listed))


def test_the_error_shown_is_the_error_printed(aniso, tmp_path, monkeypatch):
    class Call:
        def __reduce__(self):
            return os.system, ("true",)

    (shown,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    torch.save({"visual.proj": torch.zeros(2, 2), "more": Call()}, "cars.pt")
    ran = aniso("convert", "cars.pt", "-o", "new.safetensors")
    assert (ran.code, ran.err) == (4, shown)
