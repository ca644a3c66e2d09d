"""The gated delta rule one token at a time, in fp32: what every faster form must equal.

Shapes: B batch, T tokens, H heads, D head_dim. Source: Gated DeltaNet (arXiv 2412.06464), equation 10.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
    q, k, v, g, beta = (x.float() for x in (q_BTHD, k_BTHD, v_BTHD, g_BTH, beta_BTH))
    batch, tokens, heads, dim = k.shape
    if initial_state is None:
        state = k.new_zeros(batch, heads, dim, v.shape[-1])
    else:
        state = initial_state.float()
    outputs = []
    for t in range(tokens):
        state = state * g[:, t, :, None, None].exp()
        read = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        write = beta[:, t, :, None] * (v[:, t] - read)
        state = state + k[:, t, :, :, None] * write[:, :, None, :]
        outputs.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, dim=1), state
