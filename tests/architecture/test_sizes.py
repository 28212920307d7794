"""Files and functions stay small, and values between rooms have types."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import aniso

ROOT = Path(aniso.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
LONGEST_FILE = 400  # lines
MOST_PARAMETERS = 8
MOST_UNTYPED = 30
FOREIGN = {"self_attention", "forward", "stack_kernel"}
"""Functions with the parameters of the torch functions whose place they take; a Triton kernel, whose tensors
and sizes are given one by one."""
PUBLIC_TRAINING = {"fit", "evolve", "finetune", "features"}
"""Functions that users call with keyword options, each with a default."""


def functions(path: Path) -> list[ast.FunctionDef]:
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def test_no_file_has_more_than_400_lines():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}


def test_no_function_has_more_than_8_parameters():
    """Commands, whose parameters are options, and keyword options of public functions do not count."""
    long = {}
    for path in FILES:
        if path.parent.name == "cli":
            continue
        for node in functions(path):
            if node.name in FOREIGN:
                continue
            arguments = [a for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("self", "cls")]
            optional = node.args.kwonlyargs if node.name not in PUBLIC_TRAINING else []
            if len(arguments) + len(optional) > MOST_PARAMETERS:
                long[f"{path.relative_to(ROOT)}:{node.name}"] = len(arguments) + len(optional)
    assert long == {}


def test_untyped_dictionaries_are_rare():
    found = {
        str(path.relative_to(ROOT)): len(re.findall(r"dict\[str, Any\]", path.read_text())) for path in FILES
    }
    assert sum(found.values()) <= MOST_UNTYPED, {name: count for name, count in found.items() if count}
