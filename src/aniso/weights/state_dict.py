"""The rules by which a model's weights are found in a checkpoint.

The rules, in order; each one that is used is reported:

1. ``FILE::a.b`` takes the entry ``a``, then ``b``.
2. A module (an object with parameters, buffers and submodules) becomes its state dict.
3. A mapping of names to tensors is a state dict.
4. Otherwise the entries that hold tensors are candidates, but for those called like the state of an
   optimiser, a scheduler or a training loop. A single candidate is taken; several are an error that lists
   them.
5. A prefix ``module.`` (DataParallel) or ``_orig_mod.`` (torch.compile) shared by all names is removed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aniso.errors import InputError, UnsafeError, printable
from aniso.weights.pickle_values import Inert, OddTensor, TensorView

# prefixes of entries that training stores beside the weights; callbacks and loops are Lightning's
_NOT_WEIGHTS = ("optim", "sched", "scaler", "ema_optim", "grad", "callbacks", "loops")
_PREFIXES = ("module.", "_orig_mod.")
_MAX_PREFIXES = 8  # removing one copies all names
_MAX_WRAPPERS = 8  # entries in entries around the weights; real checkpoints have two or three
_MAX_DEPTH = 64  # modules in modules
_MAX_NODES = 500_000
_MAX_STEPS = 6_000_000  # values visited in search of tensors; about three seconds
_MAX_CANDIDATES = 10


@dataclass(frozen=True)
class Found:
    """A state dict, the other entries of the checkpoint, and the rules that were applied."""

    tensors: dict[str, TensorView]
    notes: tuple[str, ...]


def find_state_dict(root: object, entry: str, label: str) -> Found:
    """Find the state dict in ``root`` by the rules above."""
    notes: list[str] = []
    search = _TensorSearch()
    node = _named_entry(root, entry, label)
    for _ in range(_MAX_WRAPPERS):
        search.charge(sum(map(len, _parts(node))))
        if _is_weights(node, search):
            break
        name, ignored = _only_candidate(node, search, label)
        notes.append(f"weights taken from entry '{printable(name)}'")
        if ignored:
            notes.append(f"entries left out: {printable(', '.join(ignored))}")
        node = _entry(node, name)
    else:
        raise UnsafeError(
            "PICKLE-LIMIT",
            f"'{label}' nests its entries more than {_MAX_WRAPPERS} deep",
            fix="ask its author for a safetensors file",
        )
    tensors, left_out = _flatten(node, search, label)
    if left_out:
        notes.append(f"entries that are not tensors, left out: {printable(', '.join(left_out))}")
    return _without_prefix(tensors, notes)


def _named_entry(root: object, entry: str, label: str) -> object:
    """Return the value that ``FILE::entry`` names."""
    node = root
    for part in filter(None, entry.split(".")):
        node = _entry(node, part)
        if node is None:
            names = [name for name, _ in _entries(root)][:_MAX_CANDIDATES]
            raise InputError(
                "CKPT-NONE",
                f"'{label}' has no entry '{printable(entry)}'",
                found=_names(root),
                fix=f"name an existing one: '{label}::{printable(names[0], 40)}'"
                if names
                else "leave out ::",
            )
    return node


def _without_prefix(tensors: dict[str, TensorView], notes: list[str]) -> Found:
    for _ in range(_MAX_PREFIXES):
        prefix = next((p for p in _PREFIXES if tensors and all(n.startswith(p) for n in tensors)), None)
        if prefix is None:
            break
        notes.append(f"prefix '{prefix}' removed from all names")
        tensors = {name.removeprefix(prefix): view for name, view in tensors.items()}
    return Found(tensors, tuple(notes))


def _parts(node: object) -> list[dict[Any, Any]]:
    """Return the dictionaries of a value's named parts; of two equal names the later one counts."""
    if isinstance(node, Inert):
        return [part for part in (node.mapping, node.state) if isinstance(part, dict)]
    return [node] if isinstance(node, dict) else []


def _entry(node: object, name: str) -> Any:
    """Return a named part of a value: an entry of a mapping, or an attribute of an object; else None."""
    for part in reversed(_parts(node)):
        if name in part:
            return part[name]
    return None


def _entries(node: object) -> Iterator[tuple[str, Any]]:
    """Return names and values of all named parts of a value."""
    first, *later = _parts(node) or [{}]
    for name, value in first.items():
        if isinstance(name, str) and not any(name in part for part in later):
            yield name, value
    for part in later:
        yield from ((name, value) for name, value in part.items() if isinstance(name, str))


def _names(node: object) -> str:
    return printable(", ".join(name for name, _ in _entries(node)) or type(node).__name__)


def _is_module(node: object) -> bool:
    return isinstance(node, Inert) and all(
        isinstance(_entry(node, part), dict) for part in ("_modules", "_parameters")
    )


def _is_weights(node: object, search: _TensorSearch) -> bool:
    if _is_module(node):
        return search.finds(node)
    return any(_is_tensor(value) for _, value in _entries(node))


