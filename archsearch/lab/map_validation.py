"""How well a process over head maps tells figures of maps that it has not seen: held-out folds, best maps left out, fewer maps.

Figures are compared as what the process is fitted to: logarithms. Shapes: N maps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from .map_process import Array, Described, Descriptor, Hyperparameters, Process, fit

BANDS = (0.0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Bounds of FA shares, each band with its lower one; the last one with both."""
FOLDS = 5
BEST = 0.1
"""Share of a band's maps that is left out as its best."""
LEAST_MAPS = 20
"""Fewer maps have no rank correlation worth telling."""

Index = NDArray[np.int64]


@dataclass(frozen=True)
class Agreement:
    """How foretold figures agree with measured ones: Spearman's correlation, root mean squared and mean error (foretold less measured)."""

    maps: int
    spearman: float
    rmse: float
    bias: float

    @classmethod
    def of(cls, foretold_N: Array, measured_N: Array) -> Agreement:
        """Of two or more maps."""
        error_N = foretold_N - measured_N
        rank = float(spearmanr(foretold_N, measured_N).statistic)
        rmse = float(np.sqrt((error_N**2).mean()))
        return cls(len(error_N), rank, rmse, float(error_N.mean()))


@dataclass(frozen=True)
class Subject:
    """One figure of N maps, and what maps are described by."""

    descriptor: Descriptor
    maps: Described
    figure_N: Array
    share_N: Array
    family_N: NDArray[np.uint8]
    families: tuple[str, ...]

    def groups(self) -> dict[str, NDArray[np.bool_]]:
        """Which maps belong to all, to each band of FA shares, and to each family."""
        found = {"all": np.ones(len(self.maps), dtype=np.bool_)}
        for name, band_N in self.bands().items():
            found[name] = band_N
        for place, family in enumerate(self.families):
            found[f"family {family}"] = self.family_N == place
        return {name: members for name, members in found.items() if members.sum() >= LEAST_MAPS}

    def bands(self) -> dict[str, NDArray[np.bool_]]:
        """Which maps lie in each band of FA shares."""
        place_N = np.searchsorted(BANDS[1:-1], self.share_N, side="right")
        pairs = pairwise(BANDS)
        return {
            f"share {low:.3g} to {high:.3g}": place_N == i for i, (low, high) in enumerate(pairs)
        }

    def foretell(self, known: Index, others: Index, hyper: Hyperparameters) -> Array:
        """What the maps of `known` say of the others."""
        figure_M1 = self.figure_N[known][:, None]
        process = Process(self.descriptor, self.maps[known], figure_M1, hyper)
        return process.predict(self.maps[others])[:, 0]

    def fit(self, known: Index, rows: int, seed: int) -> Hyperparameters:
        """Hyperparameters by the maps of `known` alone."""
        figure_M = self.figure_N[known]
        standard_M = (figure_M - figure_M.mean()) / (figure_M.std() or 1.0)
        return fit(self.descriptor, self.maps[known], standard_M, rows=rows, seed=seed)


def cross_validate(subject: Subject, rows: int, seed: int) -> dict[str, Agreement]:
    """Agreement on maps of folds that neither the hyperparameters nor the process has seen, by group."""
    foretold_N = np.empty(len(subject.maps))
    for known, others in _folds(len(subject.maps), seed):
        hyper = subject.fit(known, rows, seed)
        foretold_N[others] = subject.foretell(known, others, hyper)
    return {
        name: Agreement.of(foretold_N[members], subject.figure_N[members])
        for name, members in subject.groups().items()
    }


def leave_best_out(subject: Subject, rows: int, seed: int) -> Agreement:
    """Agreement on the best maps of every band of FA shares, all of them left out at once: a search goes where no map was measured."""
    best = []
    for band_N in subject.bands().values():
        members = np.flatnonzero(band_N)
        order = members[np.argsort(subject.figure_N[members], kind="stable")]
        best.append(order[: int(BEST * len(order))])
    others = np.concatenate(best)
    known = np.setdiff1d(np.arange(len(subject.maps)), others)
    foretold_N = subject.foretell(known, others, subject.fit(known, rows, seed))
    return Agreement.of(foretold_N, subject.figure_N[others])


def learning_curve(
    subject: Subject,
    hyper: Hyperparameters,
    seed: int,
    parts: tuple[float, ...] = (0.4, 0.6, 0.8, 1.0),
) -> dict[int, Agreement]:
    """Agreement on held-out folds by the number of measured maps, with hyperparameters as they are."""
    found: dict[int, list[tuple[Array, Array]]] = {}
    for known, others in _folds(len(subject.maps), seed):
        for part in parts:
            count = int(part * len(known))
            foretold = subject.foretell(known[:count], others, hyper)
            found.setdefault(count - count % 10, []).append((foretold, subject.figure_N[others]))
    return {
        count: Agreement.of(*(np.concatenate(column) for column in zip(*rows, strict=True)))
        for count, rows in found.items()
    }


def extrapolate(curve: Mapping[int, Agreement], maps: int) -> tuple[float, float]:
    """Spearman and RMSE of as many maps, by a power law of what is missing to 1 and to 0."""
    logs = np.log(np.array(sorted(curve), dtype=np.float64))
    found = []
    for values in (
        [1 - curve[count].spearman for count in sorted(curve)],
        [curve[count].rmse for count in sorted(curve)],
    ):
        slope, at_zero = np.polyfit(logs, np.log(np.maximum(values, 1e-9)), 1)
        found.append(float(np.exp(slope * np.log(maps) + at_zero)))
    return 1 - found[0], found[1]


def _folds(count: int, seed: int) -> list[tuple[Index, Index]]:
    """The maps that are known and the others, fold by fold; the known ones in a random order."""
    order = np.random.default_rng(seed).permutation(count)
    return [
        (np.setdiff1d(order, part, assume_unique=True), part)
        for part in np.array_split(order, FOLDS)
    ]
