"""What a history holds, as arrays that grow with it: a proposal reads only what is new since the one before. Numpy only.

Shapes: N evaluated maps, U units, D objectives, C measured constraints.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from .base import Evaluated
from .units import Bits, Row, Units

LEAST_VIOLATION = -1e9
"""A bound at infinity is met by all, infinitely."""
FIRST_ROWS = 64


@dataclass(frozen=True)
class Evidence:
    """Evaluated maps as arrays, by candidate number; they hold until the archive reads on."""

    candidates: tuple[int, ...]
    shares_NU: Row
    losses_ND: Row
    violations_NC: Row
    """Only of constraints that need an evaluation; feasible where none is positive."""
    feasible_N: Bits


class Rows:
    """Rows of numbers that are put in one at a time, mostly near the end."""

    def __init__(self, width: int) -> None:
        self._buffer = np.empty((FIRST_ROWS, width))
        self._count = 0

    @property
    def values(self) -> Row:
        """All rows, without a copy."""
        return self._buffer[: self._count]

    def insert(self, place: int, row: Row) -> None:
        """Puts a row before the one at that place."""
        if self._count == len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.empty_like(self._buffer)])
        self._count += 1
        self._buffer[place + 1 : self._count] = self._buffer[place : self._count - 1]
        self._buffer[place] = row


class Archive:
    """Reads histories. signs_D: 1 for each objective that is a loss, -1 for each gain; measured: the places of the constraints that
    need an evaluation.
    """

    def __init__(self, units: Units, signs_D: Row, measured: Sequence[int]) -> None:
        self._units, self._signs_D, self._measured = units, signs_D, list(measured)
        self._forget()

    def _forget(self) -> None:
        self._history: list[Evaluated] = []
        self._keys: set[bytes] = set()
        self._candidates: list[int] = []
        self._shares = Rows(self._units.count)
        self._losses = Rows(len(self._signs_D))
        self._violations = Rows(len(self._measured))
        self._worst = Rows(1)

    @property
    def keys(self) -> Set[bytes]:
        """Units.key of every map of the history that has one."""
        return self._keys

    def read(self, history: Sequence[Evaluated]) -> None:
        """Takes in what is new; a history that does not begin with the one before is read from its start."""
        # The same objects as a rule, so that nothing is compared number by number.
        if list(history[: len(self._history)]) != self._history:
            self._forget()
        for evaluated in history[len(self._history) :]:
            self._add(evaluated)

    def _add(self, evaluated: Evaluated) -> None:
        self._history.append(evaluated)
        (shares_U,) = self._units.of_maps([evaluated.head_map])
        if (key := self._units.key(shares_U)) is not None:
            self._keys.add(key)
        if evaluated.values is None:
            return
        violations = np.maximum(np.array(evaluated.violations, np.float64), LEAST_VIOLATION)
        place = bisect(self._candidates, evaluated.candidate)
        self._candidates.insert(place, evaluated.candidate)
        self._shares.insert(place, shares_U)
        self._losses.insert(place, np.array(evaluated.values, np.float64) * self._signs_D)
        self._violations.insert(place, violations[self._measured])
        self._worst.insert(place, violations.max(initial=LEAST_VIOLATION, keepdims=True))

    def __len__(self) -> int:
        """Maps that have values."""
        return len(self._candidates)

    def evidence(self) -> Evidence:
        """Maps that have values."""
        return Evidence(
            tuple(self._candidates),
            self._shares.values,
            self._losses.values,
            self._violations.values,
            self._worst.values[:, 0] <= 0,
        )
