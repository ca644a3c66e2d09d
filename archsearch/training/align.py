"""Stage 1: trains every twin of the supernet to put out what its head puts out, all layers in one pass.

The teacher runs once a batch; at each layer the twins read the same input as its heads, and their
gradients are taken on the spot, so that memory does not grow with the number of layers.

Shapes: L layers, B sequences, T tokens, C hidden size, H query heads, D head_dim.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import SupernetConfig
from ..models.supernet import Supernet
from ..models.teacher import Teacher
from ..progress import Progress, ignore_progress
from .alignment_loss import AlignmentLoss
from .calibrate import calibrate
from .checkpoint import read_checkpoint, save_checkpoint
from .head_errors import HeadErrors
from .loop import BatchSource, Plan, StepHook, TrainingState, train
from .replay import Replay
from .twin_error import TwinErrors, measure_twins

__all__ = ["AlignmentLoss", "align", "error_report"]

CALIBRATION_TOKENS = 8192
HELDOUT_TOKENS = 32_768
"""Most held-out tokens that the final error is measured on."""
ROWS_A_LINE = 4
"""A line is said of every so many rows of errors."""


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
    say: Callable[[str], None] | None = None,
) -> Supernet:
    """Calibrates and trains migrated twins in place on about config.tokens tokens, and returns them.

    batches(step) gives the batches [B, T] from that step on. Where checkpoint exists, training goes on from
    it and ends exactly where it would have; it is written every config.checkpoint_minutes, and stays
    for the caller to delete once the supernet is saved. heldout_NT is what the final errors in
    supernet.meta["metrics"] are measured on; its "history" has the errors of training by head and time.
    progress counts steps, say gets a line on the heads' errors now and then.

    Raises NonFiniteLoss, ConfigError where the checkpoint belongs to other settings, and
    EnvironmentFault where it is damaged.
    """
    first_BT = next(batches(0))
    plan = Plan(
        steps=max(1, round(config.tokens / first_BT.numel())),
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps,
    )
    supernet.to(device=teacher.device, dtype=torch.float32).requires_grad_(True)
    groups = [list(twin.parameters()) for twin in supernet.twins]
    state = TrainingState(dict(supernet.named_parameters()), groups)
    shape = (teacher.shape.num_layers, teacher.shape.num_heads)
    errors = HeadErrors(shape, plan.steps, config, teacher.device)
    saved = _Checkpoints(checkpoint, _identity(teacher, config, first_BT, seed), errors)
    variance_LH = saved.resume(state, teacher.device)
    if variance_LH is None:
        variance_LH = _calibrate(teacher, supernet, config, first_BT, seed)
    saved.variance_LH = variance_LH
    before_step = _telling(errors, first_BT.numel(), say)
    on_gpu = config.replay and teacher.device.type == "cuda"
    replay = Replay(list(state.parameters.values())) if on_gpu else None
    train(
        state,
        plan,
        AlignmentLoss(teacher, supernet, variance_LH, errors, replay),
        batches,
        save=saved.save,
        save_seconds=config.checkpoint_minutes * 60,
        before_step=before_step,
        progress=progress,
    )
    before_step(plan.steps, plan.steps)
    supernet.requires_grad_(False)
    report = _final_errors(teacher, supernet, heldout_NT)
    report |= {"losses": state.losses, "history": errors.history(first_BT.numel())}
    tokens = plan.steps * first_BT.numel()
    init = config.init.model_dump(mode="json")
    supernet.meta |= {"tokens": tokens, "seed": seed, "init": init, "metrics": report}
    return supernet


def _calibrate(
    teacher: Teacher, supernet: Supernet, config: SupernetConfig, first_BT: Tensor, seed: int
) -> Tensor:
    """Brings fresh twins into place by some rows of the first batch, and returns the variances of the heads there, [L, H]."""
    sample_NT = first_BT[: max(1, CALIBRATION_TOKENS // first_BT.shape[1])]
    calibrate(teacher, supernet, sample_NT, config.init, seed=seed)
    return measure_twins(teacher, supernet, sample_NT).variance_LH


def _telling(errors: HeadErrors, batch_tokens: int, say: Callable[[str], None] | None) -> StepHook:
    """What is called before each step: it keeps the errors, and says a line of them now and then."""

    def before_step(step: int, steps: int) -> None:
        rows = len(errors.rows)
        errors.before_step(step)
        if say is not None and len(errors.rows) > rows and not len(errors.rows) % ROWS_A_LINE:
            say(errors.line(batch_tokens))

    return before_step


def _final_errors(teacher: Teacher, supernet: Supernet, heldout_NT: Tensor) -> dict[str, Any]:
    """The report of errors on held-out rows, as many as HELDOUT_TOKENS allow."""
    rows = max(1, HELDOUT_TOKENS // heldout_NT.shape[1])
    return error_report(measure_twins(teacher, supernet, heldout_NT[:rows]))


class _Checkpoints:
    """Reads and writes the checkpoints of one alignment."""

    def __init__(self, path: Path, identity: str, errors: HeadErrors) -> None:
        self._path, self._identity, self._errors = path, identity, errors
        self.variance_LH: Tensor | None = None

    def resume(self, state: TrainingState, device: torch.device) -> Tensor | None:
        """Fills state and errors from the file and returns the heads' variances; None where there is no file."""
        if not self._path.exists():
            return None
        extra = read_checkpoint(state, self._path, identity=self._identity)
        self._errors.restore(extra.tensors, extra.notes)
        return extra.tensors["variance"].to(device)

    def save(self, state: TrainingState) -> None:
        """Writes the file."""
        assert self.variance_LH is not None
        tensors, notes = self._errors.save()
        save_checkpoint(
            state,
            self._path,
            identity=self._identity,
            extra=tensors | {"variance": self.variance_LH},
            notes=notes,
        )


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
    settings = config.model_dump(exclude={"source", "checkpoint_minutes", "rank", "replay"})
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
