"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464), chunkwise in plain torch.

Per head, with state S [D, D] (rows are key dimensions), log decay g_t <= 0 and writing rate b_t:
S <- exp(g_t) S;  u_t = b_t (v_t - S^T k_t);  S <- S + k_t u_t^T;  o_t = scale S^T q_t.

Shapes: B batch, T tokens, H heads, D head_dim, N chunks, C tokens in a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gated_delta(
    q_BTHD: Tensor,
    k_BTHD: Tensor,
    v_BTHD: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, H, D] in q's dtype and the final state [B, H, D, D] in fp32; a single token by one step."""
    if q_BTHD.shape[1] > 1:
        return gated_delta_chunked(
            q_BTHD, k_BTHD, v_BTHD, g_BTH, beta_BTH, scale=scale, initial_state=initial_state
        )
    with torch.autocast(q_BTHD.device.type, enabled=False):
        return _step(q_BTHD, k_BTHD, v_BTHD, g_BTH, beta_BTH, scale, initial_state)


def _step(
    q_BTHD: Tensor,
    k_BTHD: Tensor,
    v_BTHD: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    scale: float,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The recurrence for a single token (T = 1)."""
    q, k, v = (x[:, 0].float() for x in (q_BTHD, k_BTHD, v_BTHD))
    g, beta = g_BTH[:, 0].float(), beta_BTH[:, 0].float()
    if initial_state is None:
        u = beta[..., None] * v
        state = k[..., :, None] * u[..., None, :]
    else:
        state = initial_state * g.exp()[..., None, None]
        u = beta[..., None] * (v - torch.einsum("bhkv,bhk->bhv", state, k))
        state = state + k[..., :, None] * u[..., None, :]
    o = scale * torch.einsum("bhkv,bhk->bhv", state, q)
    return o[:, None].to(q_BTHD.dtype), state


def gated_delta_chunked(
    q_BTHD: Tensor,
    k_BTHD: Tensor,
    v_BTHD: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """The recurrence, parallel within chunks; fp32 inside; differentiable. Returns as gated_delta.

    With G the cumulated log decay within a chunk that starts at state S_0, the written values U solve
    (I + A) U = b (V - exp(G) K S_0), A_ij = b_i exp(G_i - G_j) k_i.k_j below the diagonal (WY form); U is affine in
    S_0, and so are the outputs and the next chunk's state: everything but that affine pass of S over chunks, one
    product a chunk, is done for all chunks at once.
    """
    with torch.autocast(q_BTHD.device.type, enabled=False):
        o_BHTD, state = _chunked(
            q_BTHD, k_BTHD, v_BTHD, g_BTH, beta_BTH, scale, initial_state, chunk
        )
    return o_BHTD[:, :, : q_BTHD.shape[1]].transpose(1, 2).to(q_BTHD.dtype), state


def _chunked(
    q_BTHD: Tensor,
    k_BTHD: Tensor,
    v_BTHD: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    scale: float,
    initial_state: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, dim = q_BTHD.shape
    size = min(chunk, tokens)
    q, k, v, g, beta = (
        _chunks(x, size) for x in (q_BTHD, k_BTHD, v_BTHD, g_BTH[..., None], beta_BTH[..., None])
    )
    total = g.cumsum(-2)
    within = _decay_between(total)
    k_beta = k * beta
    coupling = ((k_beta @ k.transpose(-1, -2)) * within).tril(-1)
    # The solver takes the diagonal of I + A as ones without reading it.
    solved = torch.linalg.solve_triangular(
        coupling,
        torch.cat((v * beta, k_beta * total.exp()), dim=-1),
        upper=False,
        unitriangular=True,
    )
    local = (q @ k.transpose(-1, -2)) * within * scale
    o_written, o_erased = (local @ solved).split(dim, dim=-1)
    k_to_end = (k * (total[..., -1:, :] - total).exp()).transpose(-1, -2)
    added, removed = (k_to_end @ solved).split(dim, dim=-1)
    kept = torch.eye(dim, device=q.device) * total[..., -1:, :].exp() - removed
    state = q.new_zeros(batch, heads, dim, dim) if initial_state is None else initial_state.float()
    state, first_states = state.flatten(0, 1), []
    for n in range(q.shape[2]):
        first_states.append(state)
        state = torch.baddbmm(added[:, :, n].flatten(0, 1), kept[:, :, n].flatten(0, 1), state)
    first = torch.stack(first_states, dim=1).unflatten(0, (batch, heads))
    o_BHNCD = o_written + (q * (total.exp() * scale) - o_erased) @ first
    return o_BHNCD.flatten(2, 3), state.view(batch, heads, dim, dim)


def _chunks(x_BTHX: Tensor, size: int) -> Tensor:
    """[B, T, H, X] to fp32 [B, H, N, C, X], zeros after the end: they neither decay nor write."""
    x_BHTX, missing = x_BTHX.transpose(1, 2).float(), -x_BTHX.shape[1] % size
    if missing:
        x_BHTX = torch.nn.functional.pad(x_BHTX, (0, 0, 0, missing))
    return x_BHTX.reshape(*x_BHTX.shape[:2], -1, size, x_BHTX.shape[-1])


def _decay_between(total_BHNC1: Tensor) -> Tensor:
    """exp(G_i - G_j) for j <= i, else 0: [B, H, N, C, C]. Masked before exp, which would overflow above."""
    size = total_BHNC1.shape[-2]
    later = torch.ones(size, size, dtype=torch.bool, device=total_BHNC1.device).triu(1)
    difference = total_BHNC1 - total_BHNC1.transpose(-1, -2)
    return difference.masked_fill(later, float("-inf")).exp()
