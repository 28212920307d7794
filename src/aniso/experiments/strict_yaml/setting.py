"""Single values replaced, as from a command line."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

from aniso.errors import printable
from aniso.experiments.strict_yaml.document import DEEPEST, Document, Keys, dotted, encodes, kind_of, refusal
from aniso.experiments.strict_yaml.reading import Reader


def with_values(document: Document, assignments: Sequence[str]) -> Document:
    """The document with some values replaced or added, as by ``schedule.lr=0.01`` or ``tasks.0=dtd``.

    Dots divide the path, whole numbers count the items of a list from 0, the value is read as YAML 1.2.
    What was set has no line; of two settings of the same key the later one holds.
    """
    data, lines = copy.deepcopy(document.data), dict(document.lines)
    for assignment in assignments:
        label = f"--set {printable(assignment)}"
        path = _assign(data, assignment, label)
        lines = {keys: line for keys, line in lines.items() if keys[: len(path)] != path}
    return Document(document.label, data, lines)


def _assign(data: dict[str, Any], assignment: str, label: str) -> Keys:
    """Changes one value in place and says which."""
    name, sign, text = assignment.partition("=")
    parts = name.strip().split(".")
    if not sign or not all(parts) or not encodes(name) or len(parts) > DEEPEST:
        raise refusal(label, None, "not of the form key=value", fix="write it like --set schedule.lr=0.01")
    node: Any = data
    path: Keys = ()
    for i, part in enumerate(parts):
        key = _slot(node, part, path, label)
        path = (*path, key)
        if i < len(parts) - 1:
            node = node.setdefault(key, {}) if isinstance(node, dict) else node[key]
    value = Reader(text, label).document(path)
    if text.lstrip().startswith("#"):
        raise refusal(label, None, "the value is only a comment", found=text, fix="put it in quotes")
    node[path[-1]] = value
    return path


def _slot(node: Any, part: str, path: Keys, label: str) -> str | int:
    """The key or index that a part of a path means in a mapping or a list."""
    if isinstance(node, dict):
        return part
    if not isinstance(node, list):
        fix = f"set '{dotted(path)}' as a whole"
        raise refusal(
            label, None, f"'{dotted(path)}' has no keys", found=kind_of(node), expected="a mapping", fix=fix
        )
    if not re.fullmatch("[0-9]{1,9}", part) or int(part) >= len(node):
        expected = f"an index from 0 to {len(node) - 1}" if node else "nothing: the list is empty"
        fix = f"set the whole list, like --set {dotted(path)}=[a,b]"
        raise refusal(label, None, f"'{dotted(path)}' has no item '{part}'", expected=expected, fix=fix)
    return int(part)
