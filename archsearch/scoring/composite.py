"""From the effects of single heads to one score a head, and the scores file.

Legend: S sub-probes, P clean/corrupt pairs a sub-probe, L layers, H query heads a layer.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..rundir import replacing

SCHEMA = 1

Rows = list[list[float]]
"""A number a head as [layers][heads]."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Capability:
    """The evidence on one capability: mean receiver effect, sender effect where measured, consistency."""

    recv: Rows
    send: Rows | None
    consistency: Rows


@dataclass(frozen=True)
class HeadScores:
    """One score a head (higher: needs full attention more) and what it was made from.

    spread is the standard error of the composite over the pairs, in the composite's unit.
    """

    method: str
    composite: Rows
    spread: Rows
    capabilities: dict[str, Capability] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tables: dict[str, Rows | None] = {"composite": self.composite, "spread": self.spread}
        for name, capability in self.capabilities.items():
            tables |= {f"{name}.{key}": rows for key, rows in vars(capability).items()}
        for name, rows in tables.items():
            if rows is not None:
                _check_rows(name, rows, len(self.composite), len(self.composite[0]))

    @classmethod
    def plain(cls, method: str, scores_LH: Tensor) -> HeadScores:
        """Scores that no capability stands behind, such as single-replacement KL. Spread is zero."""
        return cls(method, _rows(scores_LH), _rows(torch.zeros_like(scores_LH)))

    def to_json(self) -> dict[str, Any]:
        """The scores as plain JSON data, with their schema number."""
        return {
            "schema": SCHEMA,
            "method": self.method,
            "capabilities": {name: dict(vars(value)) for name, value in self.capabilities.items()},
            "composite": self.composite,
            "spread": self.spread,
        }

    @classmethod
    def from_json(cls, data: Any) -> HeadScores:
        """Reads to_json's form. Raises ValueError on another schema or malformed data."""
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        if found != SCHEMA:
            raise ValueError(f"scores: schema {found!r} is not {SCHEMA}")
        try:
            capabilities = {
                name: Capability(**value) for name, value in data["capabilities"].items()
            }
            return cls(data["method"], data["composite"], data["spread"], capabilities)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"scores: malformed ({error})") from error

    def save(self, path: Path) -> None:
        """Writes scores.json; a reader sees the old file or the whole new one."""
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> HeadScores:
        """Reads a file written by save. Raises ValueError where it is none."""
        return cls.from_json(json.loads(path.read_text()))


def composite(
    effects: Mapping[str, Tensor], *, threshold: float, method: str = "causal"
) -> HeadScores:
    """Composite score of every head (HydraHead, arXiv 2606.20097, Eq. 11-12).

    effects: for each capability, the receiver effects of its pairs, [S, P, L, H]; or [P, L, H], and then
    every pair is a sub-probe of its own. Rows of NaN are pairs that say nothing and are left out.
    s_c = max(recv, send) * k_c with k_c the share of sub-probes whose mean effect exceeds threshold;
    min-max per capability; mean over capabilities. Raises ValueError where there is no capability.
    """
    if not effects:
        raise ValueError("scores: no capability to score heads by")
    capabilities: dict[str, Capability] = {}
    parts, errors = [], []
    for name, raw in effects.items():
        recv_LH, consistency_LH, error_LH = _summarise(name, raw, threshold)
        capabilities[name] = Capability(_rows(recv_LH), None, _rows(consistency_LH))
        score_LH = recv_LH * consistency_LH
        width = float(score_LH.max() - score_LH.min())
        scale = 1 / width if width > 0 else 0.0
        parts.append((score_LH - score_LH.min()) * scale)
        errors.append(error_LH * consistency_LH * scale)
    spread_LH = torch.stack(errors).square().sum(0).sqrt() / len(errors)
    return HeadScores(method, _rows(torch.stack(parts).mean(0)), _rows(spread_LH), capabilities)


def _summarise(name: str, raw: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """Mean effect, consistency and standard error of the mean, each [L, H], of one capability."""
    effects_SPLH = raw.double().cpu()
    if effects_SPLH.ndim == 3:
        effects_SPLH = effects_SPLH.unsqueeze(1)
    if effects_SPLH.ndim != 4:
        raise ValueError(f"scores: effects of {name} have shape {tuple(raw.shape)}")
    usable_SP = effects_SPLH.isfinite().all(-1).all(-1)
    if not usable_SP.any():
        _LOG.warning("scores: no pair of %s is usable; its heads all score 0", name)
        zero_LH = effects_SPLH.new_zeros(effects_SPLH.shape[2:])
        return zero_LH, zero_LH, zero_LH
    pairs_NLH = effects_SPLH[usable_SP]
    probes_SLH = torch.stack(
        [
            probe[usable].mean(0)
            for probe, usable in zip(effects_SPLH, usable_SP, strict=True)
            if usable.any()
        ]
    )
    count = len(pairs_NLH)
    error_LH = pairs_NLH.std(0, correction=min(1, count - 1)) / math.sqrt(count)
    return probes_SLH.mean(0), (probes_SLH > threshold).double().mean(0), error_LH


def _rows(values_LH: Tensor) -> Rows:
    """[L, H] as nested lists, rounded to 9 significant digits so that files stay small."""
    return [[float(f"{value:.9g}") for value in row] for row in values_LH.tolist()]


def _check_rows(name: str, rows: Any, num_layers: int, num_heads: int) -> None:
    is_table = isinstance(rows, Sequence) and len(rows) == num_layers
    if not is_table or any(len(row) != num_heads for row in rows):
        raise ValueError(f"scores: {name} is not {num_layers} x {num_heads}")
    for value in (value for row in rows for value in row):
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"scores: {name} holds {value!r}, which is no finite number")
