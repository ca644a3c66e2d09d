"""Our own proposals, for one bit a head (`free`) or a KV group (`groups`).

Hundreds of maps are bred from the front by moves.py, and built from what surrogate.py has learnt of each unit; the one that
is expected to add most hypervolume (screening.py) is proposed, after a few rounds of breeding from the best.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from optuna.distributions import BaseDistribution

from ...config import RunConfig
from ...headmap import HeadMap, ModelShape
from ...metrics import COSTS
from ..samplers import derive_seed
from ..seeds import ScoreTables
from .archive import Archive, Evidence
from .base import Evaluated, Proposal
from .breeding import BUILT, breed
from .features import Features
from .moves import build
from .pool import Pool
from .screening import MIN_SIZE, Screen, SettingsMemory
from .threads import one_thread
from .units import Bits, Costs, Units


class GuidedProposals:
    """Proposals over bits. scores: tables by method, all that the run has; name: the study's, from which seeds derive."""

    def __init__(
        self,
        config: RunConfig,
        shape: ModelShape,
        scores: Mapping[str, ScoreTables],
        name: str,
    ) -> None:
        search = config.search
        self._config, self._name = config, name
        self._units = Units(shape, whole_groups=search.representation == "groups")
        self._costs = Costs(self._units, config.cost)
        self._tables = [self._units.of_table(scores[method].heads) for method in sorted(scores)]
        self._features = Features(self._units, self._tables)
        signs = [1.0 if o.direction == "minimize" else -1.0 for o in search.objectives]
        self._analytic = [
            (objective.metric, sign) if objective.metric in COSTS else None
            for objective, sign in zip(search.objectives, signs, strict=True)
        ]
        measured = [
            place for place, bound in enumerate(search.constraints) if bound.metric not in COSTS
        ]
        self._archive = Archive(self._units, np.array(signs), measured)
        self._memory = SettingsMemory()

    @property
    def distributions(self) -> Mapping[str, BaseDistribution]:
        """None: a map is all that a trial has."""
        return {}

    def describe(self, head_map: HeadMap) -> Mapping[str, float]:
        """Nothing: a map is all that a trial has."""
        return {}

    def propose(
        self, candidate: int, history: Sequence[Evaluated], busy: Collection[HeadMap]
    ) -> Proposal:
        """The new map that is expected to add most hypervolume."""
        rng = np.random.default_rng(derive_seed(self._config.seed, self._name, "guided", candidate))
        self._archive.read(history)
        bounds = self._config.search.constraints
        pool = Pool(self._units, self._costs, bounds, self._archive.keys, busy)
        with one_thread():
            if len(self._archive) < MIN_SIZE:
                best = self._by_scores(pool, rng)
            else:
                best = self._by_gain(pool, self._archive.evidence(), busy, rng)
        return Proposal(self._units.to_map(pool.blind(rng) if best is None else best))

    def _by_scores(self, pool: Pool, rng: np.random.Generator) -> Bits | None:
        """A map of the best units by a random blend of scores."""
        weights = rng.dirichlet(np.ones(max(1, len(self._tables))))
        blend = np.zeros(self._units.count)
        for weight, table in zip(weights, self._tables, strict=False):
            blend += weight * table / (np.abs(table).sum() or 1.0)
        maps = pool.new(build(self._units, np.tile(blend, (BUILT, 1)), rng))
        return maps[0] if len(maps) else None

    def _by_gain(
        self, pool: Pool, evidence: Evidence, busy: Collection[HeadMap], rng: np.random.Generator
    ) -> Bits | None:
        in_flight = self._units.of_maps(sorted(busy, key=lambda m: m.layers)) > 0.5
        screen = Screen(
            self._features, self._costs, self._analytic, evidence, in_flight, self._memory, rng
        )
        # Where nothing is feasible yet, from anything.
        front_PU = screen.front_PU if len(screen.front_PU) else evidence.shares_NU > 0.5
        return breed(self._units, pool, screen, front_PU, rng)
