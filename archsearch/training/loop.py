"""The one training loop: AdamW, warm-up, cosine decay, clipping, and checkpoints that resume exactly.

Alignment and distillation differ in the function that turns a batch into gradients, and in nothing else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..errors import ArchsearchError
from ..progress import Progress, ignore_progress

BatchSource = Callable[[int], Iterator[Tensor]]
"""Gives the batches of token ids [B, T] from a step on, without end; the same ones at every call."""

LossStep = Callable[[Tensor], Tensor]
"""Adds a batch's gradients to the parameters and returns its detached scalar loss, on the device."""

BETAS = (0.9, 0.95)
LOG_ROWS = 50
"""About how often a run reads its loss: on a GPU each time waits for all queued work."""


class NonFiniteLoss(ArchsearchError):
    """A loss or gradient became NaN or infinite."""


@dataclass(frozen=True)
class Plan:
    """How long and at which rates to train; the rate ends at final_share of learning_rate."""

    steps: int
    learning_rate: float
    warmup_steps: int = 0
    final_share: float = 0.01
    clip_norm: float = 1.0

    def rate(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, then half a cosine."""
        warmup = min(self.warmup_steps, self.steps // 2)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        done = (step - warmup) / max(1, self.steps - warmup)
        share = self.final_share + (1 - self.final_share) * (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * share


@dataclass
class TrainingState:
    """All that a step changes: the parameters, their AdamW moments, the steps done, the losses read.

    clip_groups are clipped to the plan's norm each on its own; together they hold every parameter once.
    """

    parameters: dict[str, nn.Parameter]
    clip_groups: Sequence[Sequence[nn.Parameter]] = ()
    step: int = 0
    losses: list[tuple[int, float]] = field(default_factory=list)
    """(steps done, mean loss since the row before)."""
    optimizer: torch.optim.AdamW = field(init=False)

    def __post_init__(self) -> None:
        if not self.parameters:
            raise ValueError("there is no parameter to train")
        self.clip_groups = self.clip_groups or [list(self.parameters.values())]
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=0.0, betas=BETAS, weight_decay=0.0, fused=True
        )


SaveState = Callable[[TrainingState], None]


def train(
    state: TrainingState,
    plan: Plan,
    loss_step: LossStep,
    batches: BatchSource,
    *,
    save: SaveState | None = None,
    save_seconds: float = math.inf,
    progress: Progress = ignore_progress,
) -> None:
    """Trains from state.step to plan.steps; calls save about every save_seconds.

    A state that was saved and loaded goes on to the same result as one that was never interrupted.
    Progress counts steps. Raises NonFiniteLoss, before anything non-finite is saved.
    """
    watch = _LossWatch(state, every=max(1, plan.steps // LOG_ROWS))
    stream = batches(state.step)
    saved = time.monotonic()
    progress(state.step, plan.steps)
    while state.step < plan.steps:
        for group in state.optimizer.param_groups:
            group["lr"] = plan.rate(state.step)
        state.optimizer.zero_grad(set_to_none=True)
        loss = loss_step(next(stream))
        norms = [_clip(group, plan.clip_norm) for group in state.clip_groups]
        state.optimizer.step()
        state.step += 1
        watch.add(loss, norms)
        if watch.due(plan.steps):
            watch.read()
            progress(state.step, plan.steps)
        if save is not None and time.monotonic() - saved >= save_seconds:
            # The losses since the last row are lost to the log of a resumed run, not to its weights.
            watch.check()
            save(state)
            saved = time.monotonic()


def _clip(group: Sequence[nn.Parameter], norm: float) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(group, norm, foreach=True)


class _LossWatch:
    """Sums losses on the device and reads them rarely, since every reading waits for the device."""

    def __init__(self, state: TrainingState, every: int) -> None:
        self._state = state
        self._every = every
        self._sum: Tensor | None = None
        self._steps = 0

    def add(self, loss: Tensor, norms: Sequence[Tensor]) -> None:
        # Zero times a norm is zero, or NaN where the norm is not finite.
        row = loss.float() + 0.0 * torch.stack(list(norms)).sum()
        self._sum = row if self._sum is None else self._sum + row
        self._steps += 1

    def due(self, steps: int) -> bool:
        return self._state.step % self._every == 0 or self._state.step == steps

    def check(self) -> float:
        """Mean loss since the last row. Raises NonFiniteLoss."""
        mean = float(self._sum) / self._steps if self._sum is not None else 0.0
        if not math.isfinite(mean):
            first = self._state.step - self._steps + 1
            raise NonFiniteLoss(
                f"the loss or its gradient is not finite between steps {first} and "
                f"{self._state.step}; a lower learning_rate may help"
            )
        return mean

    def read(self) -> None:
        self._state.losses.append((self._state.step, self.check()))
        self._sum, self._steps = None, 0


def mixed_precision(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    """bf16 matmuls on a GPU, and wherever the frozen weights are bf16; plain fp32 otherwise.

    Trained weights stay fp32 in either case.
    """
    enabled = device.type == "cuda" or dtype == torch.bfloat16
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)


def full_precision(device: torch.device) -> AbstractContextManager[None]:
    """Suspends mixed_precision: for losses, and for backward passes, which follow their forward's dtypes."""
    return torch.autocast(device.type, enabled=False)
