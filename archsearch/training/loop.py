"""The one training loop: AdamW on fp32 masters, warm-up, a final fall of the rate, clipping, checkpoints that resume exactly.

Alignment, distillation and long-context tuning differ in the function that turns a batch into gradients, and in
nothing else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArchsearchError
from ..progress import Progress, ignore_progress
from .masters import MasterOptimizer, Masters

BatchSource = Callable[[int], Iterator[Tensor]]
"""Gives the batches of token ids [B, T], on the CPU, from a step on, without end; the same ones at every call."""

Source = Callable[[int], Iterator[Any]]
"""A BatchSource whose batches may hold more than ids."""

LossStep = Callable[[Any], Tensor]
"""Adds a batch's gradients to the parameters and returns its detached scalar loss, on the device."""

StepHook = Callable[[int, int], None]
"""Called before each step, and after the last one, with (steps done, steps in all): for what changes in the model itself."""

LOG_ROWS = 50
"""About how many losses a run keeps."""
READ_SECONDS = 0.5
"""Least time between two readings of losses off a GPU: each one waits for all queued work."""


class NonFiniteLoss(ArchsearchError):
    """A loss or gradient became NaN or infinite."""


@dataclass(frozen=True)
class Plan:
    """Which steps to take at which rates: linear warm-up, constant, then half a cosine down to final_share.

    start is the step at which this run began, and warms up: those before it were another's. steps counts from 0.
    """

    steps: int
    learning_rate: float
    warmup_steps: int = 0
    final_share: float = 0.01
    clip_norm: float = 1.0
    decay_steps: int | None = None
    """The last steps, over which the rate falls; all after the warm-up where not given, 0 for none."""
    start: int = 0

    def rate(self, step: int) -> float:
        """Learning rate of a step."""
        warm = self.start + min(self.warmup_steps, (self.steps - self.start) // 2)
        if step < warm:
            return self.learning_rate * (step - self.start + 1) / (warm - self.start)
        # The last step at the full rate, from which it falls.
        top = warm if self.decay_steps is None else max(warm, self.steps - self.decay_steps - 1)
        if step <= top or self.decay_steps == 0:
            return self.learning_rate
        done = (step - top) / (self.steps - top)
        share = self.final_share + (1 - self.final_share) * (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * share


@dataclass(frozen=True)
class Snapshot:
    """A TrainingState at one moment, copied; tensors are flat, one a clip group."""

    step: int
    num_losses: int
    masters: list[Tensor]
    moments: list[dict[str, Tensor]]
    updates: list[int]


@dataclass
class TrainingState:
    """All that a step changes: the parameters with their fp32 masters, AdamW's moments, the steps done, the losses read.

    Nobody else may change the parameters while train runs. clip_groups are clipped to the plan's norm each on its own;
    together they hold every parameter once.
    """

    parameters: dict[str, nn.Parameter]
    clip_groups: Sequence[Sequence[nn.Parameter]] = ()
    step: int = 0
    losses: list[tuple[int, float]] = field(default_factory=list)
    """(steps done, mean loss since the row before)."""
    optimizer: MasterOptimizer = field(init=False)

    def __post_init__(self) -> None:
        if not self.parameters:
            raise ValueError("there is no parameter to train")
        groups = self.clip_groups or [list(self.parameters.values())]
        self.optimizer = MasterOptimizer([Masters(group) for group in groups])

    def snapshot(self) -> Snapshot:
        """A copy to restore."""
        optimizer = self.optimizer
        moments = [optimizer.moments(group) for group in optimizer.groups]
        return Snapshot(
            self.step,
            len(self.losses),
            [group.flat.detach().clone() for group in optimizer.groups],
            [{name: value.clone() for name, value in found.items()} for found in moments],
            [optimizer.updates(group) for group in optimizer.groups],
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Goes back to a snapshot of this state."""
        self.step = snapshot.step
        del self.losses[snapshot.num_losses :]
        for group, flat, moments, updates in zip(
            self.optimizer.groups,
            snapshot.masters,
            snapshot.moments,
            snapshot.updates,
            strict=True,
        ):
            group.flat.data.copy_(flat)
            self.optimizer.restore(group, moments, updates)
            group.give_values()


SaveState = Callable[[TrainingState], None]


def train(
    state: TrainingState,
    plan: Plan,
    loss_step: LossStep,
    batches: Source,
    *,
    until: int | None = None,
    save: SaveState | None = None,
    save_seconds: float = math.inf,
    before_step: StepHook | None = None,
    progress: Progress = ignore_progress,
) -> None:
    """Trains from state.step to plan.steps, or to `until` before that; calls save about every save_seconds.

    A state that was saved and loaded goes on to the same result as one that was never interrupted.
    Progress counts steps, on a GPU as they are queued. Raises NonFiniteLoss, before anything non-finite is saved.
    """
    last = plan.steps if until is None else min(until, plan.steps)
    watch = _LossWatch(state, every=max(1, plan.steps // LOG_ROWS))
    for group in state.optimizer.groups:
        group.take_values()
    stream = batches(state.step)
    saved = time.monotonic()
    progress(state.step, plan.steps)
    while state.step < last:
        if before_step is not None:
            before_step(state.step, plan.steps)
        loss = loss_step(next(stream))
        norms_G = state.optimizer.update(plan.rate(state.step), plan.clip_norm)
        state.step += 1
        watch.add(loss, norms_G)
        if watch.due(last):
            watch.end_row()
            progress(state.step, plan.steps)
        if save is not None and time.monotonic() - saved >= save_seconds:
            # The losses since the last row are lost to the log of a resumed run, not to its weights.
            watch.check()
            save(state)
            saved = time.monotonic()
    if before_step is not None:
        before_step(state.step, plan.steps)
    watch.check()


class _LossWatch:
    """Sums losses on the device and reads them rarely, since every reading waits for the device."""

    def __init__(self, state: TrainingState, every: int) -> None:
        self._state = state
        self._every = every
        self._sum: Tensor | None = None
        self._first = state.step + 1
        self._rows: list[tuple[int, int, Tensor]] = []
        self._read = time.monotonic()

    def add(self, loss: Tensor, norms_G: Tensor) -> None:
        # Zero times a norm is zero, or NaN where the norm is not finite.
        row = loss.float() + 0.0 * norms_G.sum()
        self._sum = row if self._sum is None else self._sum + row

    def due(self, last: int) -> bool:
        return self._state.step % self._every == 0 or self._state.step == last

    def end_row(self) -> None:
        assert self._sum is not None
        self._rows.append((self._first, self._state.step, self._sum))
        waits = self._sum.device.type != "cpu"
        self._sum, self._first = None, self._state.step + 1
        if not waits or time.monotonic() - self._read >= READ_SECONDS:
            self.check()

    def check(self) -> None:
        """Reads what there is into the state's losses. Raises NonFiniteLoss."""
        rows = list(self._rows)
        if self._sum is not None:
            rows.append((self._first, self._state.step, self._sum))
        sums = torch.stack([total for _, _, total in rows]).tolist() if rows else []
        for (first, last, _), total in zip(rows, sums, strict=True):
            if not math.isfinite(total):
                raise NonFiniteLoss(
                    f"the loss or its gradient is not finite between steps {first} and {last}; "
                    "a lower learning_rate may help"
                )
        done = zip(self._rows, sums, strict=False)
        self._state.losses += [
            (last, total / (last - first + 1)) for (first, last, _), total in done
        ]
        self._rows.clear()
        self._read = time.monotonic()


def mixed_precision(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    """bf16 matmuls on a GPU, and wherever the frozen weights are bf16; plain fp32 otherwise.

    For fp32 weights that are trained beside frozen ones of that dtype.
    """
    return torch.autocast(
        device.type, torch.bfloat16, enabled=product_dtype(device, dtype) == torch.bfloat16
    )


def native_precision(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    """For a model all of whose weights are of one dtype: as it is, but an fp32 one multiplies in bf16 on a GPU."""
    enabled = device.type == "cuda" and dtype == torch.float32
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """What a model of that dtype is multiplied in."""
    return torch.bfloat16 if device.type == "cuda" else dtype


def full_precision(device: torch.device) -> AbstractContextManager[None]:
    """Suspends mixed_precision: for losses, and for backward passes, which follow their forward's dtypes."""
    return torch.autocast(device.type, enabled=False)
