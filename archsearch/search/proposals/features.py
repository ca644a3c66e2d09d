"""What a map's damage is explained by: sums of scores, single units, KV groups and layers that go together. Numpy only.

Shapes: P head maps, U units, F features, L layers, G KV groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .units import Row, Units

BLOCKS = ("scores", "units", "layers")
"""Features that share a prior: what the scores add up to and how much is replaced; each unit alone; what units do together."""

REFERENCE_MAPS = 256
WHOLE = 1 - 1e-9


class Features:
    """Turns maps into features of mean 0 and variance 1 over random maps of all sizes.

    tables: numbers a unit, [U] each, that tell how much it is needed.
    """

    def __init__(self, units: Units, tables: Sequence[Row]) -> None:
        self._units = units
        weights = [np.ones(units.count) / units.count]
        for table in tables:
            weights += [column / (np.abs(column).sum() or 1.0) for column in (table, _ranks(table))]
        self._weights_UK = np.stack(weights, axis=1)
        rng = np.random.default_rng(0)
        shares = np.exp(rng.random((REFERENCE_MAPS, 1)) * np.log(1 / 64))
        raw = self._raw(1.0 * (rng.random((REFERENCE_MAPS, units.count)) < shares))
        sizes = [block.shape[1] for block in raw]
        self.block_F: NDArray[np.int64] = np.repeat(np.arange(len(sizes)), sizes)
        """The place in BLOCKS of each feature."""
        self.size_feature = sizes[0] - 1
        """The feature that is the square of the share of units that are replaced."""
        reference = np.hstack(raw)
        self._mean_F = reference.mean(axis=0)
        # So that a block's variance is 1 in all, however many features it has.
        self._scale_F = (reference.std(axis=0) + 0.02) * np.sqrt(np.repeat(sizes, sizes))

    def of(self, shares_PU: Row) -> Row:
        """Features of maps, given as shares of full attention, [P, F]."""
        features: Row = np.hstack(self._raw(shares_PU))
        features -= self._mean_F
        features /= self._scale_F
        return features

    def effects(self, weights_FS: Row) -> Row:
        """Damage of replacing each unit alone, by weights of features, as far as it adds up: [S, U]."""
        scaled = weights_FS / self._scale_F[:, None]
        num_scores = self._weights_UK.shape[1]
        scores, units = scaled[:num_scores], scaled[self.block_F == BLOCKS.index("units")]
        effects: Row = (self._weights_UK @ scores + units).T
        return effects

    def _raw(self, shares_PU: Row) -> list[Row]:
        units = self._units
        gone_PU = 1.0 - shares_PU
        gone_PL = gone_PU @ units.layer_UL / units.units_of_layer
        size_P1 = gone_PL.mean(axis=1, keepdims=True)
        together = [gone_PL**2, gone_PL > WHOLE, gone_PL[:, 1:] * gone_PL[:, :-1]]
        if units.units_of_group > 1:
            together.append(~units.groups_PG(shares_PU > 0))
        return [
            np.hstack([gone_PU @ self._weights_UK, size_P1**2]),
            gone_PU,
            np.hstack(together),
        ]


def _ranks(values: Row) -> Row:
    """Ranks from 0 on; equal values share their mean rank."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: Row = (ends - (counts + 1) / 2)[places]
    return ranks
