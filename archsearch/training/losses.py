"""Losses on logits with their gradients in closed form, a chunk of positions at a time.

With z the student's logits and q its distribution, KL(p || q) has the gradient q - p in z, and cross-entropy with the
next token has q less one at that token: no graph is kept over the vocabulary, and of a chunk's logits there are no
more than one copy a distribution. What a term needs of the teacher is its Target, by any of the ways of TARGETS in
teacher_logits.py.

Legend: M positions, R positions of a chunk, V vocabulary, C hidden size, K tokens kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .loop import full_precision

LOGIT_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}
"""Most bytes that the fp32 logits of one chunk of positions may take, by device; about four times that is in use."""

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
    hidden_RC: Tensor
    log_q_RV: Tensor
    log_sum_R: Tensor
    """logsumexp of the logits."""


@dataclass(frozen=True)
class Pull:
    """A term on one chunk: its sum over positions, and its gradient in the logits, scale_R1 * q - dense_RV + sparse.

    rows_RC is the part of the gradient that is known in the hidden states already, to be subtracted there.
    """

    loss: Tensor
    scale_R1: Tensor | float = 1.0
    dense_RV: Tensor | None = None
    sparse: tuple[Tensor, Tensor] | None = None
    """Tokens [R, K] and what is added at them [R, K]."""
    rows_RC: Tensor | None = None


class Target(Protocol):
    """What the student is to come close to at the M positions of a batch."""

    def pull(self, chunk: Chunk) -> Pull:
        """The term on a chunk, each position counting 1."""
        ...


@dataclass(frozen=True)
class Dense:
    """KL from the distributions of a teacher's final hidden states and head, exactly."""

    hidden_MC: Tensor
    head: HeadProducts

    def pull(self, chunk: Chunk) -> Pull:
        """Two products with the vocabulary's width more than the other targets."""
        log_p_RV = self.head.logits(self.hidden_MC[chunk.part]).log_softmax(-1)
        p_RV = log_p_RV.exp()
        # In place, and no dot product, which on a CPU adds millions of numbers one after another.
        loss = log_p_RV.sub_(chunk.log_q_RV).mul_(p_RV).sum()
        return Pull(loss, dense_RV=p_RV)


@dataclass(frozen=True)
class MeanRow:
    """KL where the student's head is the teacher's and not trained: exact, without the teacher's distribution.

    KL(p || q) = logsumexp(W h) - h . (W^T p) - entropy(p), with the gradient W^T q - W^T p in h.
    """

    rows_MC: Tensor
    """W^T p, the row of the head that the teacher expects, in fp32."""
    entropy_M: Tensor

    def pull(self, chunk: Chunk) -> Pull:
        """Nothing here has the vocabulary's width."""
        rows_RC = self.rows_MC[chunk.part]
        expected_R = (chunk.hidden_RC.float() * rows_RC).sum(-1)
        loss = (chunk.log_sum_R - expected_R - self.entropy_M[chunk.part]).sum()
        return Pull(loss, rows_RC=rows_RC)


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

    def pull(self, chunk: Chunk) -> Pull:
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
        return Pull(loss, scale_R1=1 - ratio_R1, sparse=(tokens_RK, ratio_R1 * q_RK - p_RK))


@dataclass(frozen=True)
class NextToken:
    """Cross-entropy with the next token, [M] of token ids or IGNORED."""

    labels_M: Tensor

    def pull(self, chunk: Chunk) -> Pull:
        """Positions without a label have neither loss nor gradient."""
        labels_R = self.labels_M[chunk.part]
        asked_R1 = (labels_R != IGNORED).float().unsqueeze(-1)
        tokens_R1 = labels_R.clamp(min=0).unsqueeze(-1)
        loss = -(chunk.log_q_RV.gather(1, tokens_R1) * asked_R1).sum()
        return Pull(loss, scale_R1=asked_R1, sparse=(tokens_R1, -asked_R1))


class Weighted(NamedTuple):
    """A target and what each of its positions counts in the sum of all terms."""

    target: Target
    weight: float


