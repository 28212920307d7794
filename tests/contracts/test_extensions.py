"""A package with one file each adds a setting, a method, an objective, a head and rules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import runs

FILES = {
    "toy_setting": '''
        """Learning from the validation split."""
        from aniso.experiments.options import option
        from aniso.experiments.settings.adapting import SingleTaskSetting
        from aniso.registry import SETTINGS

        @SETTINGS.register("toy-setting")
        class ToySetting(SingleTaskSetting):
            """Learn a task from its validation split."""

            toy_option: int = option(7, help="An option of the toy setting.", group="Task", ge=1)

            def problem(self, session):
                task = session.task(self.task)
                return self.single_task_problem(task, task.split("train"))
    ''',
    "toy_method": '''
        """Every coefficient is the same number."""
        from aniso.experiments.methods import Method
        from aniso.experiments.options import option
        from aniso.registry import METHODS

        @METHODS.register("toy-method")
        class ToyMethod(Method):
            """Give every vector the same coefficient."""

            coefficient: float = option(0.5, help="The toy method's coefficient.", group="Method")
            column = "toy column"
            needs_bank = True

            def plan(self, session):
                from aniso.compose import Partition
                from aniso.experiments.result import MethodPlan
                return MethodPlan.of_composition(session, session.compose(session.bank, Partition.whole()))

            def run(self, session):
                import torch
                from aniso.compose import Partition
                from aniso.experiments.result import MethodResult
                composition = session.compose(session.bank, Partition.whole())
                with torch.no_grad():
                    composition.values.fill_(self.coefficient)
                return MethodResult(lambda task: composition, coefficients=composition.coefficients)
    ''',
    "toy_objective": '''
        """Confidence."""
        from dataclasses import dataclass
        from aniso.data import Unlabelled
        from aniso.learn.objectives.unlabelled_term import UnlabelledTerm
        from aniso.registry import OBJECTIVES

        @OBJECTIVES.register("toy-objective")
        @dataclass(frozen=True)
        class ToyObjective(UnlabelledTerm):
            """Maximise the confidence of predictions."""

            loss_name = "confidence"
            split: Unlabelled

            def loss(self, inputs):
                return -inputs.logits[0].softmax(-1).max(-1).values.mean()
    ''',
    "toy_head": '''
        """Nearest class mean."""
        import torch
        from torch import nn
        from torch.nn import functional
        from aniso.learn.heads import Head
        from aniso.registry import HEADS

        @HEADS.register("toy-head")
        class ToyHead(Head):
            """Classify by the nearest class mean."""

            steps = 1

            def __init__(self, base):
                super().__init__(base)
                self.means = nn.Parameter(self.base_weight.clone())

            def logits(self, features):
                return functional.normalize(features, dim=-1) @ functional.normalize(self.means, dim=-1).T

            def _descend(self, views, labels):
                with torch.no_grad():
                    for label in range(len(self.names)):
                        self.means[label] = views[:, labels == label].mean((0, 1))
                yield 0.0
    ''',
    "toy_rule": '''
        """The first vectors."""
        from aniso.learn.selection import SelectionRule
        from aniso.registry import SELECTION_RULES
        from aniso.sizes import Budget

        @SELECTION_RULES.register("toy-rule")
        class ToyRule(SelectionRule):
            """Select the first vectors of the bank."""

            whole = True
            needs_objective = False
            progress = None

            def __init__(self, budget):
                self.budget = Budget.of(budget)

            @classmethod
            def from_inputs(cls, inputs):
                return cls(inputs.budget)

            def scores(self, bank):
                return {n: {b.name: 1.0 / (1 + i) for b in bank[n].blocks} for i, n in enumerate(bank)}
    ''',
    "toy_merge": '''
        """The largest elements."""
        from dataclasses import dataclass
        from aniso.merge import ElementwiseRule
        from aniso.registry import MERGE_RULES

        @MERGE_RULES.register("toy-merge")
        @dataclass(frozen=True)
        class ToyMerge(ElementwiseRule):
            """Take the largest of every element."""

            least: float = -1.0

            def elements(self, deltas):
                import torch
                return torch.stack(list(deltas)).amax(0).clamp(min=self.least)
    ''',
}
ENTRY_POINTS = """
[aniso.settings]
toy-setting = toy_setting:ToySetting
[aniso.methods]
toy-method = toy_method:ToyMethod
[aniso.objectives]
toy-objective = toy_objective:ToyObjective
[aniso.heads]
toy-head = toy_head:ToyHead
[aniso.selection]
toy-rule = toy_rule:ToyRule
[aniso.merge]
toy-merge = toy_merge:ToyMerge
"""
SPEC = """
schema: 1
name: toys
base: {{ setting: {setting}, model: {model}, bank: {bank}, task: {task}, compare: false, {base} }}
grid: {{ seed: [0, 1] }}
variants:
{variants}
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an installed package, as pip would leave it."""
    root = tmp_path_factory.mktemp("package")
    for name, text in FILES.items():
        (root / f"{name}.py").write_text(textwrap.dedent(text))
    info = root / "toys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return root


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> runs.Shelf:
    return runs.shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture
def aniso(package: Path):
    """Run a command with the package installed, in a process of its own."""

    def run(*words: object) -> str:
        paths = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
        ran = subprocess.run(
            [sys.executable, "-m", "aniso", *map(str, words)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    return run


def test_ls_lists_what_another_package_adds(aniso):
    rows = {(row["kind"], row["name"]): row["summary"] for row in json.loads(aniso("ls", "--json"))}
    assert rows["settings", "toy-setting"] == "Learn a task from its validation split."
    assert rows["methods", "toy-method"] == "Give every vector the same coefficient."
    assert rows["objectives", "toy-objective"] == "Maximise the confidence of predictions."
    assert rows["heads", "toy-head"] == "Classify by the nearest class mean."
    assert rows["selection-rules", "toy-rule"] == "Select the first vectors of the bank."
    assert rows["merge-rules", "toy-merge"] == "Take the largest of every element."


def test_banks_are_merged_by_a_rule_that_another_package_adds(aniso, shelf, tmp_path):
    out = tmp_path / "merged.safetensors"
    words = ("bank", "merge", "toy-merge", "--bank", shelf.bank, "-o", out)
    made = json.loads(aniso(*words, "--option", "least=0", "--json"))
    assert made["norm"] > 0 and "toy-merge(scale=1.0, least=0.0" in made["origin"]["formula"]
    assert "toy-merge" in aniso("bank", "merge", "--help")


def test_help_lists_what_another_package_adds(aniso):
    assert "toy-setting" in aniso("fit", "--help")
    own = " ".join(aniso("fit", "toy-setting", "--help").split())
    assert "--toy-option" in own and "[default: 7]" in own
    few_shot = " ".join(aniso("fit", "few-shot", "--help").split())
    for name in ("toy-method", "--coefficient", "toy-head", "toy-rule"):
        assert name in few_shot, name
    assert "toy-objective" in aniso("fit", "test-time", "--help")


def test_specs_records_and_reports_have_what_another_package_adds(aniso, shelf, tmp_path):
    places = {"model": shelf.model, "bank": shelf.bank}
    short = "schedule: { epochs: 1, batch_size: 3 }"
    specs = {
        "few-shot": ("few-shot", shelf.data / "photos", f"shots: 3, {short}", [
            "method: toy-method, coefficient: 0.25",
            "method: none, head: toy-head",
            "select: toy-rule, budget: 1",
        ]),
        "toy": ("toy-setting", shelf.data / "cars", f"toy_option: 3, {short}", ["method: coefficients"]),
        "test-time": ("test-time", shelf.data / "cars", short, ["objective: toy-objective"]),
    }  # fmt: skip
    records = []
    for name, (setting, task, base, variants) in specs.items():
        rows = "\n".join(f"  - {{ label: toy {i}, base: {{ {text} }} }}" for i, text in enumerate(variants))
        spec = SPEC.format(setting=setting, task=task, base=base, variants=rows, **places)
        (tmp_path / name).mkdir()
        (tmp_path / name / "spec.yaml").write_text(spec)
        aniso("run", tmp_path / name / "spec.yaml")
        lines = (tmp_path / name / "records" / "records.jsonl").read_text().splitlines()
        records += [json.loads(line) for line in lines]
    found = [record["spec"] for record in records]
    assert {spec.get("coefficient") for spec in found} == {0.25, None}
    assert {spec.get("toy_option") for spec in found} == {3, None}
    assert {"toy-head", None} == {spec.get("head") for spec in found}
    assert "toy-objective" in {spec.get("objective") for spec in found}
    (chosen,) = {json.dumps(r["metrics"]["selection"]["vectors"]) for r in records if r["spec"].get("select")}
    assert len(json.loads(chosen)) == 1
    aniso("report", *(tmp_path / name for name in specs), "-o", tmp_path / "report")
    text = "".join(path.read_text() for path in (tmp_path / "report").rglob("*.md"))
    for label in ("toy 0", "toy 1", "toy 2"):
        assert label in text
    assert "toy-setting" in text
