"""What a student is to come close to at each position, as terms whose gradient in the logits is known in closed form.

With z the student's logits and q its distribution, KL(p || q) has the gradient q - p in z, and cross-entropy with the
next token has q less one at that token. Ways to hold the teacher's p are its forms in teacher_logits.py.

Legend: M positions of a batch, R positions of a chunk, V vocabulary, C hidden size, K tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

IGNORED = -1
"""The label of a position whose next token is not asked for."""

SMALLEST_TAIL = 1e-7
"""The least that a student's tail counts as: what fp32 leaves of 1 less a sum."""


class HeadProducts:
    """A language-model head's products in the dtype of the GPU's matmuls, summed and returned in fp32.

    bf16 logits would be off by up to 1/256 of themselves. On the CPU, which has no such product, all is fp32.
    """

    def __init__(self, weight_VC: Tensor, dtype: torch.dtype) -> None:
        self._wide = weight_VC.device.type == "cpu" or dtype == torch.float32
        self._weight_VC = weight_VC.detach().to(torch.float32 if self._wide else dtype)

    @property
    def vocabulary(self) -> int:
        """V."""
        return len(self._weight_VC)

    def logits(self, hidden_RC: Tensor) -> Tensor:
        """[R, V]."""
        return self._product(hidden_RC, self._weight_VC.T)

    def expected_rows(self, p_RV: Tensor, *, wide: bool = False) -> Tensor:
        """The sum of the head's rows by weights of tokens: [R, C]; wide multiplies in fp32."""
        return p_RV @ self._weight_VC.float() if wide else self._product(p_RV, self._weight_VC)

    def outer(self, p_RV: Tensor, hidden_RC: Tensor) -> Tensor:
        """The sum over positions of weights times hidden states: [V, C]."""
        return self._product(p_RV.T, hidden_RC)

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        if self._wide:
            return left.float() @ right.float()
        dtype = self._weight_VC.dtype
        product: Tensor = torch.mm(left.to(dtype), right.to(dtype), out_dtype=torch.float32)
        return product


class Chunk(NamedTuple):
    """Some positions of a batch as the student sees them."""

    part: slice
    """Which of the batch's positions these are."""
    hidden_RC: Tensor
    log_q_RV: Tensor
    log_sum_R: Tensor
    """logsumexp of the logits."""


class AtTokens(NamedTuple):
    """Numbers at K tokens of each position, all other tokens having none."""

    tokens_RK: Tensor
    values_RK: Tensor


@dataclass(frozen=True)
class ChunkTerm:
    """A term on one chunk: its value and its gradient, which pulls the student's q towards a target.

    In the logits the gradient is q_factor_R1 * q - target_RV + at_tokens; what is None is nothing there. In the hidden
    states it is that times the head, less target_rows_RC: a target that is known after the product already.
    """

    loss: Tensor
    """Summed over the chunk's positions."""
    q_factor_R1: Tensor | float = 1.0
    target_RV: Tensor | None = None
    at_tokens: AtTokens | None = None
    target_rows_RC: Tensor | None = None


class Target(Protocol):
    """What the student is to come close to at the M positions of a batch."""

    def on_chunk(self, chunk: Chunk) -> ChunkTerm:
        """The term on a chunk, each position counting 1."""
        ...


@dataclass(frozen=True)
class Dense:
    """KL from the distributions of a teacher's final hidden states and head, exactly."""

    hidden_MC: Tensor
    head: HeadProducts

    def on_chunk(self, chunk: Chunk) -> ChunkTerm:
        """Two products with the vocabulary's width more than the other targets."""
        log_p_RV = self.head.logits(self.hidden_MC[chunk.part]).log_softmax(-1)
        p_RV = log_p_RV.exp()
        # In place, and no dot product, which on a CPU adds millions of numbers one after another.
        loss = log_p_RV.sub_(chunk.log_q_RV).mul_(p_RV).sum()
        return ChunkTerm(loss, target_RV=p_RV)


@dataclass(frozen=True)
class MeanRow:
    """KL where the student's head is the teacher's and not trained: exact, without the teacher's distribution.

    KL(p || q) = logsumexp(W h) - h . (W^T p) - entropy(p), with the gradient W^T q - W^T p in h.
    """

    rows_MC: Tensor
    """W^T p, the row of the head that the teacher expects, in fp32."""
    entropy_M: Tensor

    def on_chunk(self, chunk: Chunk) -> ChunkTerm:
        """Nothing here has the vocabulary's width."""
        rows_RC = self.rows_MC[chunk.part]
        expected_R = (chunk.hidden_RC.float() * rows_RC).sum(-1)
        loss = (chunk.log_sum_R - expected_R - self.entropy_M[chunk.part]).sum()
        return ChunkTerm(loss, target_rows_RC=rows_RC)


@dataclass(frozen=True)
class TopK:
    """KL of distributions whose tokens outside the teacher's K likeliest are taken as one.

    That is at most the whole KL, and less by the tail's mass times the KL within the tail. A tail pulls all of its
    tokens by the same factor, 1 less the ratio of both tails.
    """

    tokens_MK: Tensor
    log_p_MK: Tensor
    tail_M: Tensor
    """The teacher's mass outside these tokens, fp32."""

    def on_chunk(self, chunk: Chunk) -> ChunkTerm:
        """Works on [R, K]."""
        tokens_RK = self.tokens_MK[chunk.part].long()
        tail_R1 = self.tail_M[chunk.part].float().unsqueeze(-1)
        p_RK = self.log_p_MK[chunk.part].float().exp()
        # Kept in half precision, they no longer sum to what the tail leaves.
        p_RK = p_RK * ((1 - tail_R1) / p_RK.sum(-1, keepdim=True))
        log_q_RK = chunk.log_q_RV.gather(1, tokens_RK)
        q_RK = log_q_RK.exp()
        own_tail_R1 = (1 - q_RK.sum(-1, keepdim=True)).clamp(min=SMALLEST_TAIL)
        loss = (p_RK * (p_RK.clamp(min=1e-38).log() - log_q_RK)).sum()
        loss = loss + torch.special.xlogy(tail_R1, tail_R1 / own_tail_R1).sum()
        ratio_R1 = tail_R1 / own_tail_R1
        inside = AtTokens(tokens_RK, ratio_R1 * q_RK - p_RK)
        return ChunkTerm(loss, q_factor_R1=1 - ratio_R1, at_tokens=inside)


@dataclass(frozen=True)
class NextToken:
    """Cross-entropy with the next token, [M] of token ids or IGNORED."""

    labels_M: Tensor

    def on_chunk(self, chunk: Chunk) -> ChunkTerm:
        """Positions without a label have neither loss nor gradient."""
        labels_R = self.labels_M[chunk.part]
        asked_R1 = (labels_R != IGNORED).float().unsqueeze(-1)
        tokens_R1 = labels_R.clamp(min=0).unsqueeze(-1)
        loss = -(chunk.log_q_RV.gather(1, tokens_R1) * asked_R1).sum()
        return ChunkTerm(loss, q_factor_R1=asked_R1, at_tokens=AtTokens(tokens_R1, -asked_R1))
