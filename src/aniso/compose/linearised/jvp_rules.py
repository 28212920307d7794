"""Jacobian-vector products of the layers in which a linearised transformer spends its time.

Torch's own are correct and slow: each is a chain of tensors as large as the layer's output, all kept for the
backward pass. The Jacobians of norms and softmax are symmetric at a fixed point, so torch's backward kernels
also compute their forward derivatives. Other layers, and unusual calls of these, are left to torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from aniso.compose._engine import torch_internals
from aniso.compose._layers.cached_linear import GradientRows


def jvp_rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the dual output of a torch function, or None if its derivative is left to torch."""
    rule = _RULES.get(func)
    if rule is None or torch_internals.functorch_active():
        return None
    if any(isinstance(a, Tensor) and torch.is_autocast_enabled(a.device.type) for a in args):
        return None  # autocast does not cover in-place sums
    return rule(*args, **kwargs)


def _unpack(tensor: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return a tensor's primal and its tangent."""
    if tensor is None:
        return None, None
    primal, tangent = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
    return primal, tangent


def _dual(primal: Tensor, tangent: Tensor) -> Tensor:
    """Return a dual tensor. If ``primal`` is a view, torch attaches a copy of the tangent."""
    out: Tensor = forward_ad.make_dual(primal, tangent)  # type: ignore[no-untyped-call]
    return out


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:  # noqa: A002
    (x, dx), (w, dw), (b, db) = _unpack(input), _unpack(weight), _unpack(bias)
    assert x is not None and w is not None
    if x.requires_grad or w.requires_grad or (dx is None and dw is None) or x.ndim < 2:
        return None
    rows = x.reshape(-1, x.shape[-1])
    tangent = None if dx is None else dx.reshape(-1, x.shape[-1])
    out = _dual(F.linear(rows, w, b), _Linear.apply(rows, tangent, w, dw, db))
    return out.view(*x.shape[:-1], w.shape[0])


class _Linear(torch.autograd.Function):
    """``dx W^T + x dW^T + db``, in one sum."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dx: Tensor | None, w: Tensor, dw: Tensor | None, db: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, w)
        out: Tensor
        if dw is not None:
            out = x @ dw.T if db is None else torch.addmm(db, x, dw.T)
            return out if dx is None else out.addmm_(dx, w.T)
        assert dx is not None
        return dx @ w.T if db is None else torch.addmm(db, dx, w.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        rows, (_, of_dx, _, of_dw, of_db) = GradientRows.of(x, grad), ctx.needs_input_grad
        return (
            None,
            rows.input_gradient(w, x) if of_dx else None,
            None,
            rows.grad.T @ rows.x if of_dw else None,
            rows.grad.sum(0) if of_db else None,
        )


def _layer_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    (x, dx), (w, dw), (b, db) = _unpack(input), _unpack(weight), _unpack(bias)
    assert x is not None
    if x.requires_grad or w is None or b is None or dx is None or dw is None or db is None:
        return None
    shape = list(normalized_shape)
    y, mean, scale = torch_internals.layer_norm(x, shape, w, b, eps)
    return _dual(y, _LayerNorm.apply(x, mean, scale, w, dx, dw, db, shape, eps))


class _LayerNorm(torch.autograd.Function):
    """The tangent of a layer norm, given those of its input, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean: Tensor,
        scale: Tensor,
        w: Tensor,
        dx: Tensor,
        dw: Tensor,
        db: Tensor,
        shape: list[int],
        eps: float,
    ) -> Tensor:
        ctx.save_for_backward(x, mean, scale, w)
        ctx.shape = shape
        out = torch_internals.layer_norm(x, shape, dw, db, eps)[0]
        only_input = [True, False, False]
        normalised = torch_internals.layer_norm_backward(
            dx.contiguous(), x, shape, mean, scale, None, None, only_input
        )[0]
        return out.addcmul_(normalised, w)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, mean, scale, w = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[4:7])
        grads = torch_internals.layer_norm_backward(
            grad.contiguous(), x, ctx.shape, mean, scale, w, w, wanted
        )
        return None, None, None, None, *grads, None, None


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    pairs = [_unpack(t) for t in (query, key, value)]
    if attn_mask is not None or dropout_p or is_causal or enable_gqa:
        return None
    if any(t is None or t.requires_grad or d is None or t.ndim != 4 for t, d in pairs):
        return None
    if query.shape[:2] != key.shape[:2]:
        return None
    flat = [t.flatten(0, 1) for pair in pairs for t in pair if t is not None]
    q, dq, k, dk, v, dv = flat
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    probabilities = torch.softmax(_scores(q, k, factor), dim=-1)
    out = _dual(torch.bmm(probabilities, v), _Attention.apply(q, k, v, probabilities, factor, dq, dk, dv))
    return out.view(*query.shape[:-1], value.shape[-1])


def _scores(q: Tensor, k: Tensor, factor: float) -> Tensor:
    """``factor * q k^T``, scaled as it is written."""
    return torch.baddbmm(q.new_empty(1, 1, 1), q, k.mT, beta=0, alpha=factor)


class _Attention(torch.autograd.Function):
    """The tangent of ``softmax(q k^T) v``, given those of query, key and value."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        probabilities: Tensor,
        factor: float,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, probabilities)
        ctx.factor = factor
        scores = _scores(dq, k, factor).baddbmm_(q, dk.mT, alpha=factor)
        return torch.bmm(torch_internals.softmax_backward(scores, probabilities), v).baddbmm_(
            probabilities, dv
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, probabilities = ctx.saved_tensors
        scores_grad = torch_internals.softmax_backward(_scores(grad, v, ctx.factor), probabilities)
        return (
            *(None, None, None, None, None),
            torch.bmm(scores_grad, k),
            torch.bmm(scores_grad.mT, q),
            torch.bmm(probabilities.mT, grad),
        )


def _conv2d(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    *how: Any,
    **more: Any,
) -> Tensor | None:
    """Return the dual output of an encoder's first layer: images have no tangent."""
    (x, dx), (w, dw), (b, db) = _unpack(input), _unpack(weight), _unpack(bias)
    if dx is not None or dw is None or (db is None) != (b is None):
        return None
    return _dual(F.conv2d(x, w, b, *how, **more), F.conv2d(x, dw, db, *how, **more))  # type: ignore[arg-type]


_RULES: dict[Any, Callable[..., Tensor | None]] = {
    F.linear: _linear,
    F.conv2d: _conv2d,
    F.layer_norm: _layer_norm,
    F.scaled_dot_product_attention: _attention,
}
