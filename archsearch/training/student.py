"""A student while it trains: which of its parameters move, whether layers are computed twice, and its loss.

Shapes: B sequences, T tokens, M = B * T positions, C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from .loop import TrainingState, mixed_precision, native_precision, product_dtype
from .losses import NextToken, Weighted, backward_logits, pull_hidden
from .packing import Batch, RawBatch
from .teacher_logits import TeacherLogits, final_hidden


@dataclass(frozen=True)
class LossWeights:
    """Weights of KL from the teacher, of cross-entropy with the text, and of the final hidden states' squared error."""

    kl: float = 0.0
    ce: float = 0.0
    hidden: float = 0.0


class StudentLoss:
    """The LossStep of a student: the weighted terms, each a mean over positions.

    A student of one dtype computes in it (an fp32 one multiplies in bf16 on a GPU); with fp32 weights among bf16 ones it
    runs under autocast. teacher may be None where only ce counts. end_token ends documents that do not see each other, in batches
    that do not say where documents start.
    """

    def __init__(
        self,
        student: HydraHeadForCausalLM,
        teacher: TeacherLogits | None,
        weights: LossWeights,
        *,
        end_token: int | None = None,
    ) -> None:
        self._student, self._teacher, self._weights = student, teacher, weights
        self._end_token = end_token
        self._device = student.lm_head.weight.device
        self._dtype = student.dtype
        mixed = len({parameter.dtype for parameter in student.parameters()}) > 1
        self._precision = mixed_precision if mixed else native_precision

    def __call__(self, raw: RawBatch) -> Tensor:
        """Adds the gradients of a batch on the CPU; returns its loss."""
        batch = Batch.of(raw, self._device, self._end_token)
        target, theirs_MC = (None, None) if self._teacher is None else self._teacher(batch)
        with self._precision(self._device, self._dtype):
            ours_MC = final_hidden(self._student, batch)
        terms, weights = [], self._weights
        if weights.kl and target is not None:
            terms.append(Weighted(target, weights.kl))
        if weights.ce:
            share = len(ours_MC) / max(1, batch.num_labels)
            terms.append(Weighted(NextToken(batch.labels_M), weights.ce * share))
        error, pulled_MC = None, None
        if weights.hidden and theirs_MC is not None:
            error, pulled_MC = pull_hidden(ours_MC, theirs_MC, weights.hidden)
        dtype = product_dtype(self._device, self._dtype)
        loss = backward_logits(ours_MC, self._student.lm_head, terms, dtype, pulled_MC)
        return loss if error is None else loss + error


def trainable_parameters(student: HydraHeadForCausalLM, trainable: str) -> dict[str, nn.Parameter]:
    """The parameters that `trainable` names: "all", or "attention", which means all of every attention block."""
    return {
        name: parameter
        for name, parameter in student.named_parameters()
        if trainable == "all" or ".self_attn." in name
    }


@contextmanager
def in_training(
    student: HydraHeadForCausalLM, trainable: str, *, checkpointing: bool = False
) -> Iterator[TrainingState]:
    """A new state of the trainable parameters, which ask for gradients inside; eval mode and none afterwards."""
    trained = trainable_parameters(student, trainable)
    student.requires_grad_(False).train()
    for parameter in trained.values():
        parameter.requires_grad_(True)
    try:
        with computed_twice(student, checkpointing):
            yield TrainingState(trained)
    finally:
        for parameter in trained.values():
            parameter.grad = None
        student.requires_grad_(False).train(False)


@contextmanager
def computed_twice(model: HydraHeadForCausalLM, enabled: bool = True) -> Iterator[None]:
    """Has the backward pass compute each decoder layer again, so that of its graph only the input is held till then."""
    layers = list(model.model.layers) if enabled else []
    for layer in layers:
        layer.forward = _again(layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _again(forward: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Nothing in a layer draws at random.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run
