"""Forward derivatives of the layers that a linearised transformer spends its time in, and their way back.

Torch's own are right and slow: each is a chain of tensors as large as the layer's output, all kept for the
backward pass. Norms and softmax are symmetric maps of what goes in at a fixed point, so the kernel of torch's
backward pass is also the derivative forward. Whatever is not here, or not as plain as here,
is left to torch.
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

from aniso.compose.linear import Rows

_aten = torch.ops.aten


def by_hand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """What a function of torch's gives, with its derivative; or none if that is left to torch."""
    own = _LAYERS.get(func)
    if own is None or torch._C._are_functorch_transforms_active():
        return None
    if any(isinstance(a, Tensor) and torch.is_autocast_enabled(a.device.type) for a in args):
        return None  # which knows nothing of sums in place
    return own(*args, **kwargs)


def _parts(tensor: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """A tensor and its derivative."""
    if tensor is None:
        return None, None
    value, moved = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
    return value, moved


def _with(value: Tensor, moved: Tensor) -> Tensor:
    """Both in one. To a view of another tensor torch would attach a copy of the derivative."""
    out: Tensor = forward_ad.make_dual(value, moved)  # type: ignore[no-untyped-call]
    return out


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:  # noqa: A002
    (x, dx), (w, dw), (b, db) = _parts(input), _parts(weight), _parts(bias)
    assert x is not None and w is not None
    if x.requires_grad or w.requires_grad or (dx is None and dw is None) or x.ndim < 2:
        return None
    rows = x.reshape(-1, x.shape[-1])
    moved = None if dx is None else dx.reshape(-1, x.shape[-1])
    out = _with(F.linear(rows, w, b), _Linear.apply(rows, moved, w, dw, db))
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
        rows, (_, of_dx, _, of_dw, of_db) = Rows.of(x, grad), ctx.needs_input_grad
        return (
            None,
            rows.of_input(w, x) if of_dx else None,
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
    (x, dx), (w, dw), (b, db) = _parts(input), _parts(weight), _parts(bias)
    assert x is not None
    if x.requires_grad or w is None or b is None or dx is None or dw is None or db is None:
        return None
    shape = list(normalized_shape)
    y, mean, scale = _aten.native_layer_norm(x, shape, w, b, eps)
    return _with(y, _LayerNorm.apply(x, mean, scale, w, dx, dw, db, shape, eps))


class _LayerNorm(torch.autograd.Function):
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
        out: Tensor = _aten.native_layer_norm(x, shape, dw, db, eps)[0]
        only_input = [True, False, False]
        moved = _aten.native_layer_norm_backward(
            dx.contiguous(), x, shape, mean, scale, None, None, only_input
        )[0]
        return out.addcmul_(moved, w)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, mean, scale, w = ctx.saved_tensors
        asked = list(ctx.needs_input_grad[4:7])
        found = _aten.native_layer_norm_backward(grad.contiguous(), x, ctx.shape, mean, scale, w, w, asked)
        return None, None, None, None, *found, None, None


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
    pairs = [_parts(t) for t in (query, key, value)]
    if attn_mask is not None or dropout_p or is_causal or enable_gqa:
        return None
    if any(t is None or t.requires_grad or d is None or t.ndim != 4 for t, d in pairs):
        return None
    if query.shape[:2] != key.shape[:2]:
        return None
    flat = [t.flatten(0, 1) for pair in pairs for t in pair if t is not None]
    q, dq, k, dk, v, dv = flat
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    shares = torch.softmax(_scores(q, k, factor), dim=-1)
    out = _with(torch.bmm(shares, v), _Attention.apply(q, k, v, shares, factor, dq, dk, dv))
    return out.view(*query.shape[:-1], value.shape[-1])


def _scores(q: Tensor, k: Tensor, factor: float) -> Tensor:
    """``factor * q k^T``, scaled as it is written."""
    return torch.baddbmm(q.new_empty(1, 1, 1), q, k.mT, beta=0, alpha=factor)


def _softmax_moved(moved: Tensor, shares: Tensor) -> Tensor:
    out: Tensor = _aten._softmax_backward_data(moved, shares, -1, shares.dtype)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        shares: Tensor,
        factor: float,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, shares)
        ctx.factor = factor
        scores = _scores(dq, k, factor).baddbmm_(q, dk.mT, alpha=factor)
        return torch.bmm(_softmax_moved(scores, shares), v).baddbmm_(shares, dv)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, shares = ctx.saved_tensors
        of_scores = _softmax_moved(_scores(grad, v, ctx.factor), shares)
        return (
            *(None, None, None, None, None),
            torch.bmm(of_scores, k),
            torch.bmm(of_scores.mT, q),
            torch.bmm(shares.mT, grad),
        )


def _conv2d(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    *how: Any,
    **more: Any,
) -> Tensor | None:
    """The first layer of an encoder: pictures have no derivative, and torch would multiply its zeros."""
    (x, dx), (w, dw), (b, db) = _parts(input), _parts(weight), _parts(bias)
    if dx is not None or dw is None or (db is None) != (b is None):
        return None
    return _with(F.conv2d(x, w, b, *how, **more), F.conv2d(x, dw, db, *how, **more))  # type: ignore[arg-type]


_LAYERS: dict[Any, Callable[..., Tensor | None]] = {
    F.linear: _linear,
    F.conv2d: _conv2d,
    F.layer_norm: _layer_norm,
    F.scaled_dot_product_attention: _attention,
}
