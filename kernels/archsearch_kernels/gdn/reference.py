"""The gated delta rule one token at a time, in fp32 (fp64 where k is): what every faster form must equal.

Shapes: B batch, T tokens, H heads, G heads of k and v, n selected heads, D head_dim, N sequences. Source: Gated DeltaNet (arXiv 2412.06464), equation 10.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F


def gated_delta_reference(
    q_BTHD: Tensor,
    k_BTHD: Tensor,
    v_BTHD: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    scale: float,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, H, D] and the final state [B, H, D, D], rows of the state being key dimensions.

    g is the log decay. Per token: S <- exp(g) S; S <- S + k [beta (v - S^T k)]^T; o = scale S^T q.
    """
    wide = torch.promote_types(k_BTHD.dtype, torch.float32)
    q, k, v, g, beta = (x.to(wide) for x in (q_BTHD, k_BTHD, v_BTHD, g_BTH, beta_BTH))
    batch, tokens, heads, dim = k.shape
    if initial_state is None:
        state = k.new_zeros(batch, heads, dim, v.shape[-1])
    else:
        state = initial_state.to(wide)
    outputs = []
    for t in range(tokens):
        state = state * g[:, t, :, None, None].exp()
        read = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        write = beta[:, t, :, None] * (v[:, t] - read)
        state = state + k[:, t, :, :, None] * write[:, :, None, :]
        outputs.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, dim=1) if outputs else torch.zeros_like(v), state


def gdn_forward(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    a_BTH: Tensor,
    b_BTH: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    q_index_n: Tensor,
    kv_index_n: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """kernel.gdn_forward in plain torch: that function says what it computes."""
    wide = torch.promote_types(k_BTGD.dtype, torch.float32)
    queries, keys = q_index_n.long(), kv_index_n.long()
    q, a, b = (x.to(wide)[:, :, queries] for x in (q_BTHD, a_BTH, b_BTH))
    k, v = (x.to(wide)[:, :, keys] for x in (k_BTGD, v_BTGD))
    A_log_n, dt_bias_n = (x.to(wide)[queries] for x in (A_log_H, dt_bias_H))
    g, beta = -A_log_n.exp() * F.softplus(a + dt_bias_n), b.sigmoid()
    outputs, states = [], []
    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    for sequence, (start, end) in enumerate(pairwise(bounds)):
        state = initial_state
        if state is not None and cu_seqlens is not None:
            state = state[sequence : sequence + 1]
        here = slice(start, end)
        o, state = gated_delta_reference(
            _unit(q[:, here]),
            _unit(k[:, here]),
            v[:, here],
            g[:, here],
            beta[:, here],
            q.shape[3] ** -0.5,
            state,
        )
        outputs.append(o)
        states.append(state)
    return torch.cat(outputs, dim=1), torch.cat(states) if output_final_state else None


def _unit(x: Tensor) -> Tensor:
    """x over its L2 norm, with the epsilon under the root that fla-core uses, so that zeros stay zeros."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
