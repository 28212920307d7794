"""Table G: options and specs of runs say what they mean, seeds decide, output is fit for pipes."""

from __future__ import annotations

import os
import sys

import pytest
import runs

from aniso.cli import main
from aniso.cli.run_options import OutputOptions, RuntimeOptions
from aniso.cli.setting_options import generated_options
from aniso.experiments.schedule_options import ScheduleOptions
from aniso.experiments.strict_yaml import parse_yaml
from aniso.registry import METHODS, SETTINGS


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return runs.shelf(tmp_path_factory.mktemp("shelf"))


# G3: every option counts


SETTINGS_RUN = [name for name in SETTINGS.names if name != "finetune"]
NEEDED = {
    "few-shot": ("--task", "t"),
    "data-fraction": ("--task", "t"),
    "addition": ("--task", "t"),
    "negation": ("--target", "t", "--control", "c"),
    "test-time": ("--task", "t"),
    "lm": ("--train", "t.jsonl"),
    "finetune": ("--task", "t"),
}
OTHER = {
    "on_bad_image": "7",
    "partition": "random:3@weight",
    "objective": "sar",
    "select": "random",
    "budget": "37",
    "head": "lpp",
    "head_options": "momentum=0.5",
    "method": "none",
    "start": "0.3",
    "merge_options": "small=mean",
    "calibrate_options": "ridge=0.1",
}
WITH = {
    "start_scale": ("--start", "tsv"),
    "scale": ("--method", "tsv"),
    "merge_options": ("--start", "tsv"),
    "targets": ("--method", "weights", "--lora", "2"),
    "lora": ("--method", "weights"),
    "decay": ("--method", "weights", "--linearised"),
    "head_options": ("--head", "lpp"),
    "joint": ("--head", "tip"),
    "select": ("--budget", "2"),
    "budget": ("--select", "random"),
    "evaluations": ("--method", "gradient-free"),
    "parallel": ("--method", "gradient-free"),
    "iterations": ("--method", "setfit"),
    "pairs": ("--method", "setfit"),
    "match": ("--objective", "distil"),
    "temperature": ("--objective", "distil"),
    "confidence": ("--objective", "distil"),
    "inputs_from": ("--objective", "distil"),
    "calibrate_items": ("--calibrate", "featcal"),
    "calibrate_options": ("--calibrate", "featcal"),
}
ALSO = {"schedule.lr": {"limit_lr"}, "calibrate": {"calibrate_options"}}
"""Keys that an option changes beside its own: a learning rate that was given is not limited, and a rule of
calibration has options of its own."""
NO_SPEC = {*RuntimeOptions.model_fields, *OutputOptions.model_fields}
ALONE = ("images", "classes", "prompts")  # in the place of a task
FINETUNE = {"targets": ("--lora", "2"), "decay": ("--linearised",)}


def _options(name):
    return {key: info for key, info in generated_options(name).items() if key not in NO_SPEC}


@pytest.fixture
def printed(capfd):
    """What a command prints as its spec, with only what it needs and some options."""

    def run(name, *more):
        capfd.readouterr()
        words = ("finetune",) if name == "finetune" else ("fit", name)
        bank = () if name == "finetune" else ("--bank", "b")
        given = [*words, "--model", "m", *bank, *NEEDED[name], *map(str, more), "--print-spec"]
        code, out = main(given), capfd.readouterr()
        assert code == 0, out.err
        return parse_yaml(out.out, "what was printed").data

    return run


def _flat(spec):
    schedule = {f"schedule.{key}": value for key, value in spec.get("schedule", {}).items()}
    return {**{key: value for key, value in spec.items() if key != "schedule"}, **schedule}


def _given(info, now):
    """The option on the command line, with another value than it has."""
    if info.type is bool:
        on, _, off = info.flags[-1].partition("/")
        return (off,) if off and now else (on,)
    if info.name in OTHER:
        value = OTHER[info.name]
    elif info.choices:
        value = next(choice for choice in info.choices if choice != now)
    else:
        value = {int: "37", float: "0.25"}.get(info.type, "other")
    return info.flags[-1], value


@pytest.mark.parametrize("name", SETTINGS.names)
def test_G3_every_key_of_the_spec_has_one_option_and_every_option_is_a_key(name):
    options = _options(name)
    keys = {*SETTINGS.get(name).model_fields}
    for method in SETTINGS.get(name).methods():
        keys |= {*METHODS.get(method).model_fields}
    keys = keys - {"schedule"} | {*ScheduleOptions.model_fields}
    keys -= set() if "head" in keys else {"joint"}
    keys -= set() if "linearised" in keys else {"decay"}
    assert {*options} == keys - ({"method"} if name == "finetune" else set())
    spelled = [flag for info in options.values() for flag in info.flags[-1].split("/")]
    assert len(spelled) == len(set(spelled))


@pytest.mark.parametrize("name", SETTINGS.names)
def test_G3_every_option_changes_its_key(printed, name):
    for key, info in _options(name).items():
        if key in ALONE:
            continue
        needed = FINETUNE.get(key, ()) if name == "finetune" else WITH.get(key, ())
        before = _flat(printed(name, *(needed if key not in ("joint", "select", "budget") else ())))
        place = f"schedule.{key}" if key in ScheduleOptions.model_fields else key
        after = _flat(printed(name, *needed, *_given(info, before.get(place))))
        assert before.get(place) != after[place], key
        if key not in ("method", "objective", "head", "joint", "lora", "targets", "online", "target", *WITH):
            changed = {k for k in after if before.get(k) != after[k]}
            assert {place} <= changed <= {place} | ALSO.get(place, set()), key


def test_G3_options_of_another_method_are_an_error(aniso, shelf):
    ran = aniso(*shelf.few_shot("--method", "none", "--epochs", 3, "--evaluations", 7))
    assert ran.code == 2
    assert "--evaluations" in ran.err and "--epochs" in ran.err and "--method none" in ran.err


@pytest.mark.parametrize("name", SETTINGS_RUN)
def test_G3_how_a_run_is_executed_is_no_part_of_the_spec(printed, name, tmp_path):
    how = ("-o", tmp_path / "out", "--data", tmp_path, "--workers", 1, "--memory", "8GiB")
    assert printed(name, *how) == printed(name)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--lr", "--max-grad-norm", "--weight-decay"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_G3_a_number_that_is_none_is_a_usage_error(aniso, shelf, option, value):
    ran = aniso(*shelf.few_shot(option, value))
    assert ran.code == 2, ran.err
    assert option in ran.err


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
    quick = ("--epochs", 1, "--batch-size", 4, "--lr", 0.1, "--no-compare")

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
