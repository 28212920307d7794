"""A GPU without memory or arithmetic, which counts where the host would wait for it.

It is torch's meta device: tensors on it have shapes and dtypes only, and code takes the branches of a device
that is not the CPU. Reads of numbers, which meta tensors do not have, are counted and answered with ones.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
aten = torch.ops.aten
_INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)


class Waits(TorchDispatchMode):
    """Counts reads of numbers from the device, and copies to it, by the line of code that makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()

    def clear(self) -> None:
        self.reads.clear()
        self.copies.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        devices = {one.device.type for one in tensors}
        if func is aten._to_copy.default and kwargs.get("device") is not None:
            return self._copied(tensors[0], func, args, kwargs)
        if "meta" not in devices:
            return func(*args, **kwargs)
        if func is aten.copy_.default and devices == {"cpu", "meta"}:
            to_host = args[0].device.type == "cpu"
            self._note(self.reads if to_host else self.copies)
            return args[0].fill_(1) if to_host else args[0]
        if func in _INDEXING and "cpu" in devices:
            self._note(self.copies)
            args = tree_map(lambda one: one.to("meta") if isinstance(one, torch.Tensor) else one, args)
        if func in (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default):
            self._note(self.reads)
            return 1 if func is aten._local_scalar_dense.default else func is aten.is_nonzero.default
        if func in (aten.nonzero.default, aten.masked_select.default, aten._unique2.default):
            raise AssertionError(f"{func} waits for a number of elements, at {_caller()}")
        return func(*args, **kwargs)

    def _copied(self, source: torch.Tensor, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        to_host = torch.device(kwargs["device"]).type == "cpu"
        if source.device.type == torch.device(kwargs["device"]).type:
            return func(*args, **kwargs)
        self._note(self.reads if to_host else self.copies)
        dtype = kwargs.get("dtype") or source.dtype
        if to_host:
            return torch.ones(source.shape, dtype=dtype)
        return torch.empty(source.shape, dtype=dtype, device=DEVICE)

    def _note(self, kind: Counter[str]) -> None:
        kind[_caller()] += 1


def _caller() -> str:
    """The line of aniso, or of torch's optimisers, that is being run."""
    frame: Any = sys._getframe(2)
    while frame is not None and "/aniso/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return "torch" if frame is None else f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


@contextlib.contextmanager
def fake_gpu() -> Iterator[Waits]:
    """Yield what was waited for within."""
    real = torch.autocast

    def autocast(kind: str, *args: Any, **kwargs: Any) -> Any:  # which torch has for no meta device
        return contextlib.nullcontext() if kind == "meta" else real(kind, *args, **kwargs)

    def is_autocast_enabled(kind: str) -> bool:
        return kind != "meta" and enabled(kind)

    enabled = torch.is_autocast_enabled
    patches = {"autocast": autocast, "is_autocast_enabled": is_autocast_enabled}
    with mock.patch.multiple(torch, **patches), Waits() as waits:
        yield waits
