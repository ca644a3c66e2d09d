"""Random bits, for one bit a head (`free`) or a KV group (`groups`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from optuna.distributions import BaseDistribution

from ...config import RunConfig
from ...headmap import HeadMap, ModelShape
from ..samplers import derive_seed
from ..seeds import ScoreTables
from .archive import Archive
from .base import Evaluated, Proposal
from .pool import Pool
from .units import Costs, Units


class RandomProposals:
    """Any number of units at random places; scores are not looked at."""

    distributions: Mapping[str, BaseDistribution] = {}

    def __init__(
        self, config: RunConfig, shape: ModelShape, scores: Mapping[str, ScoreTables], name: str
    ) -> None:
        self._config, self._name = config, name
        self._units = Units(shape, whole_groups=config.search.representation == "groups")
        self._costs = Costs(self._units, config.cost)
        self._archive = Archive(self._units, np.ones(len(config.search.objectives)), ())

    def propose(
        self, candidate: int, history: Sequence[Evaluated], busy: Collection[HeadMap]
    ) -> Proposal:
        """A random new map."""
        rng = np.random.default_rng(derive_seed(self._config.seed, self._name, candidate))
        self._archive.read(history)
        bounds = self._config.search.constraints
        pool = Pool(self._units, self._costs, bounds, self._archive.keys, busy)
        return Proposal(self._units.to_map(pool.blind(rng)))

    def describe(self, head_map: HeadMap) -> Mapping[str, float]:
        """Nothing: a map is all that a trial has."""
        return {}
