"""KL divergence of a student from its teacher on held-out tokens, in bounded memory.

With W the student's language-model head, h its hidden state and p the teacher's distribution,
KL(p || q) = logsumexp(W h) - h . (W^T p) - entropy(p): the teacher's side is one vector of C numbers and
one number a position, so that only the student's logits are computed for each student.

Legend: N sequences, T tokens, M positions, C hidden size, V vocabulary, K students.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..models.teacher import Teacher

LOGIT_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}
"""Most bytes that the fp32 logits of one chunk of positions may take: some three times that is in use."""

FORWARD_TOKENS = 4096
"""Most tokens in one forward over held-out sequences."""


@dataclass(frozen=True)
class Target:
    """The teacher's next-token distributions at M positions, as far as KL and agreement need them."""

    mean_row_MC: Tensor
    """W^T p: the row of the student's head that the teacher's distribution expects, fp32."""
    entropy_M: Tensor
    """Entropy of p in nats, fp32."""
    top1_M: Tensor
    """The teacher's most likely token."""

    def part(self, start: int, stop: int) -> Target:
        """The target at positions [start, stop)."""
        rows = slice(start, stop)
        return Target(self.mean_row_MC[rows], self.entropy_M[rows], self.top1_M[rows])


class TeacherReference:
    """The teacher's side of a divergence on fixed tokens [N, T], as hidden states and not as logits.

    weight_VC is that of another reference of the same teacher, so that a head in fp32 is kept once.
    Raises ValueError where tokens are not [N, T] or empty.
    """

    def __init__(
        self,
        teacher: Teacher,
        tokens_NT: Tensor,
        *,
        batch_tokens: int = FORWARD_TOKENS,
        weight_VC: Tensor | None = None,
    ) -> None:
        if tokens_NT.ndim != 2 or tokens_NT.numel() == 0:
            raise ValueError(f"held-out tokens have shape {tuple(tokens_NT.shape)}, not [N, T]")
        num_rows = max(1, batch_tokens // tokens_NT.shape[1])
        self.batches = torch.split(tokens_NT.long().to(teacher.device), num_rows)
        self.weight_VC = head_weight(teacher.model) if weight_VC is None else weight_VC
        with torch.inference_mode():
            self.hidden_MC = torch.cat([final_hidden(teacher.model, ids) for ids in self.batches])
            self._target = target_of(self.hidden_MC, self.weight_VC, self.weight_VC)

    def target(self, weight_VC: Tensor) -> Target:
        """The target for a student with that head, computed anew only where it is not the teacher's."""
        same = weight_VC.data_ptr() == self.weight_VC.data_ptr()
        if same or torch.equal(weight_VC, self.weight_VC):
            return self._target
        return target_of(self.hidden_MC, self.weight_VC, weight_VC)


def divergence(student: HydraHeadForCausalLM, reference: TeacherReference) -> dict[str, float]:
    """Mean KL(teacher || student) in nats a token (`kl`), and `top1_agreement` in [0, 1].

    The student runs in evaluation mode and lives on the reference's device. A student whose hidden
    states are NaN gives a NaN `kl`.
    """
    kl_sum, agreements, positions = 0.0, 0, 0
    for kl_NT, agrees_NT in _divergences(student, reference):
        kl_sum += float(kl_NT.sum(dtype=torch.float64))
        agreements += int(agrees_NT.sum())
        positions += kl_NT.numel()
    return {"kl": kl_sum / positions, "top1_agreement": agreements / positions}


def divergence_by_sequence(
    student: HydraHeadForCausalLM, reference: TeacherReference
) -> dict[str, Tensor]:
    """The same of each sequence by itself, [N] in fp64."""
    kl, agreement = [], []
    for kl_NT, agrees_NT in _divergences(student, reference):
        kl.append(kl_NT.double().mean(1).cpu())
        agreement.append(agrees_NT.double().mean(1).cpu())
    return {"kl": torch.cat(kl), "top1_agreement": torch.cat(agreement)}


def _divergences(
    student: HydraHeadForCausalLM, reference: TeacherReference
) -> Iterator[tuple[Tensor, Tensor]]:
    """KL in nats and whether the most likely tokens agree, [N, T] a batch."""
    was_training = student.training
    student.train(False)
    start = 0
    with torch.inference_mode():
        weight_VC = head_weight(student)
        target = reference.target(weight_VC)
        for ids in reference.batches:
            part = target.part(start, start + ids.numel())
            kl_1M, top1_1M = divergence_at(part, weight_VC, final_hidden(student, ids).unsqueeze(0))
            yield kl_1M.view(ids.shape), (top1_1M == part.top1_M).view(ids.shape)
            start += ids.numel()
    student.train(was_training)


def final_hidden(
    model: HydraHeadForCausalLM, ids_NT: Tensor, bounds: Tensor | None = None
) -> Tensor:
    """The hidden states that the language-model head reads, position after position, [N * T, C].

    bounds: those of the documents of all rows laid end to end, where each has attention of its own.
    """
    packed = {} if bounds is None else {"cu_seqlens": bounds}
    hidden_NTC: Tensor = model.model(input_ids=ids_NT, use_cache=False, **packed).last_hidden_state
    return hidden_NTC.flatten(0, 1)


def head_weight(model: HydraHeadForCausalLM) -> Tensor:
    """The language-model head in fp32, [V, C]: rounding logits to bf16 would drown a small KL."""
    weight_VC: Tensor = model.lm_head.weight
    return weight_VC.detach().float()


def target_of(hidden_MC: Tensor, weight_VC: Tensor, student_weight_VC: Tensor) -> Target:
    """The target from the teacher's hidden states and head, for students with student_weight_VC."""
    rows, entropies, top1 = [], [], []
    for part_MC in torch.split(hidden_MC.float(), chunk_positions(weight_VC)):
        logits_MV = part_MC @ weight_VC.T
        log_sum_M = logits_MV.logsumexp(-1)
        top1.append(logits_MV.argmax(-1))
        p_MV = logits_MV.sub_(log_sum_M.unsqueeze(-1)).exp_()
        own_row_MC = p_MV @ weight_VC
        # The same expression as in divergence_at, so that the teacher's own divergence is zero.
        entropies.append(log_sum_M - (part_MC * own_row_MC).sum(-1))
        same = student_weight_VC is weight_VC
        rows.append(own_row_MC if same else p_MV @ student_weight_VC)
    return Target(torch.cat(rows), torch.cat(entropies), torch.cat(top1))


def divergence_at(target: Target, weight_VC: Tensor, hidden_KMC: Tensor) -> tuple[Tensor, Tensor]:
    """KL(teacher || student) in nats and the student's most likely token, each [K, M].

    weight_VC is the head that the target was made for; logits are computed a chunk of positions at a time.
    """
    kl, top1 = [], []
    step = chunk_positions(weight_VC)
    for hidden_MC in hidden_KMC:
        for start in range(0, len(hidden_MC), step):
            part = target.part(start, start + step)
            part_MC = hidden_MC[start : start + step].float()
            logits_MV = part_MC @ weight_VC.T
            expected_M = (part_MC * part.mean_row_MC).sum(-1)
            kl.append(logits_MV.logsumexp(-1) - expected_M - part.entropy_M)
            top1.append(logits_MV.argmax(-1))
    shape = hidden_KMC.shape[:2]
    return torch.cat(kl).view(shape), torch.cat(top1).view(shape)


def chunk_positions(weight_VC: Tensor) -> int:
    """Positions whose fp32 logits stay within LOGIT_BYTES, at least one."""
    return max(1, LOGIT_BYTES[weight_VC.device.type] // (4 * len(weight_VC)))
