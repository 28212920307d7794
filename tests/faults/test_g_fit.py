"""Table G: options and specs of runs say what they mean, seeds decide, output is fit for pipes."""

from __future__ import annotations

import os
import sys

import pytest
import typer.main

import runs
from aniso.cli.app import app
from aniso.cli.fit_options import HOW, SCHEDULE
from aniso.experiments.settings import SETTINGS
from aniso.experiments.settings.setting import ScheduleSpec
from aniso.experiments.strict_yaml import parse_yaml


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return runs.shelf(tmp_path_factory.mktemp("shelf"))


# G3: every option counts


ROOT = typer.main.get_command(app)


def _commands():
    groups = {name: ROOT.commands[name].commands for name in ("fit", "search")}
    return {(group, name): command for group, found in groups.items() for name, command in found.items()}


COMMANDS = _commands()
KINDS: dict[str, str] = {}
NEEDED = {"model": "m", "task": "t", "tasks": "t", "target": "t", "control": "c"}
OTHER = {
    "model": "other",
    "task": "other",
    "target": "other",
    "control": "other",
    "weights": "openai",
    "bank": "other",
    "method": "none",
    "partition": "random:3@weight",
    "on_bad_image": "7",
    "keep": ("best", "last"),
    "view": ("train", "eval"),
    "leave_out": "cars",
    "shape": "constant",
    "precision": "bf16",
    "tasks": "other",
    "head": "lpp",
    "out_of_domain": "other",
    "objective": "sar",
    "train": "layernorm",
    "optimiser": "sgd",
    "select": "random",
    "targets": "mlp",
}
WITH = {
    "targets": ["--lora=2"],
    "lora": ["--method=weights"],
    "joint": ["--head=tip"],
    "select": ["--budget=2"],
    "budget": ["--select=random"],
}
ALSO = {
    "lora": {
        "schedule.lr",
        "schedule.epochs",
        "schedule.min_steps_per_epoch",
        "schedule.warmup_steps",
        "method",
    },
    "targets": {"lora", "schedule.lr", "schedule.epochs"},
    "select": {"budget"},
    "budget": {"select"},
    "joint": {"head", "schedule.epochs"},
    "objective": {"schedule.optimiser", "schedule.weight_decay"},
    "online": {"schedule.epochs"},
}
ALONE = ("images", "classes", "prompts")  # in the place of a task

NUMBERS = {
    "fraction": "0.5",
    "floor": "0.5",
    "clip": "0.5",
    "lr": "0.25",
    "norm": "0.25",
    "power": "0.25",
    "threshold": "0.25",
    "weight_decay": "0.25",
}


def _named(word):
    return word


def _options(command):
    return {option.name: option for option in command.params if option.name != "help"}


@pytest.fixture
def printed(capfd):
    """What a command prints as its spec, with only what it needs and some options."""

    def run(group, name, *more):
        needed = [f"--{'task' if key == 'tasks' else key}={NEEDED[key]}" for key in NEEDED]
        own = {opt for option in COMMANDS[group, name].params for opt in option.opts}
        bank = ["--bank=b"] if "--bank" in own else []
        texts = ["--train=t.jsonl"] if name == "lm" else []
        given = [word for word in [*needed, *bank, *texts] if word.split("=")[0] in own]
        capfd.readouterr()
        ROOT.main([group, name, *given, *map(str, more), "--print-spec"], standalone_mode=False)
        return parse_yaml(capfd.readouterr().out, "what was printed").data

    return run


def _flat(spec):
    schedule = {f"schedule.{key}": value for key, value in spec["schedule"].items()}
    return {**{key: value for key, value in spec.items() if key != "schedule"}, **schedule}


def _given(option, now):
    """The option on the command line, with another value than it has."""
    if option.is_flag:
        off = option.secondary_opts
        return [off[0]] if off and now else [option.opts[-1]]
    value = OTHER.get(option.name) or NUMBERS.get(option.name) or "37"
    if isinstance(value, tuple):
        value = next(v for v in value if v != now)
    return [option.opts[-1], value]


