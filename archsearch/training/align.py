"""Stage 1: trains every twin of the supernet to put out what its head puts out, all layers in one pass.

The teacher runs once a batch; at each layer the twins read the same input as its heads, and their
gradients are taken on the spot, so that memory does not grow with the number of layers.

Shapes: L layers, B sequences, T tokens, C hidden size, H query heads, D head_dim.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..attention.rotary import PositionEmbeddings
from ..config import SupernetConfig
from ..models.supernet import Supernet
from ..models.teacher import Teacher
from ..progress import Progress, ignore_progress
from .calibrate import calibrate
from .checkpoint import load_checkpoint, save_checkpoint
from .loop import (
    BatchSource,
    Plan,
    TrainingState,
    full_precision,
    mixed_precision,
    train,
)
from .taps import visit_layers
from .twin_error import TwinErrors, as_o_proj_sees, measure_twins, output_roots

CALIBRATION_TOKENS = 8192
HELDOUT_TOKENS = 32_768
"""Most held-out tokens that the final error is measured on."""


def align(
    teacher: Teacher,
    supernet: Supernet,
    batches: BatchSource,
    config: SupernetConfig,
    *,
    checkpoint: Path,
    heldout_NT: Tensor,
    seed: int = 0,
    progress: Progress = ignore_progress,
) -> Supernet:
    """Calibrates and trains migrated twins in place on about config.tokens tokens, and returns them.

    batches(step) gives the batches [B, T] from that step on. Where checkpoint exists, training goes on from
    it and ends exactly where it would have; it is written every config.checkpoint_minutes, and stays
    for the caller to delete once the supernet is saved. heldout_NT is what the final errors in
    supernet.meta["metrics"] are measured on. progress counts steps.

    Raises NonFiniteLoss, ConfigError where the checkpoint belongs to other settings, and
    EnvironmentFault where it is damaged.
    """
    first_BT = next(batches(0))
    plan = Plan(
        steps=max(1, round(config.tokens / first_BT.numel())),
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps,
    )
    identity = _identity(teacher, config, first_BT, seed)
    supernet.to(device=teacher.device, dtype=torch.float32).requires_grad_(True)
    groups = [list(twin.parameters()) for twin in supernet.twins]
    state = TrainingState(dict(supernet.named_parameters()), groups)
    if checkpoint.exists():
        extra = load_checkpoint(state, checkpoint, identity=identity)
        variance_LH = extra["variance"].to(teacher.device)
    else:
        sample_NT = first_BT[: max(1, CALIBRATION_TOKENS // first_BT.shape[1])]
        calibrate(teacher, supernet, sample_NT)
        variance_LH = measure_twins(teacher, supernet, sample_NT).variance_LH
    save_state = _Saver(checkpoint, identity, variance_LH)
    train(
        state,
        plan,
        AlignmentLoss(teacher, supernet, variance_LH),
        batches,
        save=save_state,
        save_seconds=config.checkpoint_minutes * 60,
        progress=progress,
    )
    supernet.requires_grad_(False)
    rows = max(1, HELDOUT_TOKENS // heldout_NT.shape[1])
    errors = measure_twins(teacher, supernet, heldout_NT[:rows])
    supernet.meta |= {"tokens": plan.steps * first_BT.numel(), "seed": seed}
    supernet.meta["metrics"] = error_report(errors) | {"losses": state.losses}
    return supernet


class AlignmentLoss:
    """The LossStep of alignment: mean over heads of squared error over variance, as o_proj sees both."""

    def __init__(self, teacher: Teacher, supernet: Supernet, variance_LH: Tensor) -> None:
        self._teacher = teacher
        self._twins = supernet.twins
        self._roots = output_roots(teacher.model)
        self._weights_LH = 1 / (variance_LH * variance_LH.shape[1])
        self._loss_L: list[Tensor] = []

    def __call__(self, ids_BT: Tensor) -> Tensor:
        """Adds the gradients of a batch; returns the mean over layers."""
        device = self._teacher.device
        self._loss_L = []
        if device.type == "cuda":
            ids_BT = ids_BT.pin_memory()
        with torch.no_grad(), mixed_precision(device, self._teacher.model.dtype):
            visit_layers(self._teacher.model, ids_BT.to(device, non_blocking=True), self._layer)
        return torch.stack(self._loss_L).mean()

    def _layer(
        self, layer: int, x_BTC: Tensor, position_embeddings: PositionEmbeddings, o_BTHD: Tensor
    ) -> None:
        with torch.enable_grad():
            twin_BTHD = self._twins[layer](x_BTC, position_embeddings)
            with full_precision(x_BTC.device):
                error_HMD = as_o_proj_sees(twin_BTHD.float() - o_BTHD.float(), self._roots[layer])
                squared_H = error_HMD.square().sum(-1).mean(-1)
                loss = (squared_H * self._weights_LH[layer]).sum()
                loss.backward()
        self._loss_L.append(loss.detach())


class _Saver:
    """Writes the checkpoints of one alignment."""

    def __init__(self, path: Path, identity: str, variance_LH: Tensor) -> None:
        self._path = path
        self._identity = identity
        self._variance_LH = variance_LH

    def __call__(self, state: TrainingState) -> None:
        extra = {"variance": self._variance_LH}
        save_checkpoint(state, self._path, identity=self._identity, extra=extra)


def error_report(errors: TwinErrors) -> dict[str, Any]:
    """Relative errors as plain data: over all heads, the median of each layer, and every head."""
    relative_LH = errors.relative_LH.cpu()
    return {
        "error_median": float(relative_LH.median()),
        "error_mean": float(relative_LH.mean()),
        "error_by_layer": relative_LH.median(1).values.tolist(),
        "error_by_head": relative_LH.tolist(),
    }


def _identity(teacher: Teacher, config: SupernetConfig, first_BT: Tensor, seed: int) -> str:
    """What a checkpoint depends on, in words; the first batch stands for the data."""
    settings = config.model_dump(exclude={"source", "checkpoint_minutes", "rank"})
    return json.dumps(
        {
            "teacher": teacher.fingerprint,
            "batch": list(first_BT.shape),
            "data": int(first_BT.sum()),
            "seed": seed,
            **settings,
        },
        sort_keys=True,
    )
