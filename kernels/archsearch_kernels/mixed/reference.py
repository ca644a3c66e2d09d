"""A layer's mixed heads between projections and o_proj in plain torch: what operator.py must equal.

Shapes: B batch, T tokens, H query heads, G KV heads, n Gated DeltaNet heads, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from archsearch_kernels.fusion import reference as fusion_reference
from archsearch_kernels.gdn import reference as gdn_reference
from archsearch_kernels.mixed.heads import MixedPlan
from archsearch_kernels.prologue import reference as prologue_reference


def mixed_heads(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    a_BTn: Tensor,
    b_BTn: Tensor,
    A_log_n: Tensor,
    dt_bias_n: Tensor,
    plan: MixedPlan,
    *,
    q_weight_D: Tensor | None = None,
    k_weight_D: Tensor | None = None,
    cos_BTD: Tensor | None = None,
    sin_BTD: Tensor | None = None,
    factor_BT: Tensor | None = None,
    gamma_nD: Tensor | None = None,
    bias_nD: Tensor | None = None,
    gate_BTnD: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Tensor:
    """operator.mixed_heads one token at a time for the linear heads, at least fp32 inside."""
    wide = torch.promote_types(q_BTHD.dtype, torch.float32)
    parts = list(
        prologue_reference.prologue(
            q_BTHD.to(wide),
            k_BTGD.to(wide),
            plan.prologue,
            q_weight_D=q_weight_D,
            k_weight_D=k_weight_D,
            norm_eps=norm_eps,
            cos_BTD=cos_BTD,
            sin_BTD=sin_BTD,
            factor_BT=factor_BT,
        )
    )
    v = v_BTGD.to(wide)
    full, linear = None, None
    if plan.full:
        full = _attention(parts.pop(0), parts.pop(0), v.index_select(2, plan.full_kv_index))
    if plan.linear:
        q, k = parts
        linear, _ = gdn_reference.gdn_forward(
            q, k, v, a_BTn, b_BTn, A_log_n, dt_bias_n, plan.q_index, plan.kv_index
        )
    out = fusion_reference.fusion(
        full,
        linear,
        plan.fusion,
        gamma_RD=gamma_nD,
        bias_RD=bias_nD,
        gate_BTED=gate_BTnD,
        norm_eps=norm_eps,
    )
    return out.to(q_BTHD.dtype)


def _attention(q_BTnD: Tensor, k_BTmD: Tensor, v_BTmD: Tensor) -> Tensor:
    """Causal softmax attention, heads behind tokens; query head i reads KV head i m / n."""
    tokens, heads, dim = q_BTnD.shape[1:]
    k, v = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (k_BTmD, v_BTmD))
    scores = torch.einsum("bihd,bjhd->bhij", q_BTnD, k) * dim**-0.5
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=scores.device).triu(1)
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v)
