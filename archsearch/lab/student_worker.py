"""Trains the student of one head map and writes down what it is measured at, reading by reading.

Tasks are plain data: {"map": HeadMap as JSON, or None for the teacher as it is; "seed": of the order of batches;
"readings": tokens}. Answers are one of DONE, STOPPED (the time was over) and FAILED.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..headmap import HeadMap
from ..models.full_heads import rope_fader
from ..search.trial import TEACHER_LOGITS, TrialWorker
from ..training.loop import NonFiniteLoss, StepHook
from ..training.readings import distill_with_readings
from ..training.teacher_logits import TeacherLogits
from .ledger import FAILED, VALUES, Ledger

DONE, STOPPED = "done", "stopped"
TEACHER = "teacher"


class OutOfTime(Exception):
    """The time of this call is over."""


def reading_key(settings: str, head_map: HeadMap | None, seed: int, tokens: int) -> str:
    """What a reading is found by; the teacher as it is has no map."""
    name = TEACHER if head_map is None else head_map.digest
    return f"{settings}/{name}/{seed}/{tokens}"


def stop_after(deadline: float) -> StepHook:
    """A hook for training that raises OutOfTime once time.time() is past the deadline."""

    def check(step: int, last: int) -> None:
        if time.time() > deadline:
            raise OutOfTime

    return check


class StudentWorker:
    """Does tasks: `StudentWorker(payload)(task)`.

    payload: that of a TrialWorker, and "ledger" (path), "settings", "deadline" (of time.time()) and "workers", of which
    this is one.
    """

    def __init__(self, payload: dict[str, Any]) -> None:
        self._bench = TrialWorker(payload)
        self._ledger, self._settings = Ledger(Path(payload["ledger"])), payload["settings"]
        self._deadline, self._workers = payload["deadline"], payload["workers"]
        self._logits: tuple[int, TeacherLogits] | None = None

    def __call__(self, task: dict[str, Any]) -> str:
        """Makes the readings that the ledger has not."""
        head_map = None if task["map"] is None else HeadMap.from_json(task["map"])
        found, seed = self._ledger.rows(), task["seed"]
        keys = {t: reading_key(self._settings, head_map, seed, t) for t in task["readings"]}
        missing = [tokens for tokens, key in keys.items() if key not in found]
        if not missing:
            return DONE
        try:
            if head_map is None:
                started = time.monotonic()
                self._add(
                    keys[0],
                    None,
                    0,
                    0,
                    self._bench.measure(self._bench.teacher.model),
                    0.0,
                    started,
                )
            else:
                self._train(head_map, seed, missing, keys)
        except OutOfTime:
            return STOPPED
        except NonFiniteLoss as error:
            facts = {"map": task["map"], "seed": seed}
            for tokens in missing:
                if keys[tokens] not in self._ledger.rows():
                    self._ledger.add(keys[tokens], tokens=tokens, failed=str(error), **facts)
            return FAILED
        finally:
            # Cycles hold students, which on a GPU soon fill it.
            if self._bench.teacher.device.type == "cuda":
                self._bench.free_memory()
        return DONE

    def _train(
        self, head_map: HeadMap, seed: int, readings: list[int], keys: dict[int, str]
    ) -> None:
        bench, config = self._bench, self._bench.config
        asked = iter(readings)
        seconds = _Seconds()

        def measure(student: HydraHeadForCausalLM, _: int) -> dict[str, float]:
            training, started = seconds.lap(), time.monotonic()
            tokens = next(asked)
            values = bench.measure(student)
            self._add(keys[tokens], head_map, seed, tokens, values, training, started)
            seconds.leave_out(time.monotonic() - started)
            return values

        student = bench.cut(head_map, trains=True)
        batch_tokens = bench.batch_sequences * config.data.sequence_length
        fade = rope_fader(student, config.student.full, batch_tokens)
        stop = stop_after(self._deadline)

        def before_step(step: int, last: int) -> None:
            stop(step, last)
            fade(step, last)

        distill_with_readings(
            student,
            bench.teacher,
            partial(self._batches, seed),
            readings=readings,
            measure=measure,
            config=config.distill,
            logits=self._teacher_logits(seed),
            before_step=before_step,
        )

    def _add(
        self,
        key: str,
        head_map: HeadMap | None,
        seed: int,
        tokens: int,
        values: dict[str, float],
        training: float,
        started: float,
    ) -> None:
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        found: dict[str, Any] = {FAILED: f"not finite: {', '.join(bad)}"} if bad else {}
        self._ledger.add(
            key,
            map=None if head_map is None else head_map.to_json(),
            seed=seed,
            tokens=tokens,
            **(found or {VALUES: values}),
            # Of all training up to here, forks of earlier readings included.
            train_seconds=training,
            measure_seconds=time.monotonic() - started,
            workers=self._workers,
        )

    def _batches(self, seed: int, start_step: int) -> Iterator[Any]:
        own = self._bench.config.seed
        return self._bench.batches(start_step, own if seed == 0 else own + 1000 * seed)

    def _teacher_logits(self, seed: int) -> TeacherLogits:
        """What students of one seed share; those of the seed before are let go."""
        if self._logits is None or self._logits[0] != seed:
            self._logits = None
            folder = self._bench.run_dir / TEACHER_LOGITS
            logits = TeacherLogits(self._bench.teacher, self._bench.config.distill, folder=folder)
            self._logits = (seed, logits)
        return self._logits[1]


class _Seconds:
    """A clock of training that leaves measuring out."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def lap(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._start

    def leave_out(self, seconds: float) -> None:
        """Takes back what was no training."""
        self._start += seconds
