"""Stage 2, in short: KL(teacher || student) on logits, to tell candidates apart by how well they recover.

Shapes: B sequences, T tokens, M = B * T positions, C hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..config import DistillConfig
from ..models.teacher import Teacher
from ..progress import Progress, ignore_progress
from .loop import BatchSource, Plan, TrainingState, full_precision, mixed_precision, train

LOGIT_BYTES = 128 * 2**20
"""Most bytes that the fp32 logits of one chunk of positions may take."""

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
    batches: BatchSource,
    *,
    tokens: int,
    config: DistillConfig,
    start_step: int = 0,
    progress: Progress = ignore_progress,
) -> Distillation:
    """Trains student in place on about `tokens` tokens, at least one batch, and leaves it in eval mode.

    The student shares no trained tensor with the teacher and lies on its device. start_step skips the
    batches that an earlier distillation took. Raises NonFiniteLoss.
    """
    started = time.monotonic()
    batch_tokens = next(batches(0)).numel()
    plan = Plan(
        steps=max(1, round(tokens / batch_tokens)),
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps,
        final_share=FINAL_SHARE,
    )
    trained = trainable_parameters(student, config)
    student.requires_grad_(False).train()
    with _fp32_masters(trained):
        state = TrainingState(trained)
        train(
            state,
            plan,
            DistillationLoss(student, teacher),
            lambda step: batches(start_step + step),
            progress=progress,
        )
    student.requires_grad_(False).train(False)
    return Distillation(
        tokens=plan.steps * batch_tokens,
        steps=plan.steps,
        first_loss=state.losses[0][1],
        last_loss=state.losses[-1][1],
        seconds=time.monotonic() - started,
    )


def trainable_parameters(
    student: HydraHeadForCausalLM, config: DistillConfig
) -> dict[str, nn.Parameter]:
    """The parameters that config.trainable names; "attention" means all of every attention block."""
    return {
        name: parameter
        for name, parameter in student.named_parameters()
        if config.trainable == "all" or ".self_attn." in name
    }


@contextmanager
def _fp32_masters(parameters: dict[str, nn.Parameter]) -> Iterator[None]:
    """Has the parameters in fp32 and asking for gradients inside, in their own dtype outside."""
    dtypes = {name: parameter.dtype for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.data = parameter.data.float()
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.grad = None
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtypes[name])


class DistillationLoss:
    """The LossStep of distillation: mean KL in nats a token."""

    def __init__(self, student: HydraHeadForCausalLM, teacher: Teacher) -> None:
        self._student = student
        self._teacher = teacher

    def __call__(self, ids_BT: Tensor) -> Tensor:
        """Adds the gradients of a batch; returns its mean KL."""
        device, model = self._teacher.device, self._teacher.model
        if device.type == "cuda":
            ids_BT = ids_BT.pin_memory()
        ids_BT = ids_BT.to(device, non_blocking=True)
        with mixed_precision(device, model.dtype):
            with torch.no_grad():
                theirs_MC = _final_hidden(model, ids_BT)
            ours_MC = _final_hidden(self._student, ids_BT)
            return backward_kl(theirs_MC, model.lm_head, ours_MC, self._student.lm_head)


def backward_kl(
    teacher_MC: Tensor, teacher_head: nn.Module, student_MC: Tensor, student_head: nn.Linear
) -> Tensor:
    """Mean KL(teacher || student) over M positions, detached, its gradients added to all that asks for them.

    Logits exist for one chunk of positions at a time: first each chunk's gradient down to the hidden
    states, then one backward through the student.
    """
    positions = len(student_MC)
    rows = max(1, LOGIT_BYTES // (4 * student_head.weight.shape[0]))
    grad_MC = torch.empty_like(student_MC)
    total = torch.zeros((), device=student_MC.device)
    for start in range(0, positions, rows):
        part = slice(start, start + rows)
        with torch.no_grad():
            log_p = teacher_head(teacher_MC[part]).float().log_softmax(-1)
        hidden = student_MC[part].detach().requires_grad_(True)
        log_q = student_head(hidden).float().log_softmax(-1)
        loss = (log_p.exp() * (log_p - log_q)).sum() / positions
        with full_precision(student_MC.device):
            loss.backward()
        assert hidden.grad is not None
        grad_MC[part] = hidden.grad
        total += loss.detach()
    with full_precision(student_MC.device):
        student_MC.backward(grad_MC)
    return total


def _final_hidden(model: HydraHeadForCausalLM, ids_BT: Tensor) -> Tensor:
    """What the language-model head reads, position after position, [M, C]."""
    hidden_BTC: Tensor = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
    return hidden_BTC.flatten(0, 1)
