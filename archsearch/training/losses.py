"""A student's loss on logits with its gradient in closed form, a chunk of positions at a time.

No graph is kept over the vocabulary, and of a chunk's logits there are no more than one copy a distribution. targets.py
has the terms.

Legend: M positions, R positions of a chunk, V vocabulary, C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .loop import full_precision
from .targets import IGNORED, Chunk, ChunkTerm, HeadProducts, Target

LOGIT_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}
"""Most bytes that the fp32 logits of one chunk of positions may take, by device; about four times that is in use."""


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
    positions, device, weight_VC = len(student_MC), student_MC.device, student_head.weight
    with torch.no_grad(), full_precision(device):
        head = HeadProducts(weight_VC, dtype)
        sums = _Sums(student_MC, weight_VC)
        for part in _parts(positions, head.vocabulary, device):
            sums.add(_chunk(part, student_MC, head), terms, head)
        grad_MC = sums.grad_MC.mul_(1 / positions)
        if extra_grad_MC is not None:
            grad_MC += extra_grad_MC
        if sums.grad_VC is not None:
            _add_gradient(weight_VC, sums.grad_VC / positions)
    with full_precision(device):
        student_MC.backward(grad_MC.to(student_MC.dtype))
    return sums.loss / positions


class _Sums:
    """The loss, and its gradients in the hidden states and, where it is trained, in the head; summed over positions."""

    def __init__(self, student_MC: Tensor, weight_VC: Tensor) -> None:
        self.loss = torch.zeros((), device=student_MC.device)
        self.grad_MC = torch.empty(student_MC.shape, dtype=torch.float32, device=student_MC.device)
        self.grad_VC: Tensor | None = None
        if weight_VC.requires_grad:
            self.grad_VC = torch.zeros_like(weight_VC, dtype=torch.float32)

    def add(self, chunk: Chunk, terms: Sequence[Weighted], head: HeadProducts) -> None:
        """Counts in a chunk, whose log_q is overwritten."""
        found = [(term.target.on_chunk(chunk), term.weight) for term in terms]
        for term, weight in found:
            self.loss += weight * term.loss
        grad_RV = _gradient_in_logits(chunk.log_q_RV, found)
        grad_RC = head.expected_rows(grad_RV)
        for term, weight in found:
            if term.target_rows_RC is not None:
                grad_RC.sub_(term.target_rows_RC, alpha=weight)
        self.grad_MC[chunk.part] = grad_RC
        if self.grad_VC is not None:
            self.grad_VC += head.outer(grad_RV, chunk.hidden_RC)


def hidden_term(student_MC: Tensor, teacher_MC: Tensor, weight: float) -> tuple[Tensor, Tensor]:
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


def _parts(positions: int, vocabulary: int, device: torch.device) -> Iterator[slice]:
    """Positions whose logits fit into LOGIT_BYTES, at least one at a time."""
    rows = max(1, LOGIT_BYTES[device.type] // (4 * vocabulary))
    return (slice(start, start + rows) for start in range(0, positions, rows))


def _chunk(part: slice, student_MC: Tensor, head: HeadProducts) -> Chunk:
    hidden_RC = student_MC[part].detach()
    logits_RV = head.logits(hidden_RC)
    log_q_RV = logits_RV.log_softmax(-1)
    return Chunk(part, hidden_RC, log_q_RV, logits_RV[:, 0] - log_q_RV[:, 0])


def _gradient_in_logits(log_q_RV: Tensor, terms: Sequence[tuple[ChunkTerm, float]]) -> Tensor:
    """The weighted terms' gradient, written over log_q: there is no room for a second tensor of the vocabulary's width."""
    grad_RV = log_q_RV.exp_()
    q_factor = sum(weight * term.q_factor_R1 for term, weight in terms)
    if isinstance(q_factor, Tensor) or q_factor != 1:
        grad_RV.mul_(q_factor)
    for term, weight in terms:
        if term.target_RV is not None:
            grad_RV.sub_(term.target_RV, alpha=weight)
        if term.at_tokens is not None:
            tokens_RK, values_RK = term.at_tokens
            grad_RV.scatter_add_(1, tokens_RK, weight * values_RK)
    return grad_RV


def _add_gradient(weight: Tensor, gradient: Tensor) -> None:
    gradient = gradient.to(weight.dtype)
    weight.grad = gradient if weight.grad is None else weight.grad + gradient
