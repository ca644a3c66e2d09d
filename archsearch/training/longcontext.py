"""Stage 3: tuning on long sequences, by the next token or by KL from the teacher.

The length is that of the batches; every setting of its own is in LongContextConfig. A layer's graph at 16 K tokens is
what memory goes to, so that layers are computed twice unless told otherwise.
"""

from __future__ import annotations

import time

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..config import DistillConfig, LongContextConfig
from ..data.corpora import end_of_text
from ..models.teacher import Teacher
from ..progress import Progress, ignore_progress
from .distill import FINAL_SHARE, Distillation, outcome
from .kept import Keeper, train_kept
from .loop import Plan, Source, StepHook
from .packing import ids_of
from .student import LossWeights, StudentLoss, in_training
from .teacher_logits import TeacherLogits


def tune_long_context(
    student: HydraHeadForCausalLM,
    teacher: Teacher,
    batches: Source,
    config: LongContextConfig,
    *,
    keeper: Keeper | None = None,
    before_step: StepHook | None = None,
    progress: Progress = ignore_progress,
) -> Distillation:
    """Trains student in place on config.tokens tokens, at least one batch, and leaves it in eval mode.

    batches gives rows of config.sequence_length tokens, config.batch_tokens in all. The teacher runs only for loss:
    kl; it lies on the student's device. With a keeper the same call goes on after a kill. Raises NonFiniteLoss,
    ValueError where the batches are of another length, and as train_kept does.
    """
    shape = ids_of(next(batches(0))).shape
    if shape[1] != config.sequence_length:
        raise ValueError(
            f"batches of {shape[1]} tokens a row; long_context.sequence_length is {config.sequence_length}"
        )
    steps = max(1, round(config.tokens / shape.numel()))
    share = config.decay_share
    plan = Plan(
        steps=steps,
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps,
        final_share=FINAL_SHARE,
        decay_steps=None if share == 1 else round(share * steps),
    )
    # Every batch is seen once, so that keeping the teacher's answers would be for nothing.
    exact = DistillConfig(teacher_logits="exact", trainable=config.trainable)
    logits = TeacherLogits(teacher, exact) if config.loss == "kl" else None
    weights = LossWeights(kl=1.0) if config.loss == "kl" else LossWeights(ce=1.0)
    end_token = end_of_text(teacher.tokenizer) if config.packed else None
    loss = StudentLoss(student, logits, weights, end_token=end_token)
    with in_training(student, config.trainable, checkpointing=config.checkpointing) as state:
        seconds = train_kept(
            state, plan, loss, batches, keeper, before_step=before_step, progress=progress
        )
        return outcome(state, steps * shape.numel(), steps, time.monotonic() - seconds)
