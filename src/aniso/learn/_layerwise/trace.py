"""The order in which a network runs its layers, and the chain of equal stages that most of it is."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

from torch import Tensor, nn

from aniso.learn._layerwise.layers import Keywords, Layer

Call = tuple[tuple[Any, ...], Keywords]
"""Positional and keyword arguments of a module."""
Group = tuple[Layer, ...]
"""Linear maps with one input, such as query, key and value; or one layer norm."""


@final
@dataclass(frozen=True, eq=False)
class Chain:
    """Modules that run one after another, each on the output of the one before: the layers of a transformer.

    All other arguments, such as a mask, are the same for all of them.
    """

    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    place: int | str
    """The position or the keyword of the argument that is the output of the module before."""
    in_tuple: int = 0
    """The length of the tuple whose first entry is that output; 0 if the output is a tensor."""

    def value(self, call: Call) -> Tensor:
        """Return the argument of a call that is the output of the module before."""
        found: Tensor = call[0][self.place] if isinstance(self.place, int) else call[1][self.place]
        return found

    def following(self, call: Call, output: Any) -> Call:
        """Return the call of the next module from that of a module and its output."""
        value = output[0] if self.in_tuple else output
        args, kwargs = call
        if isinstance(self.place, int):
            return (*args[: self.place], value, *args[self.place + 1 :]), kwargs
        return args, {**kwargs, self.place: value}

    def as_output(self, value: Tensor) -> Any:
        """Return a tensor in the form in which the modules return it."""
        return (value, *[None] * (self.in_tuple - 1)) if self.in_tuple else value

    @contextlib.contextmanager
    def skipped(self, value: Tensor) -> Iterator[None]:
        """Let all modules return this value in place of running."""
        for module in self.modules:
            module.forward = partial(_returned, self.as_output(value))
        try:
            yield
        finally:
            for module in self.modules:
                del module.forward


def _returned(output: Any, *args: Any, **kwargs: Any) -> Any:
    return output


@final
@dataclass(frozen=True, eq=False)
class Trace:
    """Layers in the order in which a network runs them, each with the stage that it is part of."""

    groups: tuple[tuple[int, Group], ...]
    """Stage -1 comes before the chain, stage i is its module i, and the last stage is the rest."""
    chain: Chain | None

    @property
    def last_stage(self) -> int:
        """The number of the stage after the chain; -1 if there is no chain, and all is one stage."""
        return -1 if self.chain is None else len(self.chain.modules)


@final
@dataclass
class _Events:
    """What a forward pass did, with the tensors that went in and out, which are compared by identity."""

    order: list[str] = field(default_factory=list)
    """Names of layers and of members of lists of modules, as they were called."""
    inputs: dict[str, Tensor] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)
    outputs: Keywords = field(default_factory=dict)


def trace(network: nn.Module, layers: Mapping[str, Layer], run: Callable[[], object]) -> Trace:
    """Return the order of the layers in a forward pass, which ``run`` makes.

    Layers that are called more than once, or not at all, are left out.
    """
    lists = {n: m for n, m in network.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)}
    members = {
        f"{name}.{key}" if name else key: child
        for name, module in lists.items()
        for key, child in module.named_children()
    }
    events = _watched(layers, members, run)
    count = Counter(events.order)
    called = [name for name in dict.fromkeys(events.order) if name.startswith("=") and count[name] == 1]
    ordered = [layers[name[1:]] for name in called]
    chains = [
        found for name, module in lists.items() if (found := _chain(name, module, events, count)) is not None
    ]
    chain = max(chains, key=lambda one: _layers_in(one, ordered), default=None)
    if chain is None or not _layers_in(chain, ordered):
        return Trace(tuple((-1, group) for group in _grouped(ordered, events)), None)
    begun = events.order.index(f"/{chain.names[0]}")
    place = {name: i for i, name in enumerate(events.order)}

    def stage(layer: Layer) -> int:
        inside = [i for i, name in enumerate(chain.names) if _is_in(layer.name, name)]
        if inside:
            return inside[0]
        return -1 if place[f"={layer.name}"] < begun else len(chain.modules)

    return Trace(tuple((stage(group[0]), group) for group in _grouped(ordered, events)), chain)


def _watched(
    layers: Mapping[str, Layer], members: Mapping[str, nn.Module], run: Callable[[], object]
) -> _Events:
    """Run a forward pass and return what it did; ``=`` marks layers, ``/`` members of lists."""
    events = _Events()
    handles = []

    def layer_called(layer: Layer, module: nn.Module, args: tuple[Any, ...], kwargs: Keywords) -> None:
        given = layer.input(args, kwargs)
        if given is not None:
            events.order.append(f"={layer.name}")
            events.inputs[layer.name] = given

    def entered(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Keywords) -> None:
        events.order.append(f"/{name}")
        events.calls[name] = args, kwargs

    def left(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        events.outputs[name] = output

    for name, module in members.items():
        handles.append(module.register_forward_pre_hook(partial(entered, name), with_kwargs=True))
        handles.append(module.register_forward_hook(partial(left, name), with_kwargs=True))
    for layer in layers.values():
        hook = partial(layer_called, layer)
        handles.append(layer.module.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return events


def _grouped(ordered: list[Layer], events: _Events) -> list[Group]:
    """Join neighbouring linear maps of one and the same input tensor."""
    groups: list[list[Layer]] = []
    for layer in ordered:
        last = groups[-1][0] if groups else None
        together = last is not None and not (layer.is_norm or last.is_norm)
        if together and last is not None and events.inputs[last.name] is events.inputs[layer.name]:
            groups[-1].append(layer)
        else:
            groups.append([layer])
    return [tuple(group) for group in groups]


def _chain(name: str, module: nn.Module, events: _Events, count: Counter[str]) -> Chain | None:
    """Return a list of modules as a chain, if it runs as one; None if not."""
    children = {f"{name}.{key}" if name else key: child for key, child in module.named_children()}
    names = tuple(children)
    if len(names) < 2 or any(count[f"/{one}"] != 1 for one in names):
        return None
    calls, outputs = [events.calls[one] for one in names], [events.outputs[one] for one in names]
    lengths = {len(output) if isinstance(output, tuple) else 0 for output in outputs}
    first = outputs[0][0] if isinstance(outputs[0], tuple) and outputs[0] else outputs[0]
    given: list[tuple[int | str, Any]] = [*enumerate(calls[1][0]), *calls[1][1].items()]
    places = [place for place, value in given if value is first and isinstance(value, Tensor)]
    if len(lengths) > 1 or len(places) != 1:
        return None
    found = Chain(names, tuple(children.values()), places[0], lengths.pop())
    more = [output[1:] for output in outputs if isinstance(output, tuple)]
    is_plain = all(value is None for values in more for value in values)
    return found if is_plain and _runs_as(found, calls, outputs) else None


def _runs_as(chain: Chain, calls: list[Call], outputs: list[Any]) -> bool:
    """True if every call is the one that follows from the call before and its output."""
    for before, output, call in zip(calls, outputs, calls[1:], strict=False):
        args, kwargs = chain.following(before, output)
        if len(args) != len(call[0]) or set(kwargs) != set(call[1]):
            return False
        pairs = [*zip(args, call[0], strict=True), *((kwargs[key], call[1][key]) for key in kwargs)]
        if not all(_is_same(one, other) for one, other in pairs):
            return False
    return True


def _is_same(one: object, other: object) -> bool:
    plain = bool | int | float | str
    return one is other or (isinstance(one, plain) and isinstance(other, plain) and one == other)


def _layers_in(chain: Chain, layers: list[Layer]) -> int:
    return sum(any(_is_in(layer.name, name) for name in chain.names) for layer in layers)


def _is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


class _ReachedError(Exception):
    """Ends a forward pass at the module whose input is wanted."""


def input_of(module: nn.Module, run: Callable[[], object]) -> Call | None:
    """Return the arguments with which ``run`` calls a module, and go no further; None if it does not."""
    found: list[Call] = []

    def reached(module: nn.Module, args: tuple[Any, ...], kwargs: Keywords) -> None:
        found.append((args, kwargs))
        raise _ReachedError

    handle = module.register_forward_pre_hook(reached, with_kwargs=True)
    try:
        run()
    except _ReachedError:
        pass
    finally:
        handle.remove()
    return found[0] if found else None
