"""Bad experiment files: each is refused with its line, before anything is made of it."""

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict
from watch import FUZZ, no_hang, peak_below

from aniso.errors import UsageError
from aniso.experiments.spec import Experiment, cells
from aniso.experiments.strict_yaml import Document, parse_yaml, read_yaml, validated


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Schedule(Strict):
    lr: float
    epochs: int = 1


class Arm(Strict):
    name: str
    schedule: Schedule


class Spec(Strict):
    arms: list[Arm]
    classes: tuple[str, ...] = ()


GOOD = """\
arms:
- name: a
  schedule:
    lr: 1e-3
    epochs: 010
classes: [no, yes, on, off, 2024-01-01]
"""


@pytest.fixture
def file(tmp_path):
    """``file(content)`` is a file of that content."""

    def write(content):
        path = tmp_path / "spec.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_g0_a_good_file_is_read(file):
    spec = validated(Spec, read_yaml(file(GOOD)))
    assert spec.arms[0].schedule.lr == 0.001
    assert spec.arms[0].schedule.epochs == 10
    assert spec.classes == ("no", "yes", "on", "off", "2024-01-01")


@pytest.mark.parametrize(
    ("right", "wrong", "line", "key"),
    [
        ("arms:", "arm:", 1, "arm"),
        ("classes:", "clases:", 6, "clases"),
        ("schedule:", "shedule:", 3, "arms.0.shedule"),
        ("epochs:", "epoch:", 5, "arms.0.schedule.epoch"),
    ],
)
def test_g1_an_unknown_key_is_named_with_its_line_and_the_likely_one(file, refused, right, wrong, line, key):
    path = file(GOOD.replace(right, wrong))
    meant = f"did you mean '{right[:-1]}'?"
    with refused("SPEC", 2, str(path), f"line {line}: unknown key '{key}'", meant):
        validated(Spec, read_yaml(path))


@pytest.mark.parametrize(
    ("right", "wrong", "line", "key"),
    [
        ("1e-3", "no", 4, "arms.0.schedule.lr"),
        ("1e-3", "'1e-3'", 4, "arms.0.schedule.lr"),
        ("010", "1.0", 5, "arms.0.schedule.epochs"),
        ("010", "2024-01-01", 5, "arms.0.schedule.epochs"),
        ("[no,", "[1,", 6, "classes.0"),
    ],
)
def test_g2_a_value_of_another_kind_is_not_converted(file, refused, right, wrong, line, key):
    with refused("SPEC", 2, f"line {line}: '{key}'", wrong.strip("[',")):
        validated(Spec, read_yaml(file(GOOD.replace(right, wrong))))


LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(12)
)


