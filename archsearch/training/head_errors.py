"""The training error of every head as an alignment goes on, and the layers that it has finished with.

Shapes: L layers, n of them still trained, H query heads.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..config import SupernetConfig

ROWS = 20
"""About how many rows a run keeps."""
STALL_ROWS = ROWS // 10
"""Rows over which a layer's error has to fall: a tenth of the steps."""
WORST = 3
"""Heads that a line names."""


@dataclass(frozen=True)
class Row:
    """Errors over variance by [layer][head], the mean over the steps since the row before; of a layer at rest its last."""

    step: int
    error_by_head: list[list[float]]

    @property
    def flat(self) -> list[float]:
        """Every head's error, layer after layer."""
        return [error for layer in self.error_by_head for error in layer]

    def layer_mean(self, layer: int) -> float:
        """The mean over a layer's heads."""
        return statistics.fmean(self.error_by_head[layer])


@dataclass
class HeadErrors:
    """Sums errors on the device, and makes a row of them about ROWS times in `steps` steps.

    config.stop_below and stop_gain say when a row ends the training of a layer. save and restore make a resumed run
    stop the same layers at the same steps.
    """

    shape: tuple[int, int]
    """Layers and heads."""
    steps: int
    config: SupernetConfig
    device: torch.device
    rows: list[Row] = field(default_factory=list)
    stopped: dict[int, int] = field(default_factory=dict)
    """Layers that are trained no further, and the steps that each had."""

    def __post_init__(self) -> None:
        self._sum_LH = torch.zeros(self.shape, device=self.device)
        self._since = 0
        self._index: tuple[tuple[int, ...], Tensor] | None = None
        self._every = max(1, self.steps // ROWS)

    @property
    def active(self) -> list[int]:
        """Layers that are still trained."""
        return [layer for layer in range(self.shape[0]) if layer not in self.stopped]

    @property
    def resting_sum(self) -> float:
        """The last errors of the layers at rest, summed: what they add to the sum of the layers' losses."""
        return sum(self.rows[-1].layer_mean(layer) for layer in self.stopped)

    def add(self, layers: Sequence[int], relative_nH: Tensor) -> None:
        """Counts in the errors of the layers still trained on one batch."""
        if len(layers) == self.shape[0]:
            self._sum_LH += relative_nH
        elif layers:
            self._sum_LH.index_add_(0, self._places(tuple(layers)), relative_nH)
        self._since += 1

    def _places(self, layers: tuple[int, ...]) -> Tensor:
        """The layers as an index on the device, moved there once: every copy waits for all queued steps."""
        if self._index is None or self._index[0] != layers:
            self._index = layers, torch.tensor(layers, device=self.device)
        return self._index[1]

    def before_step(self, step: int, _: int = 0) -> None:
        """A StepHook: makes a row where one is due, which waits for the device, and stops layers by it."""
        if self._since and (step % self._every == 0 or step == self.steps):
            self._close_row(step)

    def _close_row(self, step: int) -> None:
        found = (self._sum_LH / self._since).tolist()
        for layer in self.stopped:
            found[layer] = self.rows[-1].error_by_head[layer]
        self.rows.append(Row(step, found))
        self._sum_LH.zero_()
        self._since = 0
        for layer in self.active:
            if self._is_done(layer):
                self.stopped[layer] = step

    def _is_done(self, layer: int) -> bool:
        below, gain = self.config.stop_below, self.config.stop_gain
        now = self.rows[-1].layer_mean(layer)
        if below is not None and now < below:
            return True
        if gain is None or len(self.rows) <= STALL_ROWS:
            return False
        return now > (1 - gain) * self.rows[-1 - STALL_ROWS].layer_mean(layer)

    def save(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and plain data that restore takes."""
        notes = {
            "rows": [asdict(row) for row in self.rows],
            "stopped": {str(layer): step for layer, step in self.stopped.items()},
            "since": self._since,
        }
        return {"error_sums": self._sum_LH}, notes

    def restore(self, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
        """Goes on where save was called."""
        self._sum_LH.copy_(tensors["error_sums"])
        self.rows[:] = [Row(**row) for row in notes["rows"]]
        self.stopped.clear()
        self.stopped.update({int(layer): step for layer, step in notes["stopped"].items()})
        self._since = notes["since"]

    def line(self, step_tokens: int) -> str:
        """The last row in words; step_tokens are those of one step."""
        row = self.rows[-1]
        heads = self.shape[1]
        worst = sorted(range(len(row.flat)), key=lambda place: -row.flat[place])[:WORST]
        named = ", ".join(f"{i // heads}.{i % heads} {row.flat[i]:.2f}" for i in worst)
        rest = f"; layers at rest: {len(self.stopped)}" if self.stopped else ""
        return (
            f"alignment at {row.step * step_tokens:,} tokens: median error {statistics.median(row.flat):.3f}, "
            f"worst heads (layer.head) {named}{rest}"
        )

    def history(self, step_tokens: int) -> dict[str, Any]:
        """All rows as plain data: tokens of each, and errors by [row][layer][head] to four digits."""
        return {
            "tokens": [row.step * step_tokens for row in self.rows],
            "error_by_head": [
                [[float(f"{error:.4g}") for error in layer] for layer in row.error_by_head]
                for row in self.rows
            ],
            "stopped_tokens": {
                str(layer): step * step_tokens for layer, step in sorted(self.stopped.items())
            },
        }
