"""Strict YAML: what is read is what YAML 1.2 says, what is written is read back, what is wrong is named."""

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, model_validator

from aniso.errors import UsageError
from aniso.experiments.strict_yaml import Document, as_yaml, parse_yaml, read_yaml, validated, with_values

QUICK = settings(deadline=None, max_examples=150, database=None, derandomize=True)


def read(text):
    return parse_yaml(text, "x.yaml").data


# reading


@pytest.mark.parametrize(
    ("word", "value"),
    [
        *[(word, None) for word in ("", "~", "null", "Null", "NULL")],
        *[(word, True) for word in ("true", "True", "TRUE")],
        *[(word, False) for word in ("false", "False", "FALSE")],
        *[("0", 0), ("-7", -7), ("+7", 7), ("010", 10), ("0o10", 8), ("0x1F", 31), ("-0", 0)],
        *[("1e-3", 0.001), ("1E3", 1000.0), (".5", 0.5), ("-.5", -0.5), ("1.", 1.0), ("+1.5e+2", 150.0)],
        *[(word, word) for word in ("yes", "no", "on", "off", "Yes", "NO", "y", "n", "nULL", "tRUE")],
        *[(word, word) for word in ("2024-01-01", "2024-01-01T00:00:00Z", "12:30:45", "1_000", "0b1")],
        *[(word, word) for word in ("1e", "e5", "0o8", "0xg", "-0x1", "1.2.3", "+", ".", "inf", "nan", "<<")],
        ("'1'", "1"),
        ('"true"', "true"),
        ("''", ""),
        ("|\n  1\n", "1\n"),
        (">-\n  null\n", "null"),
        ("1\n  2", "1 2"),
        ("x # not this", "x"),
        ("x#this", "x#this"),
        ("[no, 1, {a: b}, []]", ["no", 1, {"a": "b"}, []]),
        ("{}", {}),
        ('"\\U0001F642 \\x00"', "🙂 \0"),
    ],
)
def test_a_value_is_what_yaml_1_2_says(word, value):
    found = read(f"a: {word}\n")["a"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["%YAML 1.2\n---\na: 1\n", "---\na: 1\n...\n", "\ufeffa: 1", "a: 1\r\n"])
def test_ways_to_frame_one_document(text):
    assert read(text) == {"a": 1}


def test_order_is_kept():
    assert list(read("b: 1\na: 2\nno: 3\n")) == ["b", "a", "no"]


TEXT = """\
# a comment
seed: 1

schedule:
  lr: 0.1
  steps: [1,
    2]
tasks:
- name: dtd
- name: cars
  note: |
    two
    lines
last: {a: 1,
  b: 2}
"""


def test_every_key_and_item_has_its_line():
    assert parse_yaml(TEXT, "x").lines == {
        ("seed",): 2,
        ("schedule",): 4,
        ("schedule", "lr"): 5,
        ("schedule", "steps"): 6,
        ("schedule", "steps", 0): 6,
        ("schedule", "steps", 1): 7,
        ("tasks",): 8,
        ("tasks", 0): 9,
        ("tasks", 0, "name"): 9,
        ("tasks", 1): 10,
        ("tasks", 1, "name"): 10,
        ("tasks", 1, "note"): 11,
        ("last",): 14,
        ("last", "a"): 14,
        ("last", "b"): 15,
    }


