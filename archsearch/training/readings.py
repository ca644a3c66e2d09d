"""One distillation that is measured at several lengths: a trunk at a constant rate, and at each length a fork that decays.

A reading at N tokens is of a copy that left the trunk config.decay_share * N tokens before, and whose rate fell since;
it has seen exactly N tokens, and so stands for a run of that length. The trunk goes on as if nothing had happened.
All readings together cost the longest one's tokens and the forks of the others.

Source: warm-up, stable, decay schedules (MiniCPM, arXiv 2404.06395).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch import Tensor

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..config import DistillConfig
from ..errors import ConfigError
from ..models.teacher import Teacher
from ..progress import Progress, ignore_progress
from .checkpoint import read_checkpoint, save_checkpoint, start_digest
from .distill import plan_of, student_loss
from .loop import Plan, Source, StepHook, TrainingState, train
from .packing import ids_of
from .student import StudentLoss, in_training
from .teacher_logits import TeacherLogits

Measure = Callable[[HydraHeadForCausalLM, int], dict[str, float]]
"""What is read off a student that has seen so many tokens; it is in eval mode, without gradients."""

SAVE_SECONDS = 300.0


@dataclass(frozen=True)
class Reading:
    """A measured length. loss is the mean of the fork's last steps, NaN-free; None at 0 tokens."""

    tokens: int
    """Tokens that the measured student has seen."""
    values: dict[str, float]
    loss: float | None
    seconds: float
    """Of training on this machine up to here, forks of shorter readings left out."""


