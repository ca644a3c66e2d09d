"""Bits that may still be proposed: affordable, and neither evaluated nor in flight. Numpy only."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set

import numpy as np

from ...config import ConstraintConfig
from ...errors import ConfigError
from ...headmap import HeadMap
from .units import Bits, Costs, Units

SMALL_SPACE = 12
"""Units up to which every map is looked at before the space counts as used up."""
BLIND_TRIES = 512


class Pool:
    """Lets through each map that is affordable and not known, once. over: Units.key of maps that are evaluated."""

    def __init__(
        self,
        units: Units,
        costs: Costs,
        constraints: Sequence[ConstraintConfig],
        over: Set[bytes],
        busy: Collection[HeadMap],
    ) -> None:
        self._units, self._costs, self._constraints = units, costs, constraints
        self._over = over
        self._seen = {units.key(shares_U) for shares_U in units.of_maps(list(busy))}

    def new(self, full_PU: Bits) -> Bits:
        """Those of the maps, [P, U], that are let through, in their order."""
        kept = []
        for place, row in enumerate(full_PU):
            key = row.tobytes()
            if key not in self._seen and key not in self._over:
                self._seen.add(key)
                kept.append(place)
        found = full_PU[kept]
        met: Bits = found[self._affordable(found)]
        return met

    def _affordable(self, full_PU: Bits) -> Bits:
        """Which maps meet every bound that needs no evaluation."""
        costs = self._costs.of(full_PU)
        met = np.ones(len(full_PU), dtype=np.bool_)
        for bound in self._constraints:
            if bound.metric in costs:
                low = -np.inf if bound.min is None else bound.min
                high = np.inf if bound.max is None else bound.max
                met &= (low <= costs[bound.metric]) & (costs[bound.metric] <= high)
        return met

    def blind(self, rng: np.random.Generator) -> Bits:
        """Any map of a random size, [U]. Raises ConfigError where none is found: the space is used up or the bounds leave nothing."""
        count = self._units.count
        if count <= SMALL_SPACE:
            tried = (np.arange(2**count)[:, None] >> np.arange(count) & 1).astype(np.bool_)
            tried = tried[rng.permutation(len(tried))]
        else:
            sizes = rng.integers(count + 1, size=(BLIND_TRIES, 1))
            tried = rng.permuted(np.arange(count)[None, :] < sizes, axis=1)
        maps = self.new(tried)
        if not len(maps):
            raise ConfigError(
                "search.trials: no head map is left that is new and meets search.constraints; "
                "lower trials or relax the constraints"
            )
        first: Bits = maps[0]
        return first