def test_a_file_is_called_by_its_path(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("a: ä\n", "utf-8")
    assert read_yaml(path) == Document(str(path), {"a": "ä"}, {("a",): 1})


def test_nothing_heavy_is_imported():
    code = "import sys, aniso.experiments.strict_yaml; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


SIGNS = st.sampled_from(
    [*"abn01.-~:?,[]{}#&*!|>'\"%@`\\ \t\n\r\ufeff\x85\u2028", "\n  ", ": ", "- ", "---\n", "...\n"]
)


@QUICK
@given(st.text() | st.lists(SIGNS, max_size=30).map("".join))
@example("a: \ud800")
@example('a: "\\UFFFFFFFF"')
@example('a: "\\ud83d\\ude00"')
@example("a: \0")
@example("%YAML 9.9\n---\n")
@example("%TAG ! tag:x\n---\na: 1")
@example("a: " + "1" * 5000)
def test_any_text_is_read_or_refused(text):
    for use in (lambda: read(text), lambda: with_values(parse_yaml("a: 1", "x"), [text, f"a={text}"])):
        try:
            assert isinstance(use(), dict | Document)
        except UsageError as e:
            assert e.code == "SPEC"
            assert str(e)


# writing

NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | st.booleans() | NUMBERS | st.text()
VALUES = st.recursive(
    LEAVES, lambda own: st.lists(own, max_size=4) | st.dictionaries(st.text(), own, max_size=4), max_leaves=15
)


def same(a, b):
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b and str(a) == str(b)


@QUICK
@given(st.dictionaries(st.text(), VALUES, max_size=5))
def test_what_is_written_is_read_back(data):
    assert same(read(as_yaml(data)), data)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "1",
            "010",
            "0x1",
            "1e-3",
            ".5",
            "1_000",
            "12:30",
            "true",
            "False",
            "null",
            "~",
            "",
            "yes",
            "No",
            "y",
        ),
        *(
            "2024-01-01",
            ".inf",
            "-.nan",
            "-",
            "--- a",
            "?",
            ": a",
            "a: b",
            "a:",
            "a #b",
            "#",
            "&a",
            "*a",
            "!x",
        ),
        *(
            "[a]",
            "{a}",
            "a,b",
            "%a",
            "@a",
            "`a",
            "'",
            '"',
            "\\",
            "|",
            ">",
            " a",
            "a ",
            "a  b",
            "a\tb",
            "a\nb\n",
        ),
        *("\r", "\x85", "\u2028", "\ufeff", "\0", "\x7f", "🙂", "é", "a: ", "<<", "=", "...", "- a", "a - b"),
        *("/data/x.safetensors", "timm:vit", "random:4", "a/b@main", "ViT-B-32", "two words"),
    ],
)
def test_text_stays_text_as_key_value_and_item(text):
    data = {text: text, "list": [text, [text], {text: text}]}
    assert same(read(as_yaml(data)), data)


def test_what_is_written_is_for_people():
    data = {
        "name": "dtd",
        "class": "no",
        "schedule": {"lr": 1e-05, "steps": (1, 2), "none": {}},
        "tasks": [{"name": "a b", "count": None}, ["x", []], "2024-01-01", True],
    }
    assert (
        as_yaml(data)
        == """\
name: dtd
class: "no"
schedule:
  lr: 1e-05
  steps:
    - 1
    - 2
  none: {}
tasks:
  - name: a b
    count: null
  - - x
    - []
  - "2024-01-01"
  - true
"""
    )
    assert as_yaml({}) == "{}\n"


def deep(levels):
    out = 1
    for i in range(levels):
        out = [out] if i % 2 else {"a": out}
    return {"a": out}


def test_the_deepest_that_is_written_is_read():
    assert read(as_yaml(deep(31))) == deep(31)


@pytest.mark.parametrize(
    "value",
    [
        *(math.nan, math.inf, 10**99, {1: 2}, {None: 1}, {"x" * 1001: 1}, "\ud800", {"\ud800": 1}),
        *(Path(), b"x", {1}, deep(32), "x" * (1 << 20), "é" * (1 << 19)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_not_be_read_back_is_not_written(value, refused):
    with refused("SPEC", 2, "cannot be written"):
        as_yaml({"a": value})


# setting


def test_values_are_set_and_the_rest_keeps_its_lines():
    before = parse_yaml(TEXT, "x")
    after = with_values(
        before, ["schedule.lr=1e-2", "tasks.1.name=no", "new.one=[a, 1]", "last=", "seed = 2"]
    )
    assert after.data == {
        "seed": 2,
        "schedule": {"lr": 0.01, "steps": [1, 2]},
        "tasks": [{"name": "dtd"}, {"name": "no", "note": "two\nlines\n"}],
        "last": None,
        "new": {"one": ["a", 1]},
    }
    gone = {("seed",), ("schedule", "lr"), ("tasks", 1, "name"), *[k for k in before.lines if k[0] == "last"]}
    assert after.lines == {keys: line for keys, line in before.lines.items() if keys not in gone}
    assert after.label == "x"
    assert before == parse_yaml(TEXT, "x")


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("a=0.01", 0.01),
        ("a=010", 10),
        ("a='1'", "1"),
        ("a=x=y", "x=y"),
        ("a=[no,off]", ["no", "off"]),
        ("a={b: 1}", {"b": 1}),
        ("a=2024-01-01", "2024-01-01"),
        ("a=", None),
        ("a.0=1", {"0": 1}),
    ],
)
def test_a_value_is_read_as_in_the_file(assignment, value):
    assert with_values(Document("x", {}, {}), [assignment]).data == {"a": value}


def test_the_last_setting_holds():
    assert with_values(Document("x", {}, {}), ["a.b=1", "a.b=2", "a.c=3"]).data == {"a": {"b": 2, "c": 3}}


@pytest.mark.parametrize(
    ("assignment", "mention"),
    [
        ("seed", "key=value"),
        ("=1", "key=value"),
        ("a..b=1", "key=value"),
        (".a=1", "key=value"),
        ("\udc80=1", "key=value"),
        ("seed.x=1", "'seed' has no keys"),
        ("schedule.lr.x=1", "'schedule.lr' has no keys"),
        ("tasks.2=x", "from 0 to 1"),
        ("tasks.-1=x", "has no item '-1'"),
        ("tasks.name=x", "has no item 'name'"),
        ("tasks.0.name.x=1", "'tasks.0.name' has no keys"),
        ("seed=[1", "not valid YAML"),
        ("seed=.nan", "finite"),
        ("seed=&a 1", "anchors are not supported"),
        ("seed=!!python/name:os.system", "tags are not supported"),
        ("seed=#1", "comment"),
        ("seed={a: 1, a: 2}", "duplicate key"),
        (".".join("a" * 33) + "=1", "key=value"),
        (".".join("a" * 32) + "=[]", "nested too deeply"),
    ],
)
def test_what_cannot_be_set_is_refused(assignment, mention, refused):
    with refused("SPEC", 2, "--set", mention):
        with_values(parse_yaml(TEXT, "x"), [assignment])


# validating


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Sgd(Strict):
    kind: Literal["sgd"]
    lr: float


class Adam(Strict):
    kind: Literal["adam"]
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)