def distill_with_readings(
    student: HydraHeadForCausalLM,
    teacher: Teacher,
    batches: Source,
    *,
    readings: Sequence[int],
    measure: Measure,
    config: DistillConfig,
    logits: TeacherLogits | None = None,
    checkpoint: Path | None = None,
    save_seconds: float = SAVE_SECONDS,
    before_step: StepHook | None = None,
    about: str = "",
    progress: Progress = ignore_progress,
) -> list[Reading]:
    """Trains student in place and measures decayed copies of it at ascending token counts; 0 is before the first step.

    The student ends as the trunk was at the last fork. Where checkpoint exists, all goes on from it: readings that
    it holds are not made again, and longer ones may be added. logits is what several students share. before_step
    sees the steps of the longest reading. about says what else the run depends on, as before_step does; a checkpoint
    holds it. progress counts the trunk's steps.
    Raises ValueError where readings do not ascend or config.decay_share leaves no trunk, ConfigError where the
    checkpoint belongs to other settings or is past a reading that it does not hold, NonFiniteLoss.
    """
    _check(readings, config)
    first_BT = ids_of(next(batches(0)))
    steps = [_steps(tokens, first_BT.numel()) for tokens in readings]
    shortest = next((count for count in steps if count), 1)
    warmup = min(config.warmup_steps, shortest // 2)
    loss = student_loss(student, teacher, config, logits)
    with in_training(student, config.trainable, checkpointing=config.checkpointing) as state:
        data = (first_BT, ids_of(next(batches(shortest - 1))))
        trunk = _Trunk(
            student,
            state,
            loss,
            batches,
            measure,
            checkpoint,
            _identity(student, teacher, state, config, data, warmup, about),
            before_step,
            steps[-1],
            progress,
            save_seconds,
        )
        trunk.resume()
        lengths = [count * first_BT.numel() for count in steps]
        for count, tokens in zip(steps, lengths, strict=True):
            if tokens not in trunk.done:
                trunk.read(plan_of(config, count, warmup=warmup), tokens)
        return [trunk.done[tokens] for tokens in lengths]


def _check(readings: Sequence[int], config: DistillConfig) -> None:
    if list(readings) != sorted(set(readings)) or not readings or readings[0] < 0:
        raise ValueError(f"readings {list(readings)} do not ascend from 0")
    if config.decay_share >= 1:
        raise ValueError(f"decay_share {config.decay_share} leaves no steps at a constant rate")


def _steps(tokens: int, batch_tokens: int) -> int:
    return max(1, round(tokens / batch_tokens)) if tokens else 0


class _Stopwatch:
    """Seconds of training, those of a run in progress included."""

    def __init__(self) -> None:
        self._before = 0.0
        self._started: float | None = None

    @property
    def seconds(self) -> float:
        """In all so far."""
        running = 0.0 if self._started is None else time.monotonic() - self._started
        return self._before + running

    def set(self, seconds: float) -> None:
        """Goes on from another count."""
        self._before = seconds

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts the time inside."""
        self._started = time.monotonic()
        yield
        self._before, self._started = self.seconds, None


@dataclass
class _Trunk:
    """The run at a constant rate, and the readings that forks of it have given.

    state is the trunk's, but inside a fork, which trains the same student and then goes back to where it left.
    """

    student: HydraHeadForCausalLM
    state: TrainingState
    loss: StudentLoss
    batches: Source
    measure: Measure
    checkpoint: Path | None
    identity: str
    """What the checkpoint depends on."""
    before_step: StepHook | None
    last_step: int
    """That of the longest reading."""
    progress: Progress
    save_seconds: float
    done: dict[int, Reading] = field(default_factory=dict)
    """By their tokens."""
    watch: _Stopwatch = field(default_factory=_Stopwatch)

    def resume(self) -> None:
        """Goes on from the checkpoint, if there is one."""
        if self.checkpoint is None or not self.checkpoint.exists():
            return
        notes = read_checkpoint(self.state, self.checkpoint, identity=self.identity).notes
        self.watch.set(notes["seconds"])
        self.done = {row["tokens"]: Reading(**row) for row in notes["readings"]}

    def read(self, plan: Plan, tokens: int) -> None:
        """Makes the reading that the plan ends in: of a fork, which leaves where the plan's rate begins to fall."""
        leaves = plan.steps - (plan.decay_steps or 0)
        if leaves < self.state.step:
            raise ConfigError(
                f"checkpoint {self.checkpoint}: has {self.state.step} steps behind it, a reading at {tokens} "
                f"tokens leaves at {leaves}; allowed: longer readings, or to delete it"
            )
        if plan.steps:
            self._go_on(plan, leaves)
        with self._forked():
            loss = self._decay(plan) if plan.steps else None
            self.done[tokens] = Reading(tokens, self._measured(tokens), loss, self.watch.seconds)
        self._save(self.state)

    def _go_on(self, plan: Plan, until: int) -> None:
        """Trains the trunk, and saves it on the way."""
        with self.watch.running():
            train(
                self.state,
                plan,
                self.loss,
                self.batches,
                until=until,
                save=self._save,
                save_seconds=self.save_seconds,
                before_step=self._hook,
                progress=lambda done, _: self.progress(done, self.last_step),
            )

    def _decay(self, plan: Plan) -> float:
        """Trains a fork to its end and returns its last loss. It is short: after a kill it starts again at the trunk."""
        with self.watch.running():
            train(self.state, plan, self.loss, self.batches, before_step=self._hook)
        return self.state.losses[-1][1]

    @contextmanager
    def _forked(self) -> Iterator[None]:
        """What trains inside is undone behind it, its seconds too."""
        trunk, seconds = self.state.snapshot(), self.watch.seconds
        yield
        self.state.restore(trunk)
        self.watch.set(seconds)
        self._hook(self.state.step)

    def _measured(self, tokens: int) -> dict[str, float]:
        self._hook(self.state.step)
        # Measuring needs the memory, and may push out of the kernels' tables those that a recorded step reads.
        self.loss.release()
        self.student.train(False)
        values = self.measure(self.student, tokens)
        self.student.train()
        return values

    def _hook(self, step: int, _: int = 0) -> None:
        """Tells before_step of the steps of the whole run, whichever part of it trains."""
        if self.before_step is not None:
            self.before_step(step, self.last_step)

    def _save(self, state: TrainingState) -> None:
        if self.checkpoint is None:
            return
        rows = [asdict(reading) for reading in self.done.values()]
        notes = {"seconds": self.watch.seconds, "readings": rows}
        save_checkpoint(state, self.checkpoint, identity=self.identity, notes=notes)


def _identity(
    student: HydraHeadForCausalLM,
    teacher: Teacher,
    state: TrainingState,
    config: DistillConfig,
    data: Sequence[Tensor],
    warmup: int,
    about: str,
) -> str:
    """What a checkpoint depends on. The first batch and the first reading's last one stand for the data."""
    fa = student.config.fa or {}
    settings = config.model_dump(exclude={"cache_gib", "checkpointing", "replay", "warmup_steps"})
    facts = {
        "teacher": teacher.fingerprint,
        "head_map": student.config.head_map,
        "full": {name: x for name, x in fa.items() if name != "rope_share"},
        "about": about,
        "batch": list(data[0].shape),
        "warmup_steps": warmup,
        "start": start_digest(state, data),
        **settings,
    }
    return json.dumps(facts, sort_keys=True)
