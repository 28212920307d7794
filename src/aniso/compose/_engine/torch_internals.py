"""Every private or undocumented symbol of torch that compositions use, in one place.

``tests/unit/test_torch_internals.py`` has a test for each: when a new version of torch renames one or changes
what it does, that test fails and this module is the only one to edit.
"""

from __future__ import annotations

import contextlib
import importlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

_FIRST = 2**63  # a backward pass takes the highest sequence number first of all nodes that are ready

NormBase: type[nn.Module] = nn.modules.batchnorm._NormBase
"""The base class of all batch norms and instance norms."""


def functorch_active() -> bool:
    """Return True inside of ``torch.func`` transforms such as ``vmap``, ``grad`` and ``jvp``."""
    return bool(torch._C._are_functorch_transforms_active())


def forward_ad_active() -> bool:
    """Return True inside of a ``forward_ad.dual_level``."""
    return forward_ad._current_level >= 0


def is_batched_by_vmap(tensor: Tensor) -> bool:
    """Return True for the batched gradients of ``torch.autograd.grad(..., is_grads_batched=True)``."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(tensor))


def without_torch_function() -> AbstractContextManager[None]:
    """Return a context in which tensor subclasses are treated as plain tensors."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


def version(tensor: Tensor) -> int:
    """Return the counter that in-place operations on a tensor increase; ``.data`` escapes it."""
    return tensor._version


def run_first_in_backward(tensor: Tensor) -> None:
    """Give the node that made a tensor the highest priority in the backward pass.

    Nodes run in the reverse order of their creation, so a node made before the forward pass would run last,
    and the gradients of all composed weights would stay in memory until then.
    """
    node: Any = tensor.grad_fn
    if node is not None:
        node._set_sequence_nr(_FIRST)


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return a module's own parameters and buffers by attribute; not those of its children."""
    both = (*module._parameters.items(), *module._buffers.items())
    return [(name, tensor) for name, tensor in both if tensor is not None]


MODULE_DICTIONARIES = ("_parameters", "_buffers", "_modules")
"""The attributes in which modules register parameters, buffers and children."""


def shadow(module: nn.Module, attribute: str, tensor: Tensor) -> None:
    """Make ``module.attribute`` return a tensor; the parameter or buffer of that name stays what it is.

    Python looks into an object's ``__dict__`` before it calls ``nn.Module.__getattr__``.
    """
    module.__dict__[attribute] = tensor
    _refresh(module)


def unshadow(module: nn.Module, attribute: str) -> None:
    """Make ``module.attribute`` return the registered parameter or buffer again."""
    module.__dict__.pop(attribute, None)
    _refresh(module)


def _refresh(module: nn.Module) -> None:
    """Recurrent layers keep a list of their weights beside the attributes."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def load_jvp_decompositions() -> None:
    """Import the module in which torch compiles some forward derivatives; it warns while it does so."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torch._decomp.decompositions_for_jvp")


def layer_norm(
    x: Tensor, shape: list[int], weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised tensor, the means and the reciprocal standard deviations."""
    out: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_layer_norm(x, shape, weight, bias, eps)
    return out


def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: list[bool],
) -> tuple[Any, Any, Any]:
    """Return the gradients of input, weight and bias as far as they are ``wanted``."""
    out: tuple[Any, Any, Any] = torch.ops.aten.native_layer_norm_backward(
        grad, x, shape, mean, rstd, weight, bias, wanted
    )
    return out


def softmax_backward(grad: Tensor, probabilities: Tensor) -> Tensor:
    """Return the gradient of the input of a softmax over the last dimension, given its output."""
    out: Tensor = torch.ops.aten._softmax_backward_data(grad, probabilities, -1, probabilities.dtype)
    return out


def openmp_libraries() -> list[Path]:
    """Return the OpenMP libraries that torch's wheels bring along; none if torch uses the system's."""
    return sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*"))
