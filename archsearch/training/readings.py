"""One distillation that is measured at several lengths: a trunk at a constant rate, and at each length a fork that decays.

A reading at N tokens is of a copy that left the trunk config.decay_share * N tokens before, and whose rate fell since;
it has seen exactly N tokens, and so stands for a run of that length. The trunk goes on as if nothing had happened.
All readings together cost the longest one's tokens and the forks of the others.

Source: warm-up, stable, decay schedules (MiniCPM, arXiv 2404.06395).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..config import DistillConfig
from ..errors import ConfigError
from ..models.teacher import Teacher
from ..progress import Progress, ignore_progress
from .checkpoint import read_checkpoint, save_checkpoint
from .distill import plan_of, student_loss
from .loop import Plan, Source, StepHook, TrainingState, train
from .packing import ids_of
from .student import StudentLoss, in_training
from .teacher_logits import TeacherLogits

Measure = Callable[[HydraHeadForCausalLM, int], dict[str, float]]
"""What is read off a student that has seen so many tokens; it is in eval mode, without gradients."""

SAVE_SECONDS = 300.0
SAMPLE = 64
"""Numbers of each parameter that tell one student's start from another's."""


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
    if list(readings) != sorted(set(readings)) or not readings or readings[0] < 0:
        raise ValueError(f"readings {list(readings)} do not ascend from 0")
    if config.decay_share >= 1:
        raise ValueError(f"decay_share {config.decay_share} leaves no steps at a constant rate")
    batch = ids_of(next(batches(0)))
    loss = student_loss(student, teacher, config, logits)
    with in_training(student, config.trainable, checkpointing=config.checkpointing) as state:
        steps = [_steps(tokens, batch.numel()) for tokens in readings]
        first = next((count for count in steps if count), 1)
        warmup = min(config.warmup_steps, first // 2)
        data = (batch, ids_of(next(batches(first - 1))))
        identity = _identity(student, teacher, state, config, data, warmup, about)
        run = _Trunk(student, state, loss, batches, checkpoint, identity, before_step)
        run.resume()
        run.last, run.progress = steps[-1], progress
        for count in steps:
            if count * batch.numel() not in run.done:
                plan = plan_of(config, count, warmup=warmup)
                run.read(plan, count * batch.numel(), measure, save_seconds)
        return [run.done[count * batch.numel()] for count in steps]


def _steps(tokens: int, batch_tokens: int) -> int:
    return max(1, round(tokens / batch_tokens)) if tokens else 0


class _Trunk:
    """The run at a constant rate, and the readings that it has had."""

    def __init__(
        self,
        student: HydraHeadForCausalLM,
        state: TrainingState,
        loss: StudentLoss,
        batches: Source,
        checkpoint: Path | None,
        identity: str,
        before_step: StepHook | None,
    ) -> None:
        self._student, self._state, self._loss, self._batches = student, state, loss, batches
        self._checkpoint, self._identity = checkpoint, identity
        self._before_step = before_step
        self._seconds = 0.0
        self.done: dict[int, Reading] = {}
        self.last = 0
        self.progress: Progress = ignore_progress

    def resume(self) -> None:
        """Goes on from the checkpoint, if there is one."""
        if self._checkpoint is None or not self._checkpoint.exists():
            return
        notes = read_checkpoint(self._state, self._checkpoint, identity=self._identity).notes
        self._seconds = notes["seconds"]
        self.done = {row["tokens"]: Reading(**row) for row in notes["readings"]}

    def read(self, plan: Plan, tokens: int, measure: Measure, save_seconds: float) -> None:
        """Takes the trunk to where the reading forks off, and makes it."""
        fork = plan.steps - (plan.decay_steps or 0)
        if fork < self._state.step:
            raise ConfigError(
                f"checkpoint {self._checkpoint}: has {self._state.step} steps behind it, a reading at {tokens} "
                f"tokens leaves at {fork}; allowed: longer readings, or to delete it"
            )
        if plan.steps:
            self._train(plan, until=fork, save_seconds=save_seconds)
        trunk, trunk_seconds, loss = self._state.snapshot(), self._seconds, None
        if plan.steps:
            self._train(plan)
            loss = self._state.losses[-1][1]
        self._hook(self._state.step)
        # Measuring needs the memory, and may push out of the kernels' tables those that a recorded step reads.
        self._loss.release()
        self._student.train(False)
        values = measure(self._student, tokens)
        self._student.train()
        self.done[tokens] = Reading(tokens, values, loss, self._seconds)
        self._state.restore(trunk)
        self._seconds = trunk_seconds
        self._hook(self._state.step)
        self._save(self._state)

    def _train(self, plan: Plan, until: int | None = None, save_seconds: float = 0.0) -> None:
        started, before = time.monotonic(), self._seconds

        def tick() -> None:
            self._seconds = before + time.monotonic() - started

        def save(state: TrainingState) -> None:
            tick()
            self._save(state)

        # A fork is short: after a kill it starts again at the trunk.
        in_fork = until is None
        train(
            self._state,
            plan,
            self._loss,
            self._batches,
            until=until,
            save=None if in_fork else save,
            save_seconds=save_seconds,
            before_step=self._hook,
            progress=ignore_progress if in_fork else self._count,
        )
        tick()

    def _hook(self, step: int, _: int = 0) -> None:
        if self._before_step is not None:
            self._before_step(step, self.last)

    def _count(self, done: int, total: int) -> None:
        self.progress(done, self.last)

    def _save(self, state: TrainingState) -> None:
        if self._checkpoint is None:
            return
        rows = [asdict(reading) for reading in self.done.values()]
        notes = {"seconds": self._seconds, "readings": rows}
        save_checkpoint(state, self._checkpoint, identity=self._identity, notes=notes)


def _identity(
    student: HydraHeadForCausalLM,
    teacher: Teacher,
    state: TrainingState,
    config: DistillConfig,
    data: Sequence[Tensor],
    warmup: int,
    about: str,
) -> str:
    """What a checkpoint depends on. The first batch and the first reading's last one stand for the data, some numbers of
    each parameter for the start."""
    digest = hashlib.blake2b(digest_size=8)
    for batch_BT in data:
        digest.update(batch_BT.numpy().tobytes())
    for parameter in state.parameters.values():
        flat = parameter.detach().flatten()
        picked = flat[:: max(1, len(flat) // SAMPLE)].to("cpu", torch.float32)
        digest.update(picked.numpy().tobytes())
    fa = student.config.fa or {}
    settings = config.model_dump(exclude={"cache_gib", "checkpointing", "replay", "warmup_steps"})
    facts = {
        "teacher": teacher.fingerprint,
        "head_map": student.config.head_map,
        "full": {name: x for name, x in fa.items() if name != "rope_share"},
        "about": about,
        "batch": list(data[0].shape),
        "warmup_steps": warmup,
        "start": digest.hexdigest(),
        **settings,
    }
    return json.dumps(facts, sort_keys=True)
