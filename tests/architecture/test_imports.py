"""The house plan: imports point down, siblings do not know each other, nothing read can run."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import aniso

ROOT = Path(aniso.__file__).parent
LEVELS = {
    "json_value": -1,
    "errors": -1,
    "addresses": 0,
    "csv_text": 0,
    "item_files": 0,
    "prediction_files": 1,
    "registry": 1,
    "assignment_text": 1,
    "classes": 1,
    "coefficient_matrix": 1,
    "records": 2,
    "record_files": 3,
    "published": 1,
    "analysis_records": 1,
    "progress": 0,
    "schedule": 1,
    "sizes": 1,
    "start_text": 2,
    "weights": 1,
    "vectors": 2,
    "models": 3,
    "data": 3,
    "compose": 4,
    "merge": 4,
    "learn": 5,
    "experiments": 6,
    "report": 6,
    "demo": 7,
    "explore": 7,
    "cli": 8,
}


def _name(path: Path) -> str:
    parts = ["aniso", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_name(path): path for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(), str(path)) for name, path in MODULES.items()}


def _absolute(module: str, node: ast.ImportFrom) -> str:
    """The package that ``from ... import`` names, with leading dots resolved."""
    if not node.level:
        return node.module or ""
    is_package = MODULES[module].name == "__init__.py"
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _for_types(tree: ast.AST) -> set[ast.AST]:
    """What stands below ``if TYPE_CHECKING``: it is never run."""
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    return {node for block in blocks for child in block.body for node in ast.walk(child)}


def imports(module: str, *, types: bool = True) -> Iterator[tuple[str, int]]:
    """Every name of our own that a module imports, wherever in the file, and the line."""
    left_out = set() if types else _for_types(TREES[module])
    for node in ast.walk(TREES[module]):
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = _absolute(module, node)
            names = [f"{package}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name == "aniso" or name.startswith("aniso."):
                yield name, node.lineno


def room(name: str) -> str:
    """The room a module or an imported name lies in; the package itself for what lies in none."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LEVELS else "aniso"


def module_of(name: str) -> str:
    """The module an imported name is or comes from."""
    while name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def test_every_room_has_a_level():
    rooms = {name.split(".")[1] for name in MODULES if name != "aniso"}
    assert rooms - LEVELS.keys() <= {"__main__"}
    assert {"errors", "weights", "cli"} <= rooms


@pytest.mark.parametrize("module", [name for name in MODULES if room(name) != "aniso"])
def test_imports_point_down(module):
    here = room(module)
    wrong = [
        f"{MODULES[module].relative_to(ROOT)}:{line} imports {name}"
        for name, line in imports(module)
        if room(name) not in ("aniso", here) and LEVELS[room(name)] >= LEVELS[here]
    ]
    assert wrong == []


@pytest.mark.parametrize("module", [name for name in MODULES if room(name) != "aniso"])
def test_rooms_take_nothing_but_the_version_from_the_package_itself(module):
    wrong = [name for name, _ in imports(module) if room(name) == "aniso" and name != "aniso.__version__"]
    assert wrong == []


def reaches_into(module: str, name: str) -> str | None:
    """The private module of another package that an import names: one with an underscore, or below one."""
    parts = module_of(name).split(".")
    for i, part in enumerate(parts):
        home = ".".join(parts[:i])
        if part.startswith("_") and not part.startswith("__") and not f"{module}.".startswith(f"{home}."):
            return ".".join(parts)
    return None


@pytest.mark.parametrize("module", MODULES)
def test_private_modules_are_imported_by_their_own_package_only(module):
    wrong = [
        f"{MODULES[module].relative_to(ROOT)}:{line} imports {name}"
        for name, line in imports(module)
        if reaches_into(module, name)
    ]
    assert wrong == []


def test_private_modules_are_recognised():
    inside = "aniso.compose._engine.installer"
    assert reaches_into("aniso.learn.fit", f"{inside}.WeightInstaller") == inside
    assert reaches_into("aniso.learn.fit", "aniso.compose._engine") == "aniso.compose._engine"
    assert reaches_into("aniso", inside) == inside
    assert reaches_into("aniso.composed", inside) == inside
    for module in ("aniso.compose", "aniso.compose.plan", "aniso.compose._layers.cached_linear"):
        assert reaches_into(module, inside) is None
    assert reaches_into("aniso.learn.fit", "aniso.compose.Composition") is None
    assert reaches_into("aniso.cli.app", "aniso.__version__") is None


