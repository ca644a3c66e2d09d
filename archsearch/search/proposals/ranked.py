"""Optuna's samplers over the parameters of RankedSpace.

The sampler sees a study in memory, made of the history alone: what is stored stays one row a trial, written at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from random import Random
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import Trial, TrialState

from ...config import RunConfig
from ...headmap import HeadMap
from ..samplers import admit, derive_seed, distributions, make_sampler, record_violations
from ..space import Point, RankedSpace
from .base import Evaluated, Proposal

Layers = tuple[str, ...]


class RankedProposals:
    """Proposals of config.search.sampler; name is the study's, from which seeds derive."""

    def __init__(self, config: RunConfig, space: RankedSpace, name: str) -> None:
        self._config, self._space, self._name = config, space, name
        directions = [objective.direction for objective in config.search.objectives]
        self._mirror = optuna.create_study(directions=directions)
        self._running: dict[Layers, Trial] = {}
        self._over: set[Layers] = set()
        self._seen = 0

    @property
    def distributions(self) -> Mapping[str, BaseDistribution]:
        """Those of space.Point."""
        return distributions(*self._space.fa_range())

    def propose(
        self, candidate: int, history: Sequence[Evaluated], busy: Collection[HeadMap]
    ) -> Proposal:
        """The new map nearest to what the sampler picks."""
        self._mirror.sampler = self._sampler(candidate)
        for evaluated in history[self._seen :]:
            self._finish(evaluated)
        self._seen = len(history)
        for head_map in busy:
            if head_map.layers not in self._running and head_map.layers not in self._over:
                self._running[head_map.layers] = self._add(self.describe(head_map))
        # A fresh one: entering maps, which only a resumed search has to do, has drawn from it.
        self._mirror.sampler = self._sampler(candidate)
        trial = self._mirror.ask(dict(self.distributions))
        rng = Random(derive_seed(self._config.seed, "nearest", candidate))
        chosen = self._space.nearest(Point(**trial.params), self._is_new, rng)
        self._running[chosen.layers] = trial
        return Proposal(chosen, trial.params)

    def describe(self, head_map: HeadMap) -> Mapping[str, Any]:
        """The point that comes nearest to the map."""
        return self._space.encode(head_map).params()

    def _sampler(self, candidate: int) -> optuna.samplers.BaseSampler:
        search = self._config.search
        seed = derive_seed(self._config.seed, self._name, candidate)
        constrained = bool(search.constraints)
        return make_sampler(search.sampler, seed, trials=search.trials, constrained=constrained)

    def _is_new(self, head_map: HeadMap) -> bool:
        layers = head_map.layers
        known = layers in self._running or layers in self._over
        return not known and self._space.affordable(head_map)

    def _add(self, params: Mapping[str, Any]) -> Trial:
        """Enters a map that was not proposed in this process, as one that runs."""
        self._mirror.enqueue_trial(dict(params))
        trial = self._mirror.ask(dict(self.distributions))
        admit(self._mirror, trial)
        return trial

    def _finish(self, evaluated: Evaluated) -> None:
        layers = evaluated.head_map.layers
        trial = self._running.pop(layers, None)
        if trial is None:
            trial = self._add(evaluated.params or self.describe(evaluated.head_map))
        self._over.add(layers)
        if evaluated.violations:
            bounds = self._config.search.constraints
            names = [f"{index}:{bound.metric}" for index, bound in enumerate(bounds)]
            record_violations(trial, names, list(evaluated.violations))
        if evaluated.values is None:
            self._mirror.tell(trial, state=TrialState.FAIL)
        else:
            self._mirror.tell(trial, list(evaluated.values))
