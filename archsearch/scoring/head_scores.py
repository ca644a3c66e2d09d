"""Scores of heads and of KV groups, whatever measured them, and the scores file.

Legend: L layers, H query heads a layer, G KV heads a layer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..rundir import replacing

SCHEMA = 2
"""Files of schema 1 may lack groups."""

Rows = list[list[float]]
"""A number a head as [layers][heads], or a KV group as [layers][KV heads]."""


@dataclass(frozen=True)
class Capability:
    """The evidence on one capability, [layers][heads] each.

    recv: mean receiver effect. send: mean sender effect, None where not measured. consistency: share of sub-probes
    with an effect above the threshold. score: what the capability adds to the composite, before it is scaled. spreads: the
    standard error of a mean over pairs. probes: pairs kept and drawn of each sub-probe.
    """

    recv: Rows
    send: Rows | None
    consistency: Rows
    score: Rows | None = None
    recv_spread: Rows | None = None
    send_spread: Rows | None = None
    probes: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class HeadScores:
    """One score a head (higher: needs full attention more), one a KV group, and what they were made from.

    spread is the standard error of the composite over pairs or sequences, in the composite's unit; zero where it was
    not measured. groups is the score of keeping a whole KV group, [layers][KV heads].
    """

    method: str
    composite: Rows
    spread: Rows
    groups: Rows
    capabilities: dict[str, Capability] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layers, heads = len(self.composite), len(self.composite[0])
        _check_rows("composite", self.composite, layers, heads)
        _check_rows("spread", self.spread, layers, heads)
        _check_rows("groups", self.groups, layers, len(self.groups[0]) if self.groups else 0)
        for name, capability in self.capabilities.items():
            for key, rows in vars(capability).items():
                if rows is not None and key != "probes":
                    _check_rows(f"{name}.{key}", rows, layers, heads)
            _check_counts(f"{name}.probes", capability.probes)

    @classmethod
    def of(
        cls,
        method: str,
        scores_LH: Tensor,
        groups_LG: Tensor,
        spread_LH: Tensor | None = None,
    ) -> HeadScores:
        """Scores that no capability stands behind, such as single-replacement KL."""
        spread_LH = torch.zeros_like(scores_LH) if spread_LH is None else spread_LH
        return cls(method, rows_of(scores_LH), rows_of(spread_LH), rows_of(groups_LG))

    def to_json(self) -> dict[str, Any]:
        """The scores as plain JSON data, with their schema number."""
        return {"schema": SCHEMA} | asdict(self)

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
            return cls(
                data["method"], data["composite"], data["spread"], data["groups"], capabilities
            )
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"scores: malformed ({error})") from error

    def save(self, path: Path) -> None:
        """Writes a scores file; a reader sees the old file or the whole new one."""
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> HeadScores:
        """Reads a file written by save. Raises ConfigError where it is none, or one of another schema."""
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ConfigError(f"{path}: damaged or of another version ({error})") from error


def groups_of(scores_LH: Tensor, num_kv_heads: int) -> Tensor:
    """The largest score among the heads of each KV group, [L, G]: for methods that do not measure whole groups."""
    groups_LG: Tensor = scores_LH.unflatten(-1, (num_kv_heads, -1)).amax(-1)  # type: ignore[no-untyped-call, unused-ignore]
    return groups_LG


def rows_of(values: Tensor) -> Rows:
    """[L, H] or [L, G] as nested lists, rounded to 9 significant digits so that files stay small."""
    # Adding 0.0 takes the sign off a zero.
    return [[float(f"{value:.9g}") + 0.0 for value in row] for row in values.tolist()]


def _check_rows(name: str, rows: Any, num_layers: int, num_heads: int) -> None:
    is_table = isinstance(rows, Sequence) and len(rows) == num_layers
    if not is_table or any(len(row) != num_heads for row in rows):
        raise ValueError(f"scores: {name} is not {num_layers} x {num_heads}")
    for value in (value for row in rows for value in row):
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"scores: {name} holds {value!r}, which is no finite number")


def _check_counts(name: str, probes: Any) -> None:
    for count in probes.values():
        if not all(isinstance(count[key], int) for key in ("kept", "drawn")):
            raise ValueError(f"scores: {name} does not count pairs kept and drawn")
