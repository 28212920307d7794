"""What every registered setting and method keeps to."""

from __future__ import annotations

import pickle

import pytest

import aniso
from aniso.cli import main
from aniso.cli.setting_options import generated_options
from aniso.errors import UsageError
from aniso.experiments import run_files
from aniso.experiments.methods import Method, TrainingMethod
from aniso.experiments.options import GROUPS, options_of
from aniso.experiments.settings import Setting
from aniso.experiments.strict_yaml import as_yaml, parse_yaml
from aniso.registry import METHODS, SETTINGS

NEEDED = {
    "addition": {"tasks": ["t"]},
    "negation": {"target": "t", "control": "c"},
    "lm": {"train": "t.jsonl"},
}
FILES = {value for name, value in vars(run_files).items() if name.isupper()}


def example(setting: str, method: str) -> Setting:
    needed = NEEDED.get(setting, {"task": "t"})
    return aniso.recipes.setting(setting, model="m", bank="b", method=method, **needed)


PAIRS = [(setting, method) for setting in SETTINGS.names for method in SETTINGS.get(setting).methods()]


@pytest.mark.parametrize(("setting", "method"), PAIRS)
def test_a_spec_says_everything_and_reads_back_as_the_same_run(setting, method):
    made = example(setting, method)
    spec = parse_yaml(as_yaml(made.spec()), "spec").data
    again = aniso.recipes.setting(spec.pop("setting"), **spec)
    assert again.id == made.id and again.spec() == made.spec()
    assert ("schedule" in made.spec()) == isinstance(made.method, TrainingMethod)


@pytest.mark.parametrize(("setting", "method"), PAIRS)
def test_a_setting_is_frozen_and_crosses_processes(setting, method):
    made = example(setting, method)
    assert pickle.loads(pickle.dumps(made)).id == made.id
    with pytest.raises(ValueError, match="frozen"):
        made.seed = 3


@pytest.mark.parametrize("name", SETTINGS.names)
def test_every_option_has_a_group_a_help_text_and_one_flag(name):
    options = generated_options(name)
    flags = [flag for info in options.values() for flag in info.flags[-1].split("/")]
    assert len(flags) == len(set(flags))
    for info in options.values():
        assert info.group in GROUPS and info.help.rstrip(".") and info.help.endswith("."), info.name


@pytest.mark.parametrize("name", SETTINGS.names)
def test_the_help_of_a_setting_is_grouped_and_shows_defaults(name, capsys):
    words = [name] if name == "finetune" else ["fit", name]
    assert main([*words, "--help"]) == 0
    text = capsys.readouterr().out
    assert SETTINGS.summary(name).split(".")[0][:40] in " ".join(text.split())
    groups = [line.rstrip(":") for line in text.splitlines() if line.rstrip(":") in GROUPS]
    assert groups == [group for group in GROUPS if group in groups] and "Task" in groups
    assert "[default: " in text and "[required]" in text


@pytest.mark.parametrize("name", METHODS.names)
def test_a_method_has_a_column_known_outputs_and_plain_options(name):
    cls: type[Method] = METHODS.get(name)
    made = cls()
    assert made.name == name and cls.column and METHODS.summary(name).endswith(".")
    assert {*made.outputs()} <= FILES
    assert {*options_of(cls)} == {*cls.model_fields} - {"schedule"}


@pytest.mark.parametrize("name", SETTINGS.names)
def test_methods_that_do_not_fit_are_refused_with_a_reason(name):
    for method in METHODS.names:
        if method not in SETTINGS.get(name).methods():
            with pytest.raises(UsageError, match=method):
                example(name, method)


@pytest.mark.parametrize("name", SETTINGS.names)
def test_the_schedule_in_python_is_that_of_the_command_line(name):
    spec = example(name, SETTINGS.get(name).methods()[0] if name == "finetune" else "coefficients").spec()
    found = aniso.recipes.schedule(name, **({} if name == "finetune" else {"method": "coefficients"}))
    assert vars(found) == spec["schedule"]
