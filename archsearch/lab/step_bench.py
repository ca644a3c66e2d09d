"""What the figures of training steps share: model and config, clocks, random batches, a limit of time for each figure."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..config import RunConfig
from ..headmap import HeadMap
from ..models.cut import cut
from ..models.supernet import Supernet
from ..models.teacher import Teacher
from ..training.loop import BatchSource
from .kernel_timing import limit
from .records import LabBook

WARMUP_STEPS = 2
FULL_HEADS_A_LAYER = 2
LEAST_SECONDS = 3.0
"""With less than that left, no other figure is begun."""


class Clock:
    """A progress callback that takes the time at the first steps and at the last, when all queued work is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.moments: dict[int, float] = {}

    def __call__(self, done: int, total: int) -> None:
        if done <= 1 + WARMUP_STEPS or done == total:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.moments[done] = time.perf_counter()

    @property
    def first_seconds(self) -> float:
        """The first step, compilation included."""
        return self.moments[1] - self.moments[0]

    @property
    def step_seconds(self) -> float:
        """Mean of the steps after the warm-up, which follow each other without a wait."""
        warm, last = 1 + WARMUP_STEPS, max(self.moments)
        return (self.moments[last] - self.moments[warm]) / (last - warm)


class Timing(NamedTuple):
    """Of steps of batch tokens: their times, FLOPs a token, and the peak of GPU memory in bytes (0 without a GPU)."""

    clock: Clock
    flops: float
    batch_tokens: int
    peak_bytes: int

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.batch_tokens / self.clock.step_seconds


def random_batches(rows: int, tokens: int, vocabulary: int, period: int) -> BatchSource:
    """Batches [rows, tokens] of random ids, the same at every call; after `period` of them they come again."""

    def batches(step: int) -> Iterator[Tensor]:
        while True:
            generator = torch.Generator().manual_seed(step % period)
            yield torch.randint(vocabulary, (rows, tokens), generator=generator)
            step += 1

    return batches


@dataclass
class Bench:
    """What all figures of one call share."""

    config: RunConfig
    teacher: Teacher
    book: LabBook
    peak_flops: float
    steps: int
    deadline: float
    figures: Path
    rates: dict[str, float] = field(default_factory=dict)
    """Tokens a second of "alignment" and of the cases, of the first set of backends."""

    def supernet(self) -> Supernet:
        """Untrained twins."""
        return Supernet.migrated(self.teacher, self.config.supernet.gdn)

    def student(self) -> HydraHeadForCausalLM:
        """A candidate with FULL_HEADS_A_LAYER random heads of each layer."""
        rng, shape = random.Random(0), self.teacher.shape
        count = min(FULL_HEADS_A_LAYER, shape.num_heads - 1)
        kept = [
            (layer, head)
            for layer in range(shape.num_layers)
            for head in rng.sample(range(shape.num_heads), count)
        ]
        head_map = HeadMap.from_full_heads(shape, kept)
        return cut(self.teacher, self.supernet(), head_map, copy=True)

    def batches(self, batch_tokens: int) -> BatchSource:
        """Batches of the config's sequence length; each comes again after the warm-up."""
        tokens = self.config.data.sequence_length
        vocabulary = self.teacher.model.config.vocab_size
        return random_batches(max(1, batch_tokens // tokens), tokens, vocabulary, WARMUP_STEPS)

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def add(self, metric: str, value: float, unit: str, **facts: Any) -> None:
        """Records a figure of this config and says it."""
        self.book.add(f"{self.config.name}: {metric}", value, unit, None, **facts)
        print(f"{metric}: {value:,.4g} {unit}", flush=True)


def attempt(bench: Bench, name: str, most: float, work: Callable[[], None]) -> None:
    """One figure within its share of the time; an error is recorded, since the other figures are worth having."""
    seconds = min(most, bench.left())
    try:
        if seconds < LEAST_SECONDS:
            raise TimeoutError("no time left")
        with limit(seconds):
            work()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"[:400]
        print(f"{name}: {text}", flush=True)
        bench.book.add(f"{bench.config.name}: {name}: none", 0.0, "", None, text=text)
    bench.book.write(bench.figures)


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def done_by(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
