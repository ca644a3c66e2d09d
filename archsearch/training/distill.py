"""Stage 2: KL(teacher || student) on logits and what a config adds to it, to tell candidates apart by how well they recover.

The rate is constant after a warm-up and falls over the last steps before a student is measured. Where it has not
fallen yet, training can go on: that is the fork of a reading (readings.py), and of a longer proxy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..config import DistillConfig
from ..data.corpora import end_of_text
from ..models.teacher import Teacher
from ..progress import Progress, ignore_progress
from .loop import Plan, Source, StepHook, TrainingState, train
from .packing import ids_of
from .replay import Replay
from .student import LossWeights, StudentLoss, in_training, trainable_parameters
from .teacher_logits import TeacherLogits

FINAL_SHARE = 0.1
"""The learning rate ends at this share of its peak: so few tokens leave no time for more."""


@dataclass(frozen=True)
class Distillation:
    """What a distillation did. Losses are mean nats a token, at its first and over its last steps."""

    tokens: int
    steps: int
    first_loss: float
    last_loss: float
    seconds: float


def distill(
    student: HydraHeadForCausalLM,
    teacher: Teacher,
    batches: Source,
    *,
    tokens: int,
    config: DistillConfig,
    start_step: int = 0,
    logits: TeacherLogits | None = None,
    at_fork: Callable[[int], None] | None = None,
    before_step: StepHook | None = None,
    progress: Progress = ignore_progress,
) -> Distillation:
    """Trains student in place on about `tokens` tokens, at least one batch, and leaves it in eval mode.

    batches gives token ids [B, T] on the CPU, or a PackedBatch. The student shares no trained tensor with the teacher and lies on its device. start_step counts the steps, and
    skips the batches, that an earlier distillation took. logits is what a worker's candidates share; at_fork is
    called with the steps done before the rate falls, once the parameters hold what they were by then. Raises
    NonFiniteLoss, ConfigError as TeacherLogits does.
    """
    started = time.monotonic()
    batch_tokens = ids_of(next(batches(0))).numel()
    steps = max(1, round(tokens / batch_tokens))
    last = start_step + steps
    plan = plan_of(config, last, start=start_step)
    loss = student_loss(student, teacher, config, logits)
    with in_training(student, config.trainable, checkpointing=config.checkpointing) as state:
        state.step = start_step
        if at_fork is not None:
            fork = last - (plan.decay_steps if plan.decay_steps is not None else steps)
            train(
                state, plan, loss, batches, until=fork, before_step=before_step, progress=progress
            )
            at_fork(state.step)
        train(state, plan, loss, batches, before_step=before_step, progress=progress)
        return outcome(state, steps * batch_tokens, steps, started)


def plan_of(
    config: DistillConfig, steps: int, *, start: int = 0, warmup: int | None = None
) -> Plan:
    """The rates of a distillation that is measured after `steps`; its warm-up is config's unless given."""
    share = config.decay_share
    return Plan(
        steps=steps,
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps if warmup is None else warmup,
        final_share=FINAL_SHARE,
        decay_steps=None if share == 1 else min(steps - start, round(share * steps)),
        start=start,
    )


def student_loss(
    student: HydraHeadForCausalLM,
    teacher: Teacher,
    config: DistillConfig,
    logits: TeacherLogits | None = None,
) -> StudentLoss:
    """The loss that config describes, with a store of the teacher's logits of its own unless one is given."""
    weights = LossWeights(config.kl_weight, config.ce_weight, config.hidden_weight)
    if logits is None and (weights.kl or weights.hidden):
        logits = TeacherLogits(teacher, config)
    end_token = end_of_text(teacher.tokenizer) if config.packed else None
    replay = None
    if config.replay and teacher.device.type == "cuda":
        replay = Replay(list(trainable_parameters(student, config.trainable).values()))
    return StudentLoss(student, logits, weights, end_token=end_token, replay=replay)


def outcome(state: TrainingState, tokens: int, steps: int, started: float) -> Distillation:
    """What a finished run did; started is of time.monotonic."""
    return Distillation(
        tokens=tokens,
        steps=steps,
        first_loss=state.losses[0][1],
        last_loss=state.losses[-1][1],
        seconds=time.monotonic() - started,
    )