@pytest.mark.parametrize(
    ("content", "mentions"),
    [
        (GOOD + "arms: []\n", ["line 7: duplicate key", "in line 1"]),
        ("a:\n  b: 1\n  b: 1\n", ["line 3: duplicate key", "a.b"]),
        ("a: {b: 1, 'b': 1}\n", ["line 1: duplicate key"]),
        ("a:\n\tb: 1\n", ["line 2: a tab"]),
        ("a:\n  b: 1\n  \tc: 1\n", ["line 3: a tab"]),
        (LAUGHS, ["line 1: anchors are not supported"]),
        ("a: 1\nb: *a\n", ["line 2: anchors are not supported"]),
        ("a: 1\n&x b: 1\n", ["line 2: anchors are not supported"]),
        ("a: &a [*a]\n", ["line 1: anchors are not supported"]),
        ("<<: {a: 1}\nb: {<<: *x}\n", ["line 2: anchors are not supported"]),
        ("a: 1\nb: !x 1\n", ["line 2: tags are not supported", "!x"]),
        ("a: !!str 1\n", ["line 1: tags are not supported"]),
        ("a: ! 1\n", ["tags are not supported"]),
        ("!!map\na: 1\n", ["tags are not supported"]),
        ("a: [!!python/none x]\n", ["tags are not supported"]),
        ("!x a: 1\n", ["tags are not supported"]),
        ("%TAG !e! tag:e,2000:\n---\na: 1\n", ["directives are not supported"]),
        ("%YAML 1.1\n---\na: no\n", ["directives are not supported"]),
        ("a: 1\n---\nb: 1\n", ["line 2: a second document"]),
        ("a: 1\n...\n---\n", ["line 3: a second document"]),
        ("", ["is empty"]),
        ("\ufeff", ["is empty"]),
        ("# nothing\n\n", ["is empty"]),
        ("---\n", ["is empty"]),
        ("- a\n", ["top level", "a list"]),
        ("a\n", ["top level"]),
        ("a: .inf\n", ["line 1: numbers must be finite"]),
        ("a:\n- -.INF\n", ["line 2: numbers must be finite"]),
        ("a: .nan\n", ["numbers must be finite"]),
        ("a: 1e999\n", ["numbers must be finite"]),
        ("a: " + "9" * 5000, ["more than 100 characters"]),
        ("a: 0x" + "f" * 5000, ["more than 100 characters"]),
        ("a: 1\n1: x\n", ["line 2: a key is not text", "in quotes"]),
        ("true: x\n", ["a key is not text"]),
        (": x\n", ["a key is not text"]),
        ("1.5: x\n", ["a key is not text"]),
        ("? [a, b]\n: x\n", ["a key is not text"]),
        ("{a: b}: x\n", ["a key is not text"]),
        ("a: " + "[" * 32 + "]" * 32, ["nested too deeply", "32 levels"]),
        ("a: " + "[" * 100_000, ["nested too deeply"]),
        ("- " * 100_000, ["nested too deeply"]),
        ("? " * 100_000, ["not text"]),
        ("a: {" * 100_000, ["nested too deeply"]),
        ("a: 'x\n", ["not valid YAML"]),
        ("a: b: c\n", ["line 1: not valid YAML"]),
        ("a: 1\n b: 2\n", ["line 2: not valid YAML"]),
        ("a: @x\n", ["not valid YAML"]),
        ("a: 1\nb: \x1b[2J\n", ["line 2: not valid YAML", "0x1b"]),
        ('a: 1\nb: "\\UFFFFFFFF"\n', ["not valid YAML"]),
        ('a: "\\ud800"\n', ["surrogate"]),
        (b"a: 1\nb: \xff\n", ["line 2: not UTF-8", "0xff"]),
        (GOOD.encode("utf-16"), ["not UTF-8"]),
        (GOOD.encode("utf-16-le"), ["not valid YAML"]),
        (b"a: 1\n#" + b"x" * (1 << 20), ["too large"]),
    ],
    ids=lambda value: None if isinstance(value, list) else ascii(value[:24]),
)
def test_g5_a_bad_file_is_refused_with_its_line(file, refused, content, mentions):
    path = file(content)
    with no_hang(20), peak_below(64), refused("SPEC", 2, str(path), *mentions):
        read_yaml(path)


@pytest.mark.parametrize(
    "tag",
    ["!!python/object/apply:os.system", "!!python/object/new:os.system", "!!python/name:os.system", "!x"],
)
def test_g5_nothing_a_tag_asks_for_is_done(file, refused, tag, tmp_path):
    trap = tmp_path / "trap"
    with refused("SPEC", 2, "line 1: tags are not supported"):
        read_yaml(file(f"a: {tag} ['touch {trap}']\n"))
    assert not trap.exists()


def test_g5_a_byte_order_mark_is_no_part_of_the_first_key(file):
    assert read_yaml(file(b"\xef\xbb\xbfa: 1\n")).data == {"a": 1}


def test_g5_up_to_the_limits_files_are_read(file):
    assert read_yaml(file("a: " + "[" * 31 + "]" * 31)).data["a"]
    text = "a: 1\n#"
    assert read_yaml(file(text + "x" * ((1 << 20) - len(text)))).data == {"a": 1}


def test_g5_a_missing_file_is_said_to_be_missing(tmp_path, refused):
    with refused("FILE-MISSING", 3, "none.yaml"):
        read_yaml(tmp_path / "none.yaml")


def test_g5_only_regular_files_are_opened(tmp_path, refused):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with no_hang(), refused("FILE-KIND", 3, str(path)):
            read_yaml(path)
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(tmp_path / "s"))
        with refused("FILE-ACCESS", 3):
            read_yaml(tmp_path / "s")


@FUZZ
@given(st.data())
def test_g5_damaged_files_are_read_or_refused(data):
    text = list(GOOD)
    for at in data.draw(st.lists(st.integers(0, len(text) - 1), min_size=1, max_size=4)):
        text[at] = data.draw(
            st.sampled_from(["", "\t", "\n", " ", "&a ", "*a", "!", "[", "}", "'", '"', ":", "0"])
        )
    try:
        validated(Spec, parse_yaml("".join(text), "x"))
    except UsageError as e:
        assert e.code == "SPEC"


def test_g1_a_grid_of_millions_of_cells_is_refused_before_they_are_made(refused):
    many = {key: list(range(100)) for key in ("seed", "shots", "split_seed", "schedule.epochs")}
    base = {"setting": "few-shot", "model": "mini", "bank": "mini", "task": "cars"}
    data = {"schema": 1, "name": "huge", "base": base, "grid": many, "variants": [{"label": "a"}]}
    document = Document("huge.yaml", data, {})
    with refused("SPEC", 2, "huge.yaml", "100,000,000 cells"):
        cells(validated(Experiment, document), document)
