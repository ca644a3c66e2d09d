"""Heads to keep as an integer program over damages that add up. No torch.

The damage of a head map is the sum over its replaced heads, each head's measured with that head alone replaced, as in Puzzle
(arXiv 2411.19146). Where damages of whole KV groups were measured too, the heads of a group that goes as a whole count
as much as the group: of head and group, x and y say what is kept, and the program maximises

    sum_h d_h x_h + sum_g (D_g - sum_{h in g} d_h) y_g    with x_h <= y_g <= sum_{h in g} x_h,

the damage avoided. With a budget of heads alone and no groups that is the top of a list; with groups, or a budget of bytes, it is not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..headmap import Head, ModelShape

Table = Sequence[Sequence[float]]
"""Damages in one unit: [layers][heads], or [layers][KV heads] of whole groups."""

Row = NDArray[np.float64]


@dataclass(frozen=True)
class Budget:
    """Exactly num_heads full-attention heads, or at most max_bytes of cache: one of the two."""

    num_heads: int | None = None
    max_bytes: int | None = None
    kv_head_bytes: int = 0
    """Keys and values of a KV head that any full-attention head reads."""
    state_bytes: int = 0
    """State of a head that is replaced."""


def solve(
    shape: ModelShape,
    heads: Table,
    budget: Budget,
    *,
    groups: Table | None = None,
    whole_groups: bool = False,
) -> frozenset[Head]:
    """The heads to keep within the budget that avoid most damage.

    whole_groups keeps all heads of a KV group or none; num_heads is then a multiple of a group. The answer is optimal.
    Raises ValueError where no choice keeps the budget.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # Loads in most of a second.

    d_H = np.array(heads, dtype=np.float64).ravel()
    num_groups = shape.num_layers * shape.num_kv_heads
    member_GH = np.kron(np.eye(num_groups), np.ones(shape.group_size))
    extra_G = np.zeros(num_groups)
    if groups is not None:
        extra_G = np.array(groups, dtype=np.float64).ravel() - member_GH @ d_H
    eye_HH = np.eye(len(d_H))
    # A head that is kept needs its group; a group that is kept needs a head, or all of them.
    constraints = [
        LinearConstraint(np.hstack([eye_HH, -member_GH.T]), -np.inf, 0),
        LinearConstraint(
            np.hstack([-member_GH, np.eye(num_groups) * (shape.group_size if whole_groups else 1)]),
            -np.inf,
            0,
        ),
        _limit(budget, len(d_H), num_groups),
    ]
    found = milp(
        -np.concatenate([d_H, extra_G]) / _scale(d_H, extra_G),
        integrality=np.ones(len(d_H) + num_groups),
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        raise ValueError(f"integer program of heads: {found.message}")
    kept = np.flatnonzero(np.round(found.x[: len(d_H)]))
    return frozenset((int(i) // shape.num_heads, int(i) % shape.num_heads) for i in kept)


def _limit(budget: Budget, num_heads: int, num_groups: int) -> object:
    from scipy.optimize import LinearConstraint

    if budget.max_bytes is None:
        if budget.num_heads is None:
            raise ValueError("a budget of heads or of bytes is needed")
        weights = np.concatenate([np.ones(num_heads), np.zeros(num_groups)])
        return LinearConstraint(weights, budget.num_heads, budget.num_heads)
    # In units of a KV head: bytes beside ones are hard on a solver's tolerances.
    unit = max(1, budget.kv_head_bytes)
    weights = np.concatenate(
        [
            np.full(num_heads, -budget.state_bytes / unit),
            np.full(num_groups, budget.kv_head_bytes / unit),
        ]
    )
    most = (budget.max_bytes - num_heads * budget.state_bytes) / unit
    return LinearConstraint(weights, -np.inf, most)


def _scale(*parts: Row) -> float:
    """The largest number: damages of 1e-4 would drown in the solver's tolerances."""
    return float(max((np.abs(part).max() for part in parts), default=0.0)) or 1.0


def shares_of_total(tables: Sequence[tuple[Table, Table]]) -> tuple[Table, Table]:
    """Damages of several kinds, of heads and of groups, added up: each kind as a share of what all its heads do together."""
    totals = [math.fsum(abs(value) for row in heads for value in row) or 1.0 for heads, _ in tables]

    def added(which: int) -> Table:
        return [
            [
                math.fsum(
                    pair[which][layer][index] / total
                    for pair, total in zip(tables, totals, strict=True)
                )
                for index in range(len(row))
            ]
            for layer, row in enumerate(tables[0][which])
        ]

    return added(0), added(1)