@pytest.mark.parametrize(("group", "name"), COMMANDS, ids=_named)
def test_G3_every_key_of_the_spec_has_one_option_and_every_option_is_a_key(group, name):
    setting = SETTINGS[KINDS.get(name, name)]
    options = _options(COMMANDS[group, name])
    keys = set(setting.model_fields) - {"setting", "schedule"}
    schedule = set(ScheduleSpec.model_fields)
    assert set(SCHEDULE.values()) == schedule
    said = {SCHEDULE.get(option, option) for option in options} - set(HOW)
    if group == "search":
        assert said <= keys
        assert keys - said <= {"method", "partition", "norm"}
    elif name == "finetune":
        assert said <= keys | schedule
        assert keys - said <= {"method", "partition", "bank", "compare"}
    elif name == "lm":
        assert said | {"linearised"} == keys | schedule
    else:
        assert said == keys | schedule
    spelled = [opt for option in options.values() for opt in (*option.opts, *option.secondary_opts)]
    assert len(spelled) == len(set(spelled))


@pytest.mark.parametrize(("group", "name"), COMMANDS, ids=_named)
def test_G3_every_option_changes_its_key_and_nothing_else(printed, group, name):
    before = _flat(printed(group, name))
    known = {opt for option in COMMANDS[group, name].params for opt in option.opts}
    for key, option in _options(COMMANDS[group, name]).items():
        if key in (*HOW, *ALONE):
            continue
        place = f"schedule.{SCHEDULE[key]}" if key in SCHEDULE else key
        needed = [word for word in WITH.get(key, ()) if word.split("=")[0] in known]
        after = _flat(printed(group, name, *_given(option, before[place]), *needed))
        changed = {k for k in before if before[k] != after[k]}
        assert place in changed and changed <= {place} | ALSO.get(key, set()), key


@pytest.mark.parametrize(("group", "name"), COMMANDS, ids=_named)
def test_G3_how_work_is_carried_out_is_no_part_of_the_spec(printed, group, name, tmp_path):
    how = {"-o": tmp_path / "out", "--data": tmp_path, "--workers": 1, "--memory": "8GiB"}
    more = [word for pair in how.items() for word in pair]
    assert printed(group, name, *more) == printed(group, name)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--lr", "--clip", "--weight-decay"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_G3_a_number_that_is_none_is_a_usage_error(aniso, shelf, option, value):
    ran = aniso(*shelf.few_shot(option, value))
    assert ran.code == 2, ran.err
    assert SCHEDULE[option.strip("-").replace("-", "_")] in ran.err


def test_G3_a_share_that_is_no_number_is_a_usage_error(aniso, shelf):
    ran = aniso("fit", "peft", *shelf.base, "--task", shelf.data / "cars", "--fraction", "nan")
    assert ran.code == 2, ran.err
    assert "fraction" in ran.err


def test_G3_a_vector_to_leave_out_that_is_not_there_is_an_error(aniso, shelf):
    ran = aniso(*shelf.few_shot("--leave-out", "sings"))
    assert ran.code in (2, 3), ran.err
    assert "sings" in ran.err and "signs" in ran.err
    assert aniso(*shelf.few_shot("--leave-out", "signs", "--leave-out", "photos", "--plan")).code == 0


# G4: seeds


def _tasks(shelf, kind):
    cars, dtd = (shelf.data / name for name in ("cars", "dtd"))
    return {
        "few-shot": ("--task", shelf.data / "photos", "--shots", 3),
        "addition": ("--task", cars, "--task", dtd),
        "negation": ("--target", cars, "--control", dtd, "--floor", 0),
        "peft": ("--task", cars, "--partition", "random:4", "--keep", "last"),
    }[kind]


@pytest.mark.parametrize("kind", ["few-shot", "addition", "negation", "peft"])
def test_G4_a_seed_decides_every_byte(aniso, shelf, tmp_path, kind):
    quick = ("--epochs", 1, "--batch", 4, "--lr", 0.1, "--no-compare")

    def learned(name, seed):
        given = (*shelf.base, *_tasks(shelf, kind), *quick, "--seed", seed, "-o", tmp_path / name)
        ran = aniso("fit", kind, *given)
        assert ran.code == 0, ran.err
        state = (tmp_path / name / "metrics.jsonl").read_bytes()
        return state, (tmp_path / name / "coefficients.safetensors").read_bytes()

    first = learned("first", 0)
    assert learned("again", 0) == first
    other = learned("other", 1)
    assert other[0] != first[0]
    if kind in ("few-shot", "peft"):
        assert other[1] != first[1]


# G1: typing mistakes in specs

SPEC = """\
schema: 1
name: mistakes
base:
  setting: few-shot
  model: mini
  bank: mini
  task: ./photos
  schedule:
    epochs: 1
grid:
  seed: [0, 1]
  schedule.lr: [0.1]
variants:
  - label: zero
    base:
      method: none
    grid:
      seed: [0]
  - label: learned
    base:
      schedule: { batch_size: 4 }
"""


