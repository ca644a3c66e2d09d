"""Starts each twin from statistics of its head, before any gradient step.

Decay from how far back the head looks, write strength from how sharply it looks (after Taylor-Calibrate),
then the gamma and bias that fit the head's output best, in closed form.

Shapes: L layers, B sequences, T tokens, Q queries looked at, H query heads, G KV heads, D head_dim.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from ..attention.full import FullHeads
from ..attention.gdn import GatedDeltaHeads
from ..attention.rotary import PositionEmbeddings, rotate
from ..models.supernet import Supernet
from ..models.teacher import Teacher
from .loop import full_precision, mixed_precision
from .taps import visit_layers
from .twin_error import output_roots

QUERIES = 64
"""Queries a sequence whose attention is looked at, evenly spaced."""

STATISTICS_SEQUENCES = 4
"""Sequences whose attention is looked at."""

HALF_LIFE_SHARE = 0.5
"""Half-life of a twin over the distance that its head looks back. On SmolLM2-135M shares from 0.1 to 0.5 start
equally close, 1 farther; of these the longest memory, which retrieval needs."""

SHORTEST_DISTANCE_TOKENS = 1.0
WRITE_FLOOR, WRITE_SPAN = 0.3, 0.4
"""Write strength of a head that attends evenly, and what a head that attends to one token has on top."""

RIDGE = 1e-4
"""Added to the diagonal of the least-squares problem, as a share of its mean."""


def calibrate(teacher: Teacher, supernet: Supernet, tokens_NT: Tensor) -> None:
    """Sets dt_bias, the bias of b, gamma and (where twins have one) bias, in place.

    Two passes of the teacher over tokens, best a few thousand of them. The twins must be freshly
    migrated: A_log, a_proj and the weight of b_proj zero, the gate the identity.
    """
    tokens_NT = tokens_NT.long().to(teacher.device)
    with torch.no_grad():
        _match_attention(teacher, supernet, tokens_NT[:STATISTICS_SEQUENCES])
        _fit_outputs(teacher, supernet, tokens_NT)


def _match_attention(teacher: Teacher, supernet: Supernet, tokens_NT: Tensor) -> None:
    def visit(layer: int, x: Tensor, position_embeddings: PositionEmbeddings, _: Tensor) -> None:
        full, twin = teacher.model.model.layers[layer].self_attn.full, supernet.twins[layer]
        assert isinstance(full, FullHeads)
        assert isinstance(twin, GatedDeltaHeads)
        distance_H, entropy_H = attention_statistics(full, x, position_embeddings)
        half_life_H = HALF_LIFE_SHARE * distance_H.clamp(min=SHORTEST_DISTANCE_TOKENS)
        # softplus(dt_bias) = ln 2 / half-life, as A_log and a_proj are zero.
        twin.dt_bias.copy_((math.log(2) / half_life_H).expm1().log())
        twin.b_proj.bias.copy_((WRITE_FLOOR + WRITE_SPAN * (1 - entropy_H)).logit())

    visit_layers(teacher.model, tokens_NT, visit)


def attention_statistics(
    full: FullHeads, x_BTC: Tensor, position_embeddings: PositionEmbeddings
) -> tuple[Tensor, Tensor]:
    """Typical distance in tokens that a head looks back, and its entropy over that of even attention; both [H].

    The distance is the geometric mean of 1 + d, minus 1: a thin tail over the whole context would rule the
    arithmetic mean. The first token is left out: heads park attention there that they have no use for.
    """
    num_tokens, device = x_BTC.shape[1], x_BTC.device
    if num_tokens < 3:
        raise ValueError(f"sequences of {num_tokens} tokens say nothing about attention distance")
    queries_Q = torch.linspace(
        2, num_tokens - 1, min(QUERIES, num_tokens - 2), device=device
    ).long()
    logits_BHQT = _attention_logits(full, x_BTC, position_embeddings, queries_Q)
    keys_T = torch.arange(num_tokens, device=device)
    back_QT = queries_Q.unsqueeze(1) - keys_T
    p_BHQT = logits_BHQT.masked_fill(back_QT < 0, -torch.inf).softmax(-1)
    entropy_BHQ = torch.special.entr(p_BHQT).sum(-1) / (queries_Q + 1.0).log()
    p_BHQT[..., 0] = 0
    mass_BHQ = p_BHQT.sum(-1)
    log_distance_BHQ = (p_BHQT * back_QT.clamp(min=0).log1p()).sum(-1)
    log_distance_H = log_distance_BHQ.sum((0, 2)) / mass_BHQ.sum((0, 2)).clamp(min=1e-6)
    return log_distance_H.expm1(), entropy_BHQ.mean((0, 2)).clamp(0, 1)


def _attention_logits(
    full: FullHeads, x_BTC: Tensor, position_embeddings: PositionEmbeddings, queries_Q: Tensor
) -> Tensor:
    """The scaled attention logits of some queries over all keys, [B, H, Q, T] in fp32, no mask."""
    shape = (*x_BTC.shape[:2], -1, full.head_dim)
    q_BTHD, k_BTGD = full.q_proj(x_BTC).view(shape), full.k_proj(x_BTC).view(shape)
    if full.q_norm is not None and full.k_norm is not None:
        q_BTHD, k_BTGD = full.q_norm(q_BTHD), full.k_norm(k_BTGD)
    q_BTHD = rotate(q_BTHD, position_embeddings)[:, queries_Q]
    k_BTGD = rotate(k_BTGD, position_embeddings)
    k_BTHD = k_BTGD.repeat_interleave(q_BTHD.shape[2] // k_BTGD.shape[2], dim=2)
    logits_BHQT: Tensor = torch.einsum("bqhd,bthd->bhqt", q_BTHD.float(), k_BTHD.float())
    return logits_BHQT * float(full.head_dim**-0.5)


def _fit_outputs(teacher: Teacher, supernet: Supernet, tokens_NT: Tensor) -> None:
    twins = [cast("GatedDeltaHeads", twin) for twin in supernet.twins]
    for twin in twins:
        twin.gamma.fill_(1)
        if twin.bias is not None:
            twin.bias.zero_()
    fits = [_AffineFit() for _ in twins]

    def visit(layer: int, x: Tensor, position_embeddings: PositionEmbeddings, o: Tensor) -> None:
        twin_BTHD = twins[layer](x, position_embeddings)
        with full_precision(x.device):
            fits[layer].add(twin_BTHD, o)

    with mixed_precision(teacher.device, teacher.model.dtype):
        for ids_BT in tokens_NT.split(max(1, 8192 // tokens_NT.shape[1])):
            visit_layers(teacher.model, ids_BT, visit)
    for twin, fit, root_HDD in zip(twins, fits, output_roots(teacher.model), strict=True):
        gamma_HD, bias_HD = fit.solve(root_HDD, with_bias=twin.bias is not None)
        twin.gamma.copy_(gamma_HD)
        if twin.bias is not None:
            twin.bias.copy_(bias_HD)


class _AffineFit:
    """Least squares for gamma and bias of |R (gamma * n + bias - o)|^2, n a twin's and o a head's output.

    With G = R^T R and moments over tokens, gamma solves (G * E[n n^T]) gamma = (G * E[n o^T]) 1, the
    moments centred where there is a bias.
    """

    def __init__(self) -> None:
        self._count = 0
        self._sums: list[Tensor] = []

    def add(self, n_BTHD: Tensor, o_BTHD: Tensor) -> None:
        n_HMD, o_HMD = (values.float().flatten(0, 1).transpose(0, 1) for values in (n_BTHD, o_BTHD))
        moments = (n_HMD.sum(1), o_HMD.sum(1), n_HMD.mT @ n_HMD, n_HMD.mT @ o_HMD)
        parts = [moment.double() for moment in moments]
        if self._sums:
            parts = [a + b for a, b in zip(self._sums, parts, strict=True)]
        self._sums = parts
        self._count += n_HMD.shape[1]

    def solve(self, root_HDD: Tensor, *, with_bias: bool) -> tuple[Tensor, Tensor]:
        """gamma and bias, [H, D] each; the bias is zero without with_bias."""
        mean_n, mean_o, nn_HDD, no_HDD = (value / self._count for value in self._sums)
        if with_bias:
            nn_HDD = nn_HDD - mean_n.unsqueeze(2) * mean_n.unsqueeze(1)
            no_HDD = no_HDD - mean_n.unsqueeze(2) * mean_o.unsqueeze(1)
        gram_HDD = root_HDD.double().mT @ root_HDD.double()
        left_HDD = gram_HDD * nn_HDD
        diagonal_HD = left_HDD.diagonal(dim1=-2, dim2=-1)
        ridge_H = RIDGE * diagonal_HD.mean(-1).clamp(min=1e-30)
        left_HDD = left_HDD + ridge_H[:, None, None] * torch.eye(
            left_HDD.shape[-1], dtype=torch.float64, device=left_HDD.device
        )
        right_HD = (gram_HDD * no_HDD).sum(-1)
        gamma_HD = torch.linalg.solve(left_HDD, right_HD)
        bias_HD = mean_o - gamma_HD * mean_n if with_bias else torch.zeros_like(gamma_HD)
        return gamma_HD, bias_HD
