"""Several supernets aligned side by side, each by its own recipe, in one pass of the teacher a batch.

Shapes: N sequences, T tokens, L layers, H query heads.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..config import SupernetConfig
from ..models.supernet import Supernet
from ..models.teacher import Teacher
from ..trainconfig import FORK_SHARE
from ..training.align import CALIBRATION_TOKENS
from ..training.alignment_loss import BankLoss, add_gradients
from ..training.calibrate import calibrate
from ..training.loop import BatchSource, Plan, TrainingState
from ..training.replay import Replay
from ..training.twin_error import measure_banks, output_roots


@dataclass
class Bank:
    """One recipe's twins and their training."""

    name: str
    config: SupernetConfig
    supernet: Supernet
    state: TrainingState
    loss: BankLoss


class Banks:
    """Banks of one batch size. layers are those that are trained; the others stay as calibrated."""

    def __init__(
        self,
        teacher: Teacher,
        configs: dict[str, SupernetConfig],
        batches: BatchSource,
        layers: Sequence[int],
        *,
        seed: int,
        replay: bool,
    ) -> None:
        """Calibrates a supernet for each config by its name, all on the same tokens."""
        self.teacher, self.layers = teacher, tuple(layers)
        self._batches = batches
        first_BT = next(batches(0))
        self.batch_tokens = first_BT.numel()
        sample_NT = first_BT[: max(1, CALIBRATION_TOKENS // first_BT.shape[1])]
        supernets = [_calibrated(teacher, c, sample_NT, layers, seed) for c in configs.values()]
        found = measure_banks(teacher, supernets, sample_NT, layers=layers)
        roots_LHDD = output_roots(teacher.model)
        self.banks = [
            Bank(
                name,
                config,
                supernet,
                _state(supernet, self.layers),
                BankLoss(supernet, roots_LHDD, errors.variance_LH),
            )
            for (name, config), supernet, errors in zip(
                configs.items(), supernets, found, strict=True
            )
        ]
        on_gpu = replay and teacher.device.type == "cuda"
        self._replay = (
            Replay([p for bank in self.banks for p in _trained(bank)]) if on_gpu else None
        )
        self.step = 0
        self._stream: Iterator[Tensor] = batches(0)
        self.step_seconds = 0.0
        """Mean of the steps in the last call of advance."""

    def plans(self, steps: int, warmup_steps: int) -> list[Plan]:
        """A run of that many steps for each bank, whose rate falls over the last FORK_SHARE of them."""
        return [
            Plan(
                steps=steps,
                learning_rate=bank.config.learning_rate,
                warmup_steps=min(bank.config.warmup_steps, warmup_steps),
                decay_steps=round(FORK_SHARE * steps),
            )
            for bank in self.banks
        ]

    def advance(self, plans: Sequence[Plan], stop: int) -> None:
        """Trains up to step `stop`; on a GPU it waits for the last one."""
        started, first = time.monotonic(), self.step
        losses = [bank.loss for bank in self.banks]
        while self.step < stop:
            ids_BT = next(self._stream)
            add_gradients(self.teacher, losses, ids_BT, self.layers, self._replay)
            for bank, plan in zip(self.banks, plans, strict=True):
                bank.state.optimizer.update(plan.rate(self.step), plan.clip_norm)
            self.step += 1
        if self.teacher.device.type == "cuda":
            torch.cuda.synchronize(self.teacher.device)
        if self.step > first:
            self.step_seconds = (time.monotonic() - started) / (self.step - first)

    def fork(self, plans: Sequence[Plan], stop: int) -> None:
        """advance, after which `back` returns to where it began."""
        self._trunk = self.step, [bank.state.snapshot() for bank in self.banks]
        self.advance(plans, stop)

    def back(self) -> None:
        """Goes back to the last fork."""
        self.step, snapshots = self._trunk
        for bank, snapshot in zip(self.banks, snapshots, strict=True):
            bank.state.restore(snapshot)
        self._stream = self._batches(self.step)

    def errors(self, tokens_NT: Tensor) -> list[Tensor]:
        """Errors over variance of each bank's trained layers, [n, H] on the CPU."""
        supernets = [bank.supernet for bank in self.banks]
        found = measure_banks(self.teacher, supernets, tokens_NT, layers=self.layers)
        return [errors.relative_LH[list(self.layers)].cpu() for errors in found]


def _calibrated(
    teacher: Teacher,
    config: SupernetConfig,
    sample_NT: Tensor,
    layers: Sequence[int],
    seed: int,
) -> Supernet:
    supernet = Supernet.migrated(teacher, config.gdn)
    calibrate(teacher, supernet, sample_NT, config.init, seed=seed, layers=layers)
    return supernet


def _state(supernet: Supernet, layers: Sequence[int]) -> TrainingState:
    twins = [supernet.twins[layer].requires_grad_(True) for layer in layers]
    trained = {name: p for name, p in supernet.named_parameters() if p.requires_grad}
    return TrainingState(trained, [list(twin.parameters()) for twin in twins])


def _trained(bank: Bank) -> list[nn.Parameter]:
    return list(bank.state.parameters.values())