def _is_tensor(node: object) -> bool:
    """True if this is a tensor, including forms that cannot be read."""
    return isinstance(node, TensorView | OddTensor)


def _only_candidate(node: object, search: _TensorSearch, label: str) -> tuple[str, list[str]]:
    likely = ((n, v) for n, v in _entries(node) if not n.lower().startswith(_NOT_WEIGHTS))
    found = (name for name, value in likely if search.finds(value))
    candidates = list(itertools.islice(found, _MAX_CANDIDATES))
    if not candidates:
        raise InputError(
            "CKPT-NONE",
            f"'{label}' holds no model weights",
            found=_names(node),
            fix="name a file with a state dict; save one with safetensors, or with torch.save",
        )
    if len(candidates) > 1:
        raise InputError(
            "CKPT-AMBIGUOUS",
            f"'{label}' holds more than one set of weights",
            found=printable(", ".join(candidates)),
            fix=f"name one: '{label}::{printable(candidates[0], 40)}'",
        )
    return candidates[0], [name for name, _ in _entries(node) if name != candidates[0]]


class _TensorSearch:
    """Finds the values that hold tensors, directly or nested.

    Few bytes can describe values that are reached on very many paths. Each is visited once per search, those
    without tensors never again, and the number of visits is limited.
    """

    def __init__(self) -> None:
        self._without: set[int] = set()
        self._steps = 0

    def charge(self, steps: int) -> None:
        """Count visited values; raises if there are too many."""
        self._steps += steps
        if self._steps > _MAX_STEPS:
            raise _too_much("the pickle's values refer to each other in more ways than any model's")

    def finds(self, value: object) -> bool:
        level = {id(part): part for part in _parts(value) if id(part) not in self._without}
        seen = set[int]()
        while level:
            inner: dict[int, dict[Any, Any]] = {}
            for entries in level.values():
                self.charge(len(entries) + 1)
                if _values_inside(entries, inner):
                    return True
            seen.update(level)
            level = {at: v for at, v in inner.items() if at not in seen and at not in self._without}
        self._without |= seen
        return False


def _values_inside(entries: dict[Any, Any], inner: dict[int, dict[Any, Any]]) -> bool:
    """True if a tensor is among the named values; dictionaries among them are added to ``inner``."""
    for name, value in entries.items():
        if not isinstance(name, str):
            continue
        if _is_tensor(value):
            return True
        for part in _parts(value):
            inner[id(part)] = part
    return False


def _flatten(node: object, search: _TensorSearch, label: str) -> tuple[dict[str, TensorView], list[str]]:
    tensors: dict[str, TensorView] = {}
    left_out: list[str] = []
    walk = _ModuleWalk().tensors(node) if _is_module(node) else _entries(node)
    if isinstance(node, dict):
        left_out += [str(k) for k, v in node.items() if not isinstance(k, str) and _is_tensor(v)]
    for count, (name, value) in enumerate(walk):
        if count > _MAX_NODES:
            raise _too_much(f"'{label}' lists more than {_MAX_NODES} tensors")
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
        elif search.finds(value):
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
    """A module's tensors under the names of ``state_dict()``: parameters, buffers, then submodules.

    Few bytes can describe a module that is reached on very many paths, so the walk has a budget.
    """

    def __init__(self) -> None:
        self._budget = 64 * _MAX_NODES

    def tensors(self, module: object, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
        self._spend(64 + len(prefix), depth)
        skipped = self._transient(_entry(module, "_non_persistent_buffers_set"), depth)
        for kind in ("_parameters", "_buffers"):
            self._spend(sum(map(len, _parts(_entry(module, kind)))), depth)
            for name, value in _entries(_entry(module, kind)):
                self._spend(64 + len(prefix) + len(name), depth)
                if value is not None and not (kind == "_buffers" and name in skipped):
                    yield prefix + name, value
        self._spend(sum(map(len, _parts(_entry(module, "_modules")))), depth)
        for name, child in _entries(_entry(module, "_modules")):
            self._spend(64 + len(prefix) + len(name), depth)
            if _is_module(child):
                yield from self.tensors(child, f"{prefix}{name}.", depth + 1)
            elif child is not None:
                yield prefix + name, child

    def _transient(self, names: object, depth: int) -> set[str]:
        """Return the names of buffers that are not saved; many modules may share the list."""
        if not isinstance(names, Inert):
            return set()
        lists = [v for v in (names.items, names.args) if isinstance(v, list | tuple)]
        self._spend(sum(map(len, lists)), depth)
        lists += [value for values in lists for value in values if isinstance(value, list | tuple)]
        self._spend(sum(map(len, lists)), depth)
        return {value for values in lists for value in values if isinstance(value, str)}

    def _spend(self, cost: int, depth: int) -> None:
        self._budget -= cost
        if depth > _MAX_DEPTH or self._budget < 0:
            raise _too_much("modules are nested deeper, are more, or have longer names than any model's")


def _too_much(message: str) -> UnsafeError:
    return UnsafeError("PICKLE-LIMIT", message, fix="ask its author for a safetensors file")
