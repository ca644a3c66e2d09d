"""Trainings that are kept on the way: after a kill the same call goes on from there, to the weights of an undisturbed one."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..config import DistillConfig
from ..models.teacher import Teacher
from ..progress import Progress, ignore_progress
from .checkpoint import read_checkpoint, save_checkpoint, start_digest
from .distill import Distillation, outcome, plan_of, student_loss
from .loop import LossStep, Plan, Source, StepHook, TrainingState, train
from .packing import ids_of
from .student import in_training
from .teacher_logits import TeacherLogits

SECONDS = "seconds"


@dataclass(frozen=True)
class Keeper:
    """Where a training keeps its state, how often, and what that state depends on beside its start and its batches."""

    path: Path
    about: Mapping[str, Any]
    """Plain JSON data."""
    seconds: float = 120.0

    def identity(self, state: TrainingState, plan: Plan, batches: Source) -> str:
        """What a checkpoint of a training that is about to start depends on."""
        start = start_digest(state, [ids_of(next(batches(0)))])
        facts = {"start": start, "steps": plan.steps, **self.about}
        return json.dumps(facts, sort_keys=True)


def train_kept(
    state: TrainingState,
    plan: Plan,
    loss: LossStep,
    batches: Source,
    keeper: Keeper | None = None,
    *,
    before_step: StepHook | None = None,
    progress: Progress = ignore_progress,
) -> float:
    """The loop to the plan's end, from the keeper's file if it is there; that file holds the end, too.

    Returns the seconds of all calls, less what a kill cut off. Raises ConfigError where the file belongs to other
    settings, EnvironmentFault where it is damaged, NonFiniteLoss.
    """
    started, before = time.monotonic(), 0.0
    if keeper is None:
        train(state, plan, loss, batches, before_step=before_step, progress=progress)
        return time.monotonic() - started
    identity = keeper.identity(state, plan, batches)
    if keeper.path.exists():
        before = read_checkpoint(state, keeper.path, identity=identity).notes[SECONDS]

    def save(state: TrainingState) -> None:
        notes = {SECONDS: before + time.monotonic() - started}
        save_checkpoint(state, keeper.path, identity=identity, notes=notes)

    is_over = state.step == plan.steps
    train(
        state,
        plan,
        loss,
        batches,
        save=save,
        save_seconds=keeper.seconds,
        before_step=before_step,
        progress=progress,
    )
    if is_over:
        return before
    save(state)
    return before + time.monotonic() - started


def distill_kept(
    student: HydraHeadForCausalLM,
    teacher: Teacher,
    batches: Source,
    keeper: Keeper,
    *,
    tokens: int,
    config: DistillConfig,
    logits: TeacherLogits | None = None,
    before_step: StepHook | None = None,
    progress: Progress = ignore_progress,
) -> Distillation:
    """As distill, kept on the way. logits is what several students share; of one alone none of the teacher's answers is kept.

    Raises as train_kept does.
    """
    batch_tokens = ids_of(next(batches(0))).numel()
    steps = max(1, round(tokens / batch_tokens))
    logits = logits or TeacherLogits(teacher, once(config))
    loss = student_loss(student, teacher, config, logits)
    with in_training(student, config.trainable, checkpointing=config.checkpointing) as state:
        plan = plan_of(config, steps)
        seconds = train_kept(
            state, plan, loss, batches, keeper, before_step=before_step, progress=progress
        )
        return outcome(state, steps * batch_tokens, steps, time.monotonic() - seconds)


def once(config: DistillConfig) -> DistillConfig:
    """The config where every batch is seen once: nothing is kept, and only topk, which is another loss, differs from exact."""
    form = "topk" if config.teacher_logits == "topk" else "exact"
    return config.model_copy(update={"teacher_logits": form, "cache_gib": 0.0})
