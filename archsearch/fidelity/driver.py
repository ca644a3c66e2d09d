"""Trains the maps of a study on an executor's workers, and writes down each as soon as it is finished. No torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from ..execution.base import Executor, Outcome
from ..headmap import HeadMap
from ..progress import Progress, ignore_progress
from .records import Key, LongSpec, Run, Study, Subject

Save = Callable[[Study], None]
Say = Callable[[str], None]

CHECKPOINT_SECONDS = 120.0
"""A map that takes longer is kept on the way: for less, writing its optimiser down costs more than training it again."""


@dataclass(frozen=True)
class Task:
    """A map to train, with the first seed (0) or the second."""

    head_map: HeadMap
    seed: int = 0

    @property
    def key(self) -> Key:
        """What the study calls it."""
        return self.head_map.layers, self.seed

    @property
    def name(self) -> str:
        """What its files are called."""
        return f"{self.head_map.digest}-{self.seed}"


def tasks_of(subjects: Sequence[Subject], repeats: int) -> list[Task]:
    """All maps once, both groups by turns, so that a study that ends early has something of each; then the repeats."""
    groups = [[s for s in subjects if s.group == group] for group in ("good", "mixed")]
    turns = [s for pair in _in_turns(*groups) for s in pair]
    return [Task(s.head_map) for s in turns] + [Task(s.head_map, 1) for s in turns[:repeats]]


def _in_turns(good: list[Subject], mixed: list[Subject]) -> list[list[Subject]]:
    """One mixed map after as many good ones as there are for each."""
    step = max(1, round(len(good) / len(mixed))) if mixed else 1
    parts = [good[start : start + step] for start in range(0, len(good), step)]
    pairs = zip_longest(parts, mixed)
    return [[*(part or []), *([other] if other else [])] for part, other in pairs]


@dataclass
class Driver:
    """One call of a study: what is left to do, and how long it takes.

    seconds is the estimate of one map, until the first one is measured. deadline is of time.monotonic: once one is, no
    map is begun that would not end before it.
    """

    study: Study
    executor: Executor
    folder: Path
    """Where checkpoints lie."""
    save: Save
    say: Say
    seconds: float
    progress: Progress = ignore_progress
    deadline: float = float("inf")
    _open: dict[int, tuple[Task, float]] = field(default_factory=dict)
    _retried: set[Key] = field(default_factory=set)

    def train(self, tasks: Sequence[Task]) -> Study:
        """Trains those that have no run yet, a failed one once more; the study with all that there is then."""
        self._todo = deque(task for task in tasks if task.key not in self.study.runs)
        self._total, self._done = len(self._todo), 0
        self._started = time.monotonic()
        self.folder.mkdir(exist_ok=True)
        while self._fill():
            self._finish(self.executor.next_done())
        return self.study

    @property
    def left(self) -> int:
        """Maps that time was too short for."""
        return len(self._todo)

    def _fill(self) -> bool:
        while self._todo and len(self._open) < self.executor.capacity:
            # An estimate is no reason to begin nothing.
            expected = self.seconds if self.study.runs else 0.0
            if time.monotonic() + expected > self.deadline:
                break
            task = self._todo.popleft()
            number = self._total + len(self._retried) - len(self._todo)
            self._open[number] = (task, time.monotonic())
            self.executor.submit(number, self._spec(task))
        return bool(self._open)

    def _spec(self, task: Task) -> LongSpec:
        path = self._checkpoint(task)
        keeps = self.seconds > CHECKPOINT_SECONDS or path.exists()
        checkpoint = str(path) if keeps else None
        return LongSpec(task.head_map.to_json(), self.study.settings, task.seed, checkpoint)

    def _checkpoint(self, task: Task) -> Path:
        return self.folder / f"{task.name}.safetensors"

    def _finish(self, outcome: Outcome) -> None:
        task, _ = self._open.pop(outcome.task_id)
        run = outcome.result
        if outcome.fault is not None:
            raise outcome.fault(f"{outcome.error}; the same command goes on from here")
        if isinstance(run, Run):
            self.seconds = run.seconds
            self._record(task, self.study.with_run(task.key, run), self._line(run))
            self._checkpoint(task).unlink(missing_ok=True)
            return
        reason = outcome.error or f"the worker answered with a {type(run).__name__}"
        # The same weights and batches give the same NaN.
        if task.key not in self._retried and "NonFiniteLoss" not in reason:
            self._retried.add(task.key)
            self.say(f"  a map failed: {reason}; it is tried again")
            self._todo.append(task)
            return
        failed = f"failed: {reason}"
        self._record(task, self.study.with_failure(task.key, reason), failed)

    def _record(self, task: Task, study: Study, said: str) -> None:
        self.study = study
        self.save(study)
        self._done += 1
        again = " again" if task.seed else ""
        self.say(f"  map {self._done} of {self._total}{again}: {said}{self._pace()}")
        self.progress(self._done, self._total)

    def _line(self, run: Run) -> str:
        last = run.readings[-1]
        return f"kl {last.metrics['kl']:.4f} after {last.tokens:,} tokens, {run.seconds:.0f} s"

    def _pace(self) -> str:
        """Tokens a second of all workers together in this call, and the time left."""
        passed = time.monotonic() - self._started
        rate = self._done * self.study.settings.trained_tokens / passed
        left = (self._total - self._done) * passed / self._done
        return (
            f"; {rate:,.0f} tokens/s, {left / 60:.1f} min left" if self._done < self._total else ""
        )
