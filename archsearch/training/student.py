"""A student while it trains: which of its parameters move, whether layers are computed twice, and its loss.

Shapes: B sequences, T tokens, M = B * T positions, C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..evaluation.divergence import final_hidden
from .loop import TrainingState, mixed_precision, native_precision, product_dtype
from .losses import Weighted, backward_logits, hidden_term
from .packing import Batch, RawBatch
from .replay import Replay
from .target_cache import Arrays
from .targets import NextToken
from .teacher_logits import TeacherLogits


@dataclass(frozen=True)
class LossWeights:
    """Weights of KL from the teacher, of cross-entropy with the text, and of the final hidden states' squared error."""

    kl: float = 0.0
    ce: float = 0.0
    hidden: float = 0.0


class StudentLoss:
    """The LossStep of a student: the weighted terms, each a mean over positions.

    A student of one dtype computes in it (an fp32 one multiplies in bf16 on a GPU); with fp32 weights among bf16 ones it
    runs under autocast. teacher may be None where only ce counts. end_token ends documents that do not see each other, in
    batches that do not say where documents start. replay, where given, records the student's part of a step.
    """

    def __init__(
        self,
        student: HydraHeadForCausalLM,
        teacher: TeacherLogits | None,
        weights: LossWeights,
        *,
        end_token: int | None = None,
        replay: Replay | None = None,
    ) -> None:
        self._student, self._teacher, self._weights = student, teacher, weights
        self._end_token, self._replay = end_token, replay
        self._device = student.lm_head.weight.device
        self._dtype = student.dtype
        mixed = len({parameter.dtype for parameter in student.parameters()}) > 1
        self._precision = mixed_precision if mixed else native_precision
        self._held: Arrays = {}

    def __call__(self, raw: RawBatch) -> Tensor:
        """Adds the gradients of a batch on the CPU; returns its loss."""
        batch = Batch.of(raw, self._device, self._end_token)
        arrays = {} if self._teacher is None else self._teacher.arrays(batch)
        # Packed documents are of other lengths in every batch.
        if self._replay is None or batch.bounds_N is not None:
            return self._step(batch, arrays)
        held = self._hold({**arrays, "labels": batch.labels_M})

        def work(ids_BT: Tensor) -> Tensor:
            return self._step(replace(batch, ids_BT=ids_BT, labels_M=held["labels"]), held)

        # What the model depends on besides its parameters.
        key = (batch.num_labels, self._student.config.fa["rope_share"])
        return self._replay(work, batch.ids_BT, key)

    def release(self) -> None:
        """Frees what a replayed step holds; the next steps record it anew."""
        if self._replay is not None:
            self._replay.forget()
            self._held = {}

    def _hold(self, arrays: Arrays) -> Arrays:
        """The arrays in tensors that are the same ones in every step of a shape."""
        if {k: v.shape for k, v in arrays.items()} != {k: v.shape for k, v in self._held.items()}:
            with torch.inference_mode(False):
                self._held = {name: torch.empty_like(value) for name, value in arrays.items()}
        for name, value in arrays.items():
            self._held[name].copy_(value)
        return self._held

    def _step(self, batch: Batch, arrays: Arrays) -> Tensor:
        weights, terms = self._weights, []
        with self._precision(self._device, self._dtype):
            ours_MC = final_hidden(self._student, batch.ids_BT, batch.bounds_N)
        if weights.kl and self._teacher is not None:
            terms.append(Weighted(self._teacher.target(arrays), weights.kl))
        if weights.ce:
            share = len(ours_MC) / max(1, batch.num_labels)
            terms.append(Weighted(NextToken(batch.labels_M), weights.ce * share))
        error, error_grad_MC = None, None
        if weights.hidden:
            error, error_grad_MC = hidden_term(ours_MC, arrays["hidden"], weights.hidden)
        dtype = product_dtype(self._device, self._dtype)
        loss = backward_logits(ours_MC, self._student.lm_head, terms, dtype, error_grad_MC)
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
