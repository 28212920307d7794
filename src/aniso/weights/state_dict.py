"""Finding the model's weights in what a checkpoint holds.

The rules, in order; each one that is used is reported:

1. ``FILE::a.b`` takes the entry ``a``, then ``b``.
2. A module (an object with parameters, buffers and submodules) becomes its state dict.
3. A mapping of names to tensors is a state dict.
4. Otherwise the entries that hold tensors are candidates, but for those called like the state of an
   optimiser or a scheduler. A single candidate is taken; several are an error that lists them.
5. A prefix ``module.`` (DataParallel) or ``_orig_mod.`` (torch.compile) shared by all names is removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aniso.errors import InputError, UnsafeError, printable
from aniso.weights.pickle_values import Inert, OddTensor, TensorView

_NOT_WEIGHTS = ("optim", "sched", "scaler", "ema_optim", "grad")
_PREFIXES = ("module.", "_orig_mod.")
_MAX_DEPTH = 64
_MAX_NODES = 500_000


@dataclass(frozen=True)
class Found:
    """A state dict, what else was in the checkpoint, and the rules that led there."""

    tensors: dict[str, TensorView]
    notes: tuple[str, ...]


def find_state_dict(root: object, entry: str, label: str) -> Found:
    """The state dict in ``root`` by the rules above."""
    notes: list[str] = []
    node = root
    for part in filter(None, entry.split(".")):
        node = _entries(node).get(part)
        if node is None:
            raise InputError(
                "CKPT-NONE",
                f"'{label}' has no entry '{printable(entry)}'",
                found=_names(root),
                fix=f"aniso inspect '{label}'",
            )
    for _ in range(_MAX_DEPTH):
        if _is_weights(node):
            break
        name, ignored = _only_candidate(node, label)
        notes.append(f"weights taken from entry '{printable(name)}'")
        if ignored:
            notes.append(f"entries left out: {printable(', '.join(ignored))}")
        node = _entries(node)[name]
    else:
        raise UnsafeError(
            "PICKLE-LIMIT",
            f"'{label}' nests its entries more than {_MAX_DEPTH} deep",
            fix="ask its author for a safetensors file",
        )
    tensors, left_out = _flatten(node, label)
    if left_out:
        notes.append(f"entries that are not tensors, left out: {printable(', '.join(left_out))}")
    return _without_prefix(tensors, notes)


def _without_prefix(tensors: dict[str, TensorView], notes: list[str]) -> Found:
    while prefix := next((p for p in _PREFIXES if tensors and all(n.startswith(p) for n in tensors)), ""):
        notes.append(f"prefix '{prefix}' removed from all names")
        tensors = {name.removeprefix(prefix): view for name, view in tensors.items()}
    return Found(tensors, tuple(notes))


def _entries(node: object) -> dict[str, Any]:
    """The named parts of a value: of a mapping, or the attributes of an object."""
    if isinstance(node, Inert):
        attributes = node.state if isinstance(node.state, dict) else {}
        node = {**node.mapping, **attributes}
    return {k: v for k, v in node.items() if isinstance(k, str)} if isinstance(node, dict) else {}


def _names(node: object) -> str:
    return printable(", ".join(_entries(node)) or type(node).__name__)


def _is_module(node: object) -> bool:
    entries = _entries(node) if isinstance(node, Inert) else {}
    return isinstance(entries.get("_modules"), dict) and isinstance(entries.get("_parameters"), dict)


def _is_weights(node: object) -> bool:
    if _is_module(node):
        return _holds_tensors(node)
    return any(_is_tensor(v) for v in _entries(node).values())


def _is_tensor(node: object) -> bool:
    """Whether this is a tensor, or one in a form that cannot be read."""
    return isinstance(node, TensorView | OddTensor)


def _only_candidate(node: object, label: str) -> tuple[str, list[str]]:
    entries = _entries(node)
    candidates = [
        name
        for name, value in entries.items()
        if not name.lower().startswith(_NOT_WEIGHTS) and _holds_tensors(value)
    ]
    if not candidates:
        raise InputError(
            "CKPT-NONE",
            f"'{label}' holds no model weights",
            found=_names(node),
            fix=f"aniso inspect '{label}'",
        )
    if len(candidates) > 1:
        raise InputError(
            "CKPT-AMBIGUOUS",
            f"'{label}' holds more than one set of weights",
            found=printable(", ".join(candidates)),
            fix=f"name one: '{label}::{printable(candidates[0], 40)}'",
        )
    return candidates[0], [name for name in entries if name != candidates[0]]


def _holds_tensors(value: object) -> bool:
    level, seen = {id(value): value}, set[int]()
    while level:  # each value is looked at once, however many paths lead there
        children = [child for node in level.values() for child in _entries(node).values()]
        if any(_is_tensor(child) for child in children):
            return True
        seen.update(level)
        level = {id(child): child for child in children if id(child) not in seen}
    return False


def _flatten(node: object, label: str) -> tuple[dict[str, TensorView], list[str]]:
    tensors: dict[str, TensorView] = {}
    left_out: list[str] = []
    walk = _ModuleWalk().tensors(node) if _is_module(node) else _entries(node).items()
    if isinstance(node, dict):
        left_out += [str(k) for k, v in node.items() if not isinstance(k, str) and _is_tensor(v)]
    for count, (name, value) in enumerate(walk):
        if count > _MAX_NODES:
            raise UnsafeError(
                "PICKLE-LIMIT",
                f"'{label}' lists more than {_MAX_NODES} tensors",
                fix="ask its author for a safetensors file",
            )
        if isinstance(value, TensorView) and name in tensors:
            raise InputError(
                "CKPT-AMBIGUOUS",
                f"'{label}' has two tensors of one name",
                key=name,
                fix="save the model's state_dict with safetensors",
            )
        if isinstance(value, TensorView):
            tensors[name] = value
        elif isinstance(value, OddTensor):
            raise InputError(
                "PICKLE-UNSUPPORTED",
                f"'{label}' has a tensor that is not a plain array",
                key=name,
                found=value.what,
                fix="save the model's state_dict with safetensors",
            )
        elif _holds_tensors(value):
            raise InputError(
                "CKPT-AMBIGUOUS",
                f"'{label}' mixes tensors with further sets of tensors",
                found=printable(name),
                fix=f"name one: '{label}::{printable(name, 40)}'",
            )
        else:
            left_out.append(name)
    return tensors, left_out


class _ModuleWalk:
    """A module's tensors under the names ``state_dict()`` gives: parameters, buffers, then submodules.

    Few bytes can describe a module that is reached on very many paths, so the walk has a budget.
    """

    def __init__(self) -> None:
        self._budget = 64 * _MAX_NODES

    def tensors(self, module: object, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
        self._spend(64 + len(prefix), depth)
        entries = _entries(module)
        transient = entries.get("_non_persistent_buffers_set")
        skipped = _texts(transient.items) | _texts(transient.args) if isinstance(transient, Inert) else set()
        for kind in ("_parameters", "_buffers"):
            for name, value in _entries(entries.get(kind)).items():
                if value is not None and not (kind == "_buffers" and name in skipped):
                    self._spend(len(prefix), depth)
                    yield prefix + name, value
        for name, child in _entries(entries["_modules"]).items():
            if _is_module(child):
                yield from self.tensors(child, f"{prefix}{name}.", depth + 1)
            elif child is not None:
                yield prefix + name, child

    def _spend(self, cost: int, depth: int) -> None:
        self._budget -= cost
        if depth > _MAX_DEPTH or self._budget < 0:
            raise UnsafeError(
                "PICKLE-LIMIT",
                "modules are nested deeper, are more, or have longer names than any model's",
                fix="ask its author for a safetensors file",
            )


def _texts(values: object) -> set[str]:
    """The strings in a (possibly nested once) list of values."""
    flat: list[object] = []
    for value in values if isinstance(values, list | tuple) else []:
        flat += value if isinstance(value, list | tuple) else [value]
    return {value for value in flat if isinstance(value, str)}
