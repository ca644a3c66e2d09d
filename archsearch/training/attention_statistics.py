"""How far back a teacher's heads look, and how sharply: what a twin's memory is set from.

Shapes: B sequences, T tokens, Q queries looked at, C hidden size, H query heads, G KV heads, D head_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..attention.full import FullHeads
from ..attention.rotary import PositionEmbeddings, rotate

QUERIES = 64
"""Queries a sequence whose attention is looked at, evenly spaced."""


class AttentionStatistics(NamedTuple):
    """Of each head of one layer."""

    distance_H: Tensor
    """Tokens that it typically looks back."""
    entropy_H: Tensor
    """Entropy of its attention over that of even attention, 0 to 1."""


def attention_statistics(
    full: FullHeads, x_BTC: Tensor, rope: PositionEmbeddings
) -> AttentionStatistics:
    """Statistics of a layer's heads on its input after the norm.

    The distance is the geometric mean of 1 + d, minus 1: a thin tail over the whole context would rule the
    arithmetic mean. The first token is left out: heads park attention there that they have no use for.
    Raises ValueError for sequences of fewer than three tokens.
    """
    num_tokens, device = x_BTC.shape[1], x_BTC.device
    if num_tokens < 3:
        raise ValueError(f"sequences of {num_tokens} tokens say nothing about attention distance")
    queries_Q = torch.linspace(
        2, num_tokens - 1, min(QUERIES, num_tokens - 2), device=device
    ).long()
    logits_BHQT = _attention_logits(full, x_BTC, rope, queries_Q)
    keys_T = torch.arange(num_tokens, device=device)
    back_QT = queries_Q.unsqueeze(1) - keys_T
    p_BHQT = logits_BHQT.masked_fill(back_QT < 0, -torch.inf).softmax(-1)
    entropy_BHQ = torch.special.entr(p_BHQT).sum(-1) / (queries_Q + 1.0).log()
    p_BHQT[..., 0] = 0
    mass_BHQ = p_BHQT.sum(-1)
    log_distance_BHQ = (p_BHQT * back_QT.clamp(min=0).log1p()).sum(-1)
    log_distance_H = log_distance_BHQ.sum((0, 2)) / mass_BHQ.sum((0, 2)).clamp(min=1e-6)
    return AttentionStatistics(log_distance_H.expm1(), entropy_BHQ.mean((0, 2)).clamp(0, 1))


def _attention_logits(
    full: FullHeads, x_BTC: Tensor, rope: PositionEmbeddings, queries_Q: Tensor
) -> Tensor:
    """The scaled attention logits of some queries over all keys, [B, H, Q, T] in fp32, no mask."""
    shape = (*x_BTC.shape[:2], -1, full.head_dim)
    q_BTHD, k_BTGD = full.q_proj(x_BTC).view(shape), full.k_proj(x_BTC).view(shape)
    if full.q_norm is not None and full.k_norm is not None:
        q_BTHD, k_BTGD = full.q_norm(q_BTHD), full.k_norm(k_BTGD)
    q_BTHD = rotate(q_BTHD, rope)[:, queries_Q]
    k_BTGD = rotate(k_BTGD, rope)
    k_BTHD = k_BTGD.repeat_interleave(q_BTHD.shape[2] // k_BTGD.shape[2], dim=2)
    logits_BHQT: Tensor = torch.einsum("bqhd,bthd->bhqt", q_BTHD.float(), k_BTHD.float())
    return logits_BHQT * float(full.head_dim**-0.5)
