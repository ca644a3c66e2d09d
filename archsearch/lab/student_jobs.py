"""Students to train one after the other or side by side, until the time is over; and how long that will take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..config import RunConfig
from ..data.tasks import GENERAL_KINDS
from ..execution.base import Executor
from ..headmap import HeadMap
from ..models.sources import resolve_path
from .ledger import FAILED
from .student_worker import DONE

READING_RATE = 700_000
"""Tokens a second of a forward without gradients, of a model of 135 M parameters on an H200: for estimates alone."""
START_SECONDS = 60
"""To load a teacher and its supernet, to draw prompts and to compile kernels."""
GENERAL_TOKENS = 200
"""Of a general prompt, about."""
CHARACTERS = 3.5
"""Of a token, about."""
SLACK = 1.2


@dataclass(frozen=True)
class Job:
    """A student of a map (of the teacher itself without one), and the readings that are missing."""

    name: str
    head_map: HeadMap | None
    seed: int
    readings: tuple[int, ...]

    @property
    def task(self) -> dict[str, Any]:
        """What a StudentWorker is asked."""
        head_map = None if self.head_map is None else self.head_map.to_json()
        return {"map": head_map, "seed": self.seed, "readings": list(self.readings)}


@dataclass(frozen=True)
class Estimate:
    """Tokens and seconds of jobs. evaluated: tokens of one reading's texts and prompts; rate: training tokens a second."""

    decay_share: float
    evaluated: int
    rate: float

    @classmethod
    def of(cls, config: RunConfig, rate: float) -> Estimate:
        """From a config and the rate of all workers together."""
        data, probes = config.data, config.probes
        rows = data.heldout_sequences + sum(
            text.sequences or data.heldout_sequences for text in data.extra_heldout
        )
        general = [kind for kind in probes.kinds if kind in GENERAL_KINDS]
        haystacks = len(probes.kinds) - len(general) + len(probes.unseen)
        tokens = rows * data.sequence_length + probes.prompts * (
            haystacks * sum(probes.contexts) + GENERAL_TOKENS * len(general)
        )
        sizes = [resolve_path(file.path) for file in probes.files]
        tokens += sum(round(_characters(path) / CHARACTERS) for path in sizes)
        return cls(config.distill.decay_share, tokens, rate)

    def training_tokens(self, job: Job) -> int:
        """The trunk to the last reading, and the forks of those before."""
        *forks, last = sorted(job.readings)
        return last + round(self.decay_share * sum(forks))

    def text(self, name: str, jobs: Sequence[Job]) -> str:
        """One line: maps, tokens, and about how many seconds."""
        tokens = sum(self.training_tokens(job) for job in jobs)
        readings = sum(len(job.readings) for job in jobs)
        evaluated = readings * self.evaluated
        seconds = tokens / self.rate, evaluated / READING_RATE
        return (
            f"{name}: {len(jobs)} maps to train, {tokens / 1e6:,.1f} M tokens in {seconds[0]:,.0f} s at {self.rate:,.0f} a "
            f"second; {readings} readings of {self.evaluated / 1e6:.2f} M tokens in about {seconds[1]:,.0f} s; start about "
            f"{START_SECONDS} s a call"
        )


@dataclass(frozen=True)
class Left:
    """Jobs that have not all of their readings: those that the time was too short for, and names of those that raised."""

    late: int
    raised: tuple[str, ...] = ()

    @property
    def jobs(self) -> int:
        """How many in all."""
        return self.late + len(self.raised)


def run_jobs(executor: Executor, jobs: Sequence[Job], deadline: float) -> Left:
    """Does the jobs in order until time.time() is past the deadline; returns what is left.

    A job is not begun where one like it has taken longer than what is left. A job that fails is said, and left.
    """
    begun: dict[int, tuple[Job, float]] = {}
    longest: dict[tuple[int, ...], float] = {}
    waiting, late, raised = list(enumerate(jobs)), 0, list[str]()
    while waiting or begun:
        while waiting and len(begun) < executor.capacity:
            number, job = waiting[0]
            seconds = longest.get(job.readings, 0.0)
            if time.time() + SLACK * seconds >= deadline:
                late += len(waiting)
                waiting.clear()
                break
            waiting.pop(0)
            begun[number] = (job, time.time())
            executor.submit(number, job.task)
        if not begun:
            break
        outcome = executor.next_done()
        job, start = begun.pop(outcome.task_id)
        seconds = time.time() - start
        said = outcome.error or outcome.result
        if said == DONE:
            longest[job.readings] = max(longest.get(job.readings, 0.0), seconds)
        elif outcome.error:
            raised.append(job.name)
        elif said != FAILED:
            late += 1
        print(f"{job.name}, seed {job.seed}: {said}, {seconds:.1f} s", flush=True)
    return Left(late, tuple(raised))


def _characters(path: Any) -> int:
    import gzip

    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rb") as file:
        return len(file.read())