def test_only_the_entry_point_imports_the_command_line():
    outside = [name for name in MODULES if room(name) != "cli" and name != "aniso.__main__"]
    assert [name for name in outside if any(room(n) == "cli" for n, _ in imports(name))] == []
    assert any(room(name) == "cli" for name, _ in imports("aniso.__main__"))


@pytest.mark.parametrize("here", LEVELS)
def test_the_modules_of_a_room_do_not_import_each_other_in_circles(here):
    graph = {
        module: {module_of(n) for n, _ in imports(module, types=False) if room(n) == here} - {module}
        for module in MODULES
        if room(module) == here
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        pytest.fail(" -> ".join(e.args[1]))


def test_the_checks_see_what_they_must(monkeypatch):
    source = "def f():\n    from ..cli import app\n    from . import open\n    import aniso.cli.show as s\n"
    monkeypatch.setitem(TREES, "aniso.weights.files", ast.parse(source))
    found = {name for name, _ in imports("aniso.weights.files")}
    assert found == {"aniso.cli.app", "aniso.weights.open", "aniso.cli.show"}
    assert {room(name) for name in found} == {"cli", "weights"}
    assert module_of("aniso.weights.open.open_weights") == "aniso.weights.open"


@pytest.mark.parametrize("module", ["aniso", "aniso.cli", "aniso.cli.app", "aniso.errors"])
def test_heavy_packages_are_imported_late(module):
    heavy = ["torch", "torchvision", "transformers", "open_clip", "peft", "matplotlib", "numpy"]
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


def test_reports_never_import_torch():
    for module, tree in TREES.items():
        if room(module) == "report":
            names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
            names |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
            assert not {name for name in names if name.split(".")[0] == "torch"}, module


def test_no_module_is_called_after_nothing():
    vague = {"utils", "util", "helpers", "misc", "common"}
    assert [name for name in MODULES if name.rsplit(".", 1)[-1] in vague] == []


# nothing we read can run


def dangers(tree: ast.AST) -> Iterator[str]:
    """What could run code from a file, or write where an archive says."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            last = name.rsplit(".", 1)[-1]
            if name in FORBIDDEN_CALLS or last in FORBIDDEN_METHODS:
                yield f"{node.lineno}: {name}()"
            for keyword in node.keywords:
                value = keyword.value
                off = isinstance(value, ast.Constant) and value.value is False
                if keyword.arg in FORBIDDEN_OPTIONS and not off:
                    yield f"{node.lineno}: {keyword.arg}={ast.unparse(value)}"
        elif isinstance(node, ast.Import):
            yield from (f"{node.lineno}: {a.name}" for a in node.names if a.name in UNPICKLERS)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module in UNPICKLERS:
            yield f"{node.lineno}: {node.module}"


FORBIDDEN_CALLS = {
    *("eval", "exec", "compile", "__import__", "torch.load", "torch.jit.load", "torch.hub.load"),
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "yaml.load", "os.system", "os.popen"),
}
FORBIDDEN_METHODS = {"extractall", "Unpickler"}
FORBIDDEN_OPTIONS = {"shell", "trust_remote_code", "allow_pickle"}
UNPICKLERS = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


@pytest.mark.parametrize("module", MODULES)
def test_nothing_that_is_read_can_run(module):
    assert list(dangers(TREES[module])) == []


@pytest.mark.parametrize(
    "code",
    [
        "torch.load(path)",
        "import pickle",
        "from pickle import loads",
        "pickle.load(f)",
        "eval(text)",
        "exec(text)",
        "subprocess.run(x, shell=True)",
        "subprocess.run(x, shell=wanted)",
        "archive.extractall(path)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "__import__(name)",
    ],
)
def test_what_could_run_is_recognised(code):
    assert list(dangers(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    ["model.eval()", "re.compile(x)", "run(x, shell=False)", "from aniso.weights.pickle import Machine"],
)
def test_what_cannot_run_is_let_through(code):
    assert not list(dangers(ast.parse(code)))
