"""Torch's multi-head attention rewritten with ``F.linear``, which composed weights intercept."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F


def self_attention(  # the signature is torch's
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    *others: Any,
    **more: Any,
) -> tuple[Tensor, None] | None:
    """Return self-attention as two linear layers around the attention; None for any unusual call."""
    is_plain = (
        query is key
        and key is value
        and query.dim() == 3
        and in_proj_weight is not None
        and not use_separate_proj_weight
        and not need_weights
        and not add_zero_attn
        and all(t is None for t in (bias_k, bias_v, key_padding_mask, attn_mask, *others))
        and all(v is None or v is False for k, v in more.items() if k != "average_attn_weights")
    )
    if not is_plain:
        return None
    tokens, batch, width = query.shape
    projected = F.linear(query, in_proj_weight, in_proj_bias).chunk(3, dim=-1)  # type: ignore[arg-type]
    split = (tokens, batch, num_heads, width // num_heads)
    q, k, v = (t.view(split).permute(1, 2, 0, 3) for t in projected)
    mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p if training else 0.0)
    joined = mixed.permute(2, 0, 1, 3).reshape(tokens, batch, width)
    return F.linear(joined, out_proj_weight, out_proj_bias), None
