"""What is read off the last residual stream of swapped models: KL from the teacher, or the answers' NLL.

Legend: K swaps at once, B sequences, T tokens, M positions read, R rows of logits at once, C hidden size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..data.niah import Probe
from ..evaluation.divergence import Target, divergence_at, target_of

Read = Callable[[Tensor], Tensor]
"""From residual streams before the final norm [K, B, T, C] to a number a sequence, fp64 [K, B]."""


@dataclass(frozen=True)
class Kl:
    """Mean KL(teacher || model) over the tokens of each sequence, in nats; logits of `step` positions at a time."""

    targets: list[Target]
    norm: nn.Module
    weight_VC: Tensor
    step: int

    @classmethod
    def of(cls, hidden_MC: Tensor, norm: nn.Module, weight_VC: Tensor, step: int) -> Kl:
        """From the teacher's final normed hidden states, for models with the fp32 head weight_VC and that norm."""
        parts = hidden_MC.split(step)
        return cls([target_of(part, weight_VC, weight_VC) for part in parts], norm, weight_VC, step)

    def __call__(self, hidden_KBTC: Tensor) -> Tensor:
        """[K, B, T, C] to [K, B]."""
        parts = hidden_KBTC.flatten(1, 2).split(self.step, dim=1)
        kl = [
            divergence_at(target, self.weight_VC, self.norm(part_KMC))[0]
            for target, part_KMC in zip(self.targets, parts, strict=True)
        ]
        return torch.cat(kl, dim=1).view(hidden_KBTC.shape[:3]).mean(-1, dtype=torch.float64)


@dataclass(frozen=True)
class AnswerNll:
    """Mean NLL of each sequence's answer tokens, in nats; only the positions that predict them reach the head."""

    rows_M: Tensor
    columns_M: Tensor
    answers_M: Tensor
    share_M: Tensor
    """One over the tokens of the answer."""
    norm: nn.Module
    weight_VC: Tensor
    step: int

    @classmethod
    def of(
        cls, probes: Sequence[Probe], norm: nn.Module, weight_VC: Tensor, step: int
    ) -> AnswerNll:
        """For the probes' clean rows, padded on the right."""
        places = [
            (row, len(probe.prompt) - 1 + j, token, 1 / len(probe.answer))
            for row, probe in enumerate(probes)
            for j, token in enumerate(probe.answer)
        ]
        rows, columns, answers, shares = zip(*places, strict=True)
        device = weight_VC.device
        return cls(
            torch.tensor(rows, device=device),
            torch.tensor(columns, device=device),
            torch.tensor(answers, device=device),
            torch.tensor(shares, dtype=torch.float64, device=device),
            norm,
            weight_VC,
            step,
        )

    def __call__(self, hidden_KBTC: Tensor) -> Tensor:
        """[K, B, T, C] to [K, B]."""
        count, batch = hidden_KBTC.shape[:2]
        hidden_KMC = self.norm(hidden_KBTC[:, self.rows_M, self.columns_M]).float()
        pieces = zip(
            hidden_KMC.flatten(0, 1).split(self.step),
            self.answers_M.repeat(count).split(self.step),
            strict=True,
        )
        nll = [
            F.cross_entropy(part_RC @ self.weight_VC.T, answers_R, reduction="none")
            for part_RC, answers_R in pieces
        ]
        nll_KM = torch.cat(nll).view(count, -1) * self.share_M
        return nll_KM.new_zeros(count, batch).index_add_(1, self.rows_M, nll_KM)
