"""Search by learnt damages: better than numbers, and than chance, on made-up models."""

from __future__ import annotations

import time

import numpy as np
import pytest

from archsearch.config import RunConfig
from archsearch.headmap import ModelShape
from archsearch.search.proposals.choice import make_proposals
from archsearch.search.proposals.guided import GuidedProposals
from tests.search.proposals.damage import (
    SHAPE,
    Damage,
    bits_config,
    hypervolume,
    measure,
    search_with,
)


def volume(representation: str, sampler: str, seed: int, trials: int = 50) -> float:
    config = bits_config(representation=representation, sampler=sampler, trials=trials)
    config = config.model_copy(update={"seed": seed})
    damage = Damage(seed)
    proposals = make_proposals(config, SHAPE, damage.scores, "bits@0")
    return hypervolume(search_with(proposals, config, damage, trials), config, damage)


@pytest.mark.parametrize("representation", ["free", "groups"])
def test_more_front_than_numbers_and_chance(representation: str) -> None:
    seeds = range(3)
    ours = np.array([volume(representation, "guided", seed) for seed in seeds])
    for rival in (("ranked", "tpe"), ("ranked", "nsga2"), (representation, "random")):
        others = np.array([volume(*rival, seed) for seed in seeds])
        assert (ours > others).all(), rival


def test_a_constraint_that_is_measured_is_learnt() -> None:
    damage = Damage(1)
    config = bits_config(
        trials=50,
        objectives=[{"metric": "cache_bytes", "direction": "minimize"}],
        constraints=[{"metric": "kl", "max": 0.3}],
    )
    history = search_with(
        make_proposals(config, SHAPE, damage.scores, "bits@0"), config, damage, 50
    )
    good = [(e.candidate, e.values[0]) for e in history if max(e.violations) <= 0 and e.values]
    best_seed = min(cost for candidate, cost in good if candidate < 16)
    assert min(cost for _, cost in good) < 0.65 * best_seed


def test_maps_in_flight_are_reckoned_with() -> None:
    """Four proposals at once are not four small changes of one."""
    damage = Damage(2)
    config = bits_config(trials=60)
    proposals = make_proposals(config, SHAPE, damage.scores, "bits@0")
    history = search_with(proposals, config, damage, 40)
    busy = []
    for candidate in range(40, 46):
        busy.append(proposals.propose(candidate, history, busy).head_map)
    costs = [measure(config, damage, 0, head_map).values for head_map in busy]
    spread = np.ptp([cost[1] for cost in costs if cost])
    seen = np.ptp([e.values[1] for e in history if e.values])
    assert spread > 0.2 * seen


def big_search() -> tuple[RunConfig, GuidedProposals, Damage]:
    shape = ModelShape("llama", 30, 9, 3, 64)
    damage = Damage(0, shape)
    config = bits_config(trials=600)
    return config, GuidedProposals(config, shape, damage.scores, "bits@0"), damage


def test_a_proposal_is_fast_at_500_trials_and_270_heads() -> None:
    config, proposals, damage = big_search()
    rng = np.random.default_rng(0)
    units = damage.units
    bits = rng.random((500, units.count)) < rng.random((500, 1))
    history = [measure(config, damage, n, units.to_map(row)) for n, row in enumerate(bits)]
    proposals.propose(500, history, ())
    seconds = []
    for candidate in range(501, 506):
        started = time.process_time()
        proposals.propose(candidate, history, ())
        seconds.append(time.process_time() - started)
    # 25 ms on two cores; room for slow and busy machines.
    assert min(seconds) < 0.25
