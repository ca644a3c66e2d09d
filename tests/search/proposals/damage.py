"""A made-up model for searches: damages that add up, that layers share, and noise that depends on the map alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np

from archsearch.config import RunConfig
from archsearch.headmap import HeadMap, ModelShape
from archsearch.search.proposals.base import Evaluated, Proposals
from archsearch.search.proposals.units import Row, Units
from archsearch.search.seeds import ScoreTables, seed_maps
from archsearch.search.space import analytic_costs, violation

SHAPE = ModelShape("llama", num_layers=12, num_heads=6, num_kv_heads=2, head_dim=16)
COST = {"context": 1024}


class Damage:
    """KL of a map: single heads, pairs of neighbouring layers and a saturation, times noise of one percent."""

    def __init__(self, seed: int, shape: ModelShape = SHAPE) -> None:
        rng = np.random.default_rng(seed)
        self.units = Units(shape, whole_groups=False)
        self.heads_U = rng.lognormal(0, 1.2, self.units.count)
        self.pairs_L = rng.lognormal(0, 0.7, shape.num_layers - 1)
        spread = rng.lognormal(0, 0.8, (2, self.units.count))
        # Scores know the damages roughly, as real ones do.
        self.scores = {
            name: _tables(self.heads_U * noise, shape)
            for name, noise in zip(("causal", "replacement_kl"), spread, strict=True)
        }

    def kl(self, head_map: HeadMap) -> float:
        """The damage of a map; the same each time."""
        gone_U = 1 - self.units.of_maps([head_map])[0]
        gone_L = gone_U @ self.units.layer_UL / self.units.units_of_layer
        single = float(gone_U @ self.heads_U / self.heads_U.sum())
        pairs = float((gone_L[1:] * gone_L[:-1]) @ self.pairs_L / self.pairs_L.sum())
        total = 0.7 * single + 0.3 * pairs
        return (1 - float(np.exp(-2 * total))) * Random(head_map.digest).uniform(0.99, 1.01)


def _tables(heads_U: Row, shape: ModelShape) -> ScoreTables:
    heads = heads_U.reshape(shape.num_layers, shape.num_heads)
    groups = heads.reshape(shape.num_layers, shape.num_kv_heads, -1).sum(axis=2)
    return ScoreTables(heads.tolist(), groups.tolist())


def bits_config(**search: Any) -> RunConfig:
    """A config of 60 trials over single heads; keywords set fields of its search section."""
    data = {
        "schema": 1,
        "name": "bits",
        "teacher": {"source": "none"},
        "cost": COST,
        "search": {"trials": 60, "representation": "free", "sampler": "guided", **search},
    }
    return RunConfig.model_validate_json(json.dumps(data))


def measure(
    config: RunConfig, damage: Damage, candidate: int, head_map: HeadMap, **known: Any
) -> Evaluated:
    """A map's objectives and violations."""
    figures = {"kl": damage.kl(head_map), **analytic_costs(head_map, config.cost)}
    figures["top1_agreement"] = 1 - figures["kl"] / 2
    search = config.search
    values = tuple(figures[objective.metric] for objective in search.objectives)
    over = tuple(violation(bound, figures[bound.metric]) for bound in search.constraints)
    return Evaluated(candidate, head_map, values, over, **known)


def search_with(
    proposals: Proposals, config: RunConfig, damage: Damage, trials: int
) -> list[Evaluated]:
    """A search by one worker: the config's seeds, then what is proposed."""
    seeds = seed_maps(
        damage.units.shape, damage.scores, config.search.seeds, config.seed, config.cost
    )
    history: list[Evaluated] = []
    for candidate in range(trials):
        if candidate < len(seeds):
            head_map = seeds[candidate].head_map
            params = proposals.describe(head_map)
        else:
            proposal = proposals.propose(candidate, history, ())
            head_map, params = proposal.head_map, proposal.params
        history.append(measure(config, damage, candidate, head_map, params=params))
    return history


def hypervolume(history: Sequence[Evaluated], config: RunConfig, damage: Damage) -> float:
    """Share of the box from 0 to the values of no and all full attention, by a grid over cost; two objectives, the second a cost."""
    shape = damage.units.shape
    full = HeadMap.from_full_heads(shape, shape.heads())
    most = analytic_costs(full, config.cost)["cache_bytes"] * 1.1
    worst = damage.kl(HeadMap.from_full_heads(shape, [])) * 1.1
    values = np.array([e.values for e in history])
    grid = np.linspace(0, most, 2001)
    best = [values[values[:, 1] <= cost, 0].min(initial=worst) for cost in grid]
    return float(1 - np.mean(best) / worst)