class Carve(Strict):
    share: float | None = None
    per_class: int | None = None

    @model_validator(mode="after")
    def _says_how_much(self):
        if self.share is None and self.per_class is None:
            raise ValueError("say share or per_class")
        return self


class Task(Strict):
    name: str
    val: str | Carve | None = None
    classes: dict[str, str] = {}


class Lax(BaseModel):
    model_config = ConfigDict(extra="forbid")
    count: int = 0


class Spec(Strict):
    seed: int = 0
    optimiser: Annotated[Sgd | Adam, Field(discriminator="kind")] | None = None
    either: list[Sgd | Adam] = []
    tasks: tuple[Task, ...] = ()
    by_name: dict[str, Task] = {}
    steps: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    storage: Literal["fp32", "int4"] = "fp32"
    folder: Path = Path()
    bank_path: str = Field("", alias="bank")
    pair: tuple[Sgd, Carve] | None = None
    lax: Lax = Lax()
    flag: bool = False


def spec(text, *assignments):
    return validated(Spec, with_values(parse_yaml(text, "x.yaml"), assignments))


def test_a_good_document_becomes_the_model():
    made = spec(
        "seed: 3\noptimiser: {kind: adam, lr: 1, betas: [0.5, 1e-1]}\nfolder: a/b\nbank: b\nsteps: 4\n"
        "tasks:\n- name: no\n  val: {share: .5}\n  classes: {on: off}\n"
    )
    assert made.optimiser == Adam(kind="adam", lr=1.0, betas=(0.5, 0.1))
    assert made.tasks == (Task(name="no", val=Carve(share=0.5), classes={"on": "off"}),)
    assert (made.seed, made.folder, made.bank_path, made.steps) == (3, Path("a/b"), "b", 4)


class Number(Strict):
    x: float


@QUICK
@given(NUMBERS.filter(lambda x: abs(x) < 1e300))
def test_numbers_reach_the_model_bit_for_bit(x):
    assert validated(Number, parse_yaml(as_yaml({"x": x}), "x")).x.hex() == float(x).hex()


@pytest.mark.parametrize(
    ("text", "mentions"),
    [
        ("seed: '1'\n", ["line 1", "'seed'", "the text '1'", "a whole number"]),
        ("\nseed: 1.0\n", ["line 2", "found     1.0", "a whole number"]),
        ("seed: true\n", ["found     true"]),
        ("seed:\n", ["found     null"]),
        ("flag: yes\n", ["the text 'yes'", "true or false"]),
        ("lax:\n  count: '1'\n", ["line 2", "lax.count", "a whole number"]),
        ("tasks:\n- name: 5\n", ["line 2", "tasks.0.name", "expected  text", "in quotes"]),
        ("tasks: 5\n", ["tasks", "expected  a list"]),
        ("tasks: [a]\n", ["tasks.0", "expected  a mapping"]),
        ("tasks:\n- val: a\n", ["line 2", "'tasks.0.name' is missing", "add 'name: ...'"]),
        ("optimiser: {lr: 1}\n", ["line 1", "'optimiser.kind' is missing"]),
        ("optimiser:\n  kind: sdg\n", ["line 2", "optimiser.kind", "'sgd', 'adam'", "did you mean 'sgd'?"]),
        ("optimiser: 1\n", ["'optimiser'", "a mapping"]),
        ("optimiser:\n  kind: sgd\n", ["line 1", "'optimiser.lr' is missing"]),
        ("optimiser:\n  kind: sgd\n  lr: a\n", ["line 3", "optimiser.lr", "a number"]),
        ("storage: int5\n", ["'fp32' or 'int4'", "did you mean 'int4'?"]),
        ("steps: -3\n", ["'steps'", "found     -3", "greater than 0 or 'auto'"]),
        ("steps: aut\n", ["a whole number or 'auto'", "did you mean 'auto'?"]),
        ("tasks:\n- name: a\n  val: 3\n", ["line 3", "tasks.0.val", "text or a mapping"]),
        ("tasks:\n- name: a\n  val: {}\n", ["line 3", "'tasks.0.val': say share or per_class"]),
        ("pair: [{kind: sgd, lr: 1}]\n", ["pair.1"]),
    ],
)
def test_what_does_not_fit_is_named(text, mentions, refused):
    with refused("SPEC", 2, "'x.yaml'", *mentions) as out:
        spec(text)
    assert "more" not in out.error.facts


