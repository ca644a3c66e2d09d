"""A layer's mixed heads made of what is published: fla-core, cuDNN's SDPA, torch ops. The baseline of the benches.

Shapes: B batch, T tokens, H query heads, G KV heads, n Gated DeltaNet heads, D head_dim.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from archsearch_kernels.mixed.attention import attend
from archsearch_kernels.mixed.heads import MixedPlan

DeltaRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""q, k, v [B, T, n, D] before their L2 norm, raw gates a and b [B, T, n], A_log and dt_bias [n], to o [B, T, n, D]."""


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
    delta_rule: DeltaRule | None = None,
) -> Tensor:
    """operator.mixed_heads, which says what it computes. delta_rule: fla-core's unless given."""
    if q_weight_D is not None and k_weight_D is not None:
        q_BTHD, k_BTGD = _norm(q_BTHD, q_weight_D, norm_eps), _norm(k_BTGD, k_weight_D, norm_eps)
    rotated = (
        (_rotate(q_BTHD, cos_BTD, sin_BTD), _rotate(k_BTGD, cos_BTD, sin_BTD))
        if cos_BTD is not None and sin_BTD is not None
        else (q_BTHD, k_BTGD)
    )
    device, switches, branches = q_BTHD.device, plan.switches, []
    if plan.full:
        q, k = rotated if switches.full_rotary else (q_BTHD, k_BTGD)
        q = _heads(q, plan.full)
        if switches.full_log_scale and factor_BT is not None:
            q = q * factor_BT.to(q.dtype)[..., None, None]
        branches.append(attend(q, _heads(k, plan.full_kv), _heads(v_BTGD, plan.full_kv)))
    if plan.linear:
        q, k = rotated if switches.linear_rotary else (q_BTHD, k_BTGD)
        q, (k, v) = _heads(q, plan.linear), (_heads(x, plan.linear_kv) for x in (k, v_BTGD))
        o = (delta_rule or by_fla)(q, k, v, a_BTn, b_BTn, A_log_n, dt_bias_n)
        branches.append(_finish(o, gamma_nD, bias_nD, gate_BTnD, norm_eps))
    if len(branches) == 1:
        return branches[0].flatten(2)
    joined, order = torch.cat(branches, dim=2), (*plan.full, *plan.linear)
    places = [order.index(head) for head in range(len(order))]
    return joined.index_select(2, _index(tuple(places), device)).flatten(2)


def by_fla(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor
) -> Tensor:
    """fla-core's chunkwise kernels, with norms and gates in its own kernels, as it offers them."""
    fla = importlib.import_module("fla.ops.gated_delta_rule")
    o: Tensor = fla.chunk_gated_delta_rule(
        q=q,
        k=k,
        v=v,
        g=a,
        beta=b,
        scale=q.shape[-1] ** -0.5,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=True,
    )[0]
    return o


def _finish(
    o_BTnD: Tensor,
    gamma_nD: Tensor | None,
    bias_nD: Tensor | None,
    gate_BTnD: Tensor | None,
    eps: float,
) -> Tensor:
    o = F.rms_norm(o_BTnD, (o_BTnD.shape[-1],), None, eps)
    if gamma_nD is not None:
        o = o * gamma_nD.to(o.dtype)
    if bias_nD is not None:
        o = o + bias_nD.to(o.dtype)
    return o if gate_BTnD is None else o * (2 * torch.sigmoid(gate_BTnD))


def _norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight_D.to(x.dtype), eps)


def _rotate(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = (table.unsqueeze(-2).to(x_BTHD.dtype) for table in (cos, sin))
    first, second = x_BTHD.chunk(2, dim=-1)
    return x_BTHD * cos + torch.cat((-second, first), dim=-1) * sin


def _heads(x_BTHD: Tensor, heads: tuple[int, ...]) -> Tensor:
    """The heads named, in that order: a gather unless they are all there are."""
    if heads == tuple(range(x_BTHD.shape[2])):
        return x_BTHD
    return x_BTHD.index_select(2, _index(heads, x_BTHD.device))


_indices: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}


def _index(heads: tuple[int, ...], device: torch.device) -> Tensor:
    key = (heads, device)
    if key not in _indices:
        with torch.inference_mode(False):
            _indices[key] = torch.tensor(heads, dtype=torch.long, device=device)
    return _indices[key]