def backward_logits(
    student_MC: Tensor,
    student_head: nn.Linear,
    terms: Sequence[Weighted],
    dtype: torch.dtype,
    extra_grad_MC: Tensor | None = None,
) -> Tensor:
    """The weighted sum of terms over M positions, divided by M, its gradients added to all that asks for them.

    First each chunk's gradient down to the hidden states, then one backward through the student, with
    extra_grad_MC added. dtype is that of products. Detached, on the device.
    """
    positions, device = len(student_MC), student_MC.device
    with torch.no_grad(), full_precision(device):
        head = HeadProducts(student_head.weight, dtype)
        total = torch.zeros((), device=device)
        grad_MC = torch.empty(student_MC.shape, dtype=torch.float32, device=device)
        trained = student_head.weight.requires_grad
        grad_VC = torch.zeros_like(student_head.weight if trained else total, dtype=torch.float32)
        rows = max(1, LOGIT_BYTES[device.type] // (4 * head.vocabulary))
        for start in range(0, positions, rows):
            chunk = _chunk(slice(start, start + rows), student_MC, head)
            pulls = [(term.target.pull(chunk), term.weight) for term in terms]
            for pull, weight in pulls:
                total += weight * pull.loss
            pulled_RV = _pulled(chunk.log_q_RV, pulls)
            grad_RC = head.expected_rows(pulled_RV)
            for pull, weight in pulls:
                if pull.rows_RC is not None:
                    grad_RC.sub_(pull.rows_RC, alpha=weight)
            grad_MC[chunk.part] = grad_RC
            if trained:
                grad_VC += head.outer(pulled_RV, chunk.hidden_RC)
        grad_MC *= 1 / positions
        if extra_grad_MC is not None:
            grad_MC += extra_grad_MC
        if trained:
            _add_gradient(student_head.weight, grad_VC / positions)
    with full_precision(device):
        student_MC.backward(grad_MC.to(student_MC.dtype))
    return total / positions


def pull_hidden(student_MC: Tensor, teacher_MC: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """weight times the squared error of final hidden states over the teacher's mean square, and its gradient [M, C]."""
    with torch.no_grad():
        teacher_MC = teacher_MC.float()
        error_MC = student_MC.float() - teacher_MC
        factor = weight / teacher_MC.square().sum().clamp(min=1e-30)
        return error_MC.square().sum() * factor, error_MC * (2 * factor)


def next_tokens(ids_BT: Tensor, starts_BT: Tensor | None = None) -> Tensor:
    """The label of each position, flattened to [B * T]: the next token of its row, IGNORED at a row's end.

    starts_BT: where a document starts; its first token is not asked of the one before.
    """
    labels_BT = F.pad(ids_BT[:, 1:], (0, 1), value=IGNORED)
    if starts_BT is not None:
        labels_BT = labels_BT.masked_fill(F.pad(starts_BT[:, 1:], (0, 1)), IGNORED)
    return labels_BT.flatten()


def _chunk(part: slice, student_MC: Tensor, head: HeadProducts) -> Chunk:
    hidden_RC = student_MC[part].detach()
    logits_RV = head.logits(hidden_RC)
    log_q_RV = logits_RV.log_softmax(-1)
    return Chunk(part, hidden_RC, log_q_RV, logits_RV[:, 0] - log_q_RV[:, 0])


def _pulled(log_q_RV: Tensor, pulls: Sequence[tuple[Pull, float]]) -> Tensor:
    """The gradient in the logits, in place of log_q."""
    q_RV = log_q_RV.exp_()
    scale = sum(weight * pull.scale_R1 for pull, weight in pulls)
    if isinstance(scale, Tensor) or scale != 1:
        q_RV.mul_(scale)
    for pull, weight in pulls:
        if pull.dense_RV is not None:
            q_RV.sub_(pull.dense_RV, alpha=weight)
        if pull.sparse is not None:
            tokens_RK, values_RK = pull.sparse
            q_RV.scatter_add_(1, tokens_RK, weight * values_RK)
    return q_RV


def _add_gradient(weight: Tensor, gradient: Tensor) -> None:
    gradient = gradient.to(weight.dtype)
    weight.grad = gradient if weight.grad is None else weight.grad + gradient