@pytest.mark.parametrize(
    ("text", "line", "key", "meant"),
    [
        ("sed: 1\n", 1, "sed", "seed"),
        ("Seed: 1\n", 1, "Seed", "seed"),
        ("by-name: {}\n", 1, "by-name", "by_name"),
        ("bnk: x\n", 1, "bnk", "bank"),
        ("optimiser:\n  kind: adam\n  lr: 1\n  beta: 1\n", 4, "optimiser.beta", "betas"),
        ("tasks:\n- name: a\n- name: b\n  clases: {}\n", 4, "tasks.1.clases", "classes"),
        ("by_name:\n  x:\n    name: a\n    vall: b\n", 4, "by_name.x.vall", "val"),
        ("tasks:\n- name: a\n  val:\n    shar: 1\n", 4, "tasks.0.val.shar", "share"),
        ("either:\n- kind: adam\n  lr: 1\n  bettas: 1\n", 4, "either.0.bettas", "betas"),
        ("pair:\n- kind: sgd\n  lr: 1\n- per_clas: 1\n", 4, "pair.1.per_clas", "per_class"),
        ("lax:\n  cont: 1\n", 2, "lax.cont", "count"),
    ],
)
def test_a_typing_mistake_is_found_at_any_depth(text, line, key, meant, refused):
    with refused("SPEC", 2, f"'x.yaml', line {line}: unknown key '{key}'", f"did you mean '{meant}'?") as out:
        spec(text)
    assert out.error.facts["key"] == key
    assert meant in out.error.facts["expected"]


def test_an_unknown_key_like_no_other_gets_no_guess(refused):
    with refused("SPEC", 2, "unknown key 'zzz'", "seed, optimiser, either") as out:
        spec("zzz: 1\n")
    assert out.error.likely == ""


def test_a_key_named_like_a_type_is_still_a_key(refused):
    with refused("SPEC", 2, "line 3: unknown key 'optimiser.sgd'"):
        spec("optimiser:\n  kind: sgd\n  sgd: 1\n  lr: 1\n")
    with refused("SPEC", 2, "line 4: unknown key 'tasks.0.val.str'"):
        spec("tasks:\n- name: a\n  val:\n    str: 1\n")


def test_the_first_of_several_problems_is_shown_and_the_others_are_counted(refused):
    with refused("SPEC", 2, "line 2: 'tasks'", "2 other problems"):
        spec("\ntasks: 1\nflag: 1\nseed: a\n")
    with refused("SPEC", 2, "line 3: unknown key 'optimiser.l'", "1 other problem"):
        spec("optimiser:\n  kind: sgd\n  l: 1\n")


def test_what_was_set_on_the_command_line_is_called_so(refused):
    for assignment in ("optimiser.lrr=1", "optimiser={kind: sgd, lr: 1, lrr: 1}"):
        with refused("SPEC", 2, "'optimiser.lrr', as set on the command line", "did you mean 'lr'?") as out:
            spec("optimiser:\n  kind: sgd\n  lr: 1\n", assignment)
        assert not re.search(r"line \d", str(out.error))
    with refused("SPEC", 2, "line 3: 'optimiser.lr'"):
        spec("optimiser:\n  kind: sgd\n  lr: x\n", "seed=1")


@QUICK
@given(st.dictionaries(st.sampled_from(sorted({f.alias or n for n, f in Spec.model_fields.items()})), VALUES))
def test_any_data_fit_or_are_refused(data):
    try:
        assert isinstance(validated(Spec, parse_yaml(as_yaml(data), "x")), Spec)
    except UsageError as e:
        assert e.code == "SPEC"
        assert e.facts["key"]