@pytest.fixture
def dry(aniso, tmp_path):
    """``dry(right, wrong)`` is what a dry run says to the spec with that mistake in it."""

    def run(right="", wrong="", *more):
        assert right in SPEC
        (tmp_path / "spec.yaml").write_text(SPEC.replace(right, wrong, 1) if right else SPEC)
        return aniso("run", tmp_path / "spec.yaml", "--dry-run", *more)

    return run


def test_G1_the_spec_without_a_mistake_is_read(dry):
    ran = dry()
    assert ran.code == 0, ran.err
    assert "3 cells, 0 recorded" in ran.out


@pytest.mark.parametrize(
    ("right", "wrong", "line"),
    [
        ("name:", "nmae:", 2),
        ("  bank:", "  bnak:", 6),
        ("    epochs:", "    epoch:", 9),
        ("  seed: [0, 1]", "  sead: [0, 1]", 11),
        ("  schedule.lr:", "  schedule.lrr:", 12),
        ("label: zero", "lable: zero", 14),
        ("      method:", "      metod:", 16),
        ("      seed:", "      sede:", 18),
        ("batch_size:", "bacth_size:", 21),
    ],
)
def test_G1_a_mistake_is_named_with_its_line_and_what_was_meant(dry, right, wrong, line):
    ran = dry(right, wrong)
    assert ran.code == 2, ran.err
    assert f"line {line}: " in ran.err
    assert f"'{wrong.split(':')[0].strip()}'" in ran.err or wrong.split(":")[0].strip() in ran.err
    assert "did you mean" in ran.err


@pytest.mark.parametrize(
    ("right", "wrong", "line"),
    [
        ("few-shot", "[few-shot]", 4),
        ("few-shot", "few-shots", 4),
        ("epochs: 1", "epochs: one", 9),
        ("method: none", "method: nothing", 16),
        ("seed: [0, 1]", "seed: 0", 11),
        ("seed: [0]", "seed: []", 18),
        ("schema: 1", "schema: 2", 1),
        ("name: mistakes", "name: ../mistakes", 2),
    ],
)
def test_G1_a_value_that_does_not_fit_is_named_with_its_line(dry, right, wrong, line):
    ran = dry(right, wrong)
    assert ran.code == 2, ran.err
    assert "SPEC" in ran.err and ("line      " + str(line) in ran.err or f"line {line}: " in ran.err)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("epochs: 1", "epochs: 0"),
        ("method: none", "partition: rond"),
        ("[0.1]", "[-0.1]"),
        ("[0.1]", "[.nan]"),
    ],
)
def test_G1_a_value_that_makes_no_sense_is_an_error_that_names_the_file(dry, right, wrong):
    ran = dry(right, wrong)
    assert ran.code == 2, ran.err
    assert "spec.yaml" in ran.err


def test_G1_a_mistake_on_the_command_line_is_one_as_well(dry):
    assert dry("", "", "--set", "base.shots=2").code == 0
    ran = dry("", "", "--set", "base.shosts=2")
    assert ran.code == 2
    assert "did you mean 'shots'" in ran.err and "command line" in ran.err
    ran = dry("", "", "--only", "lerned")
    assert ran.code == 2, ran.err
    assert "learned" in ran.err


# G6: pipes


@pytest.mark.parametrize("more", [("--print-spec",), ("--plan",), ("--plan", "--json"), (), ("--json",)])
def test_G6_a_reader_that_has_gone_is_no_error(shelf, tmp_path, more):
    def closed():
        read, write = os.pipe()
        os.close(read)
        os.dup2(write, 1)
        sys.stdout = os.fdopen(1, "w", closefd=False)

    given = shelf.few_shot("-o", tmp_path / "run", *more)
    with runs.child(*given, log=tmp_path / "log", first=closed) as run:
        assert run.wait() == 0, run.said
    assert "Traceback" not in run.said and "Broken" not in run.said
    assert (tmp_path / "run" / "record.json").exists() == (not {"--plan", "--print-spec"} & {*more})


def test_G6_away_from_a_terminal_there_is_no_colour_and_no_progress(shelf, tmp_path):
    plain = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "20"}
    given = shelf.few_shot("-o", tmp_path / "run")
    with runs.child(*given, log=tmp_path / "log", first=lambda: os.environ.update(plain)) as run:
        assert run.wait() == 0, run.said
    assert "\x1b" not in run.said and "\r" not in run.said
    assert len(run.said.splitlines()) < 14
    assert str(tmp_path / "run") in run.said  # whole, however narrow the terminal
