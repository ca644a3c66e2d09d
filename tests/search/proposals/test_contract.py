"""The contract of everything that chooses head maps: new, affordable, the same for the same history."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from archsearch.config import RunConfig
from archsearch.errors import ConfigError
from archsearch.headmap import HeadMap, ModelShape
from archsearch.search.proposals.base import Evaluated, Proposals
from archsearch.search.proposals.choice import BIT_SAMPLERS, make_proposals
from archsearch.search.samplers import SAMPLERS
from archsearch.search.seeds import ScoreTables
from archsearch.search.space import analytic_costs
from tests.search.proposals.damage import SHAPE, Damage, bits_config, measure, search_with

CHOICES = [("ranked", name) for name in sorted(SAMPLERS) if name != "gp"] + [
    (representation, name) for representation in ("groups", "free") for name in BIT_SAMPLERS
]
DAMAGE = Damage(0)
Make = Callable[..., tuple[RunConfig, Proposals]]


@pytest.fixture(params=CHOICES, ids="-".join)
def make(request: pytest.FixtureRequest) -> Make:
    representation, sampler = request.param

    def made(**search: object) -> tuple[RunConfig, Proposals]:
        config = bits_config(representation=representation, sampler=sampler, **search)
        return config, make_proposals(config, SHAPE, DAMAGE.scores, "bits@0")

    return made


def test_a_history_decides_in_every_process(make: Make) -> None:
    config, first = make(trials=40)
    history = search_with(first, config, DAMAGE, 40)
    _, second = make(trials=40)
    for candidate in (22, 30, 39):
        again = second.propose(candidate, history[:candidate], ())
        assert again.head_map == history[candidate].head_map


def test_seeds_matter(make: Make) -> None:
    config, proposals = make(trials=30)
    history = search_with(proposals, config, DAMAGE, 24)
    other_config = config.model_copy(update={"seed": 1})
    other = make_proposals(other_config, SHAPE, DAMAGE.scores, "bits@0")
    # Both may find that one map is the best, but not each time.
    first, second = (
        [p.propose(candidate, history, ()).head_map for candidate in range(24, 30)]
        for p in (other, make(trials=30)[1])
    )
    assert first != second


def test_nothing_is_proposed_twice_nor_while_it_runs(make: Make) -> None:
    """Four workers that end in another order than they began."""
    config, proposals = make(trials=60)
    history: list[Evaluated] = []
    running: dict[int, HeadMap] = {}
    seen: set[HeadMap] = set()
    for candidate in range(60):
        found = proposals.propose(candidate, history, list(running.values())).head_map
        assert found not in seen
        seen.add(found)
        running[candidate] = found
        if len(running) == 4:
            number = sorted(running)[(candidate * 7) % 4]
            history.append(measure(config, DAMAGE, number, running.pop(number)))
    assert len(seen) == 60


def test_bounds_that_need_no_evaluation_are_met(make: Make) -> None:
    full = analytic_costs(HeadMap.from_full_heads(SHAPE, SHAPE.heads()), bits_config().cost)
    bounds = [
        {"metric": "cache_bytes", "max": full["cache_bytes"] / 2},
        {"metric": "fa_share", "min": 0.1, "max": 0.4},
        {"metric": "kl", "max": 0.8},
        {"metric": "top1_agreement", "max": math.inf},
    ]
    config, proposals = make(trials=40, constraints=bounds)
    history = search_with(proposals, config, DAMAGE, 40)
    from_search = [e for e in history if e.candidate >= 20]
    assert all(max(e.violations[:2]) <= 0 for e in from_search)


def test_failures_and_equal_values_do_no_harm(make: Make) -> None:
    _, proposals = make(trials=30)
    history: list[Evaluated] = []
    for candidate in range(30):
        found = proposals.propose(candidate, history, ()).head_map
        values = None if candidate % 3 == 0 else (0.5, 100.0)
        history.append(Evaluated(candidate, found, values))
    assert len({e.head_map for e in history}) == 30


@pytest.mark.parametrize(
    "objectives",
    [
        [("kl", "minimize")],
        [("top1_agreement", "maximize"), ("fa_share", "minimize")],
        [("fa_share", "maximize")],
        [("kl", "minimize"), ("top1_agreement", "maximize"), ("cache_bytes", "minimize")],
    ],
)
def test_any_objectives(make: Make, objectives: list[tuple[str, str]]) -> None:
    described = [{"metric": metric, "direction": direction} for metric, direction in objectives]
    config, proposals = make(trials=30, objectives=described)
    history = search_with(proposals, config, DAMAGE, 30)
    assert len({e.head_map for e in history}) == 30


def test_a_space_is_used_up(make: Make) -> None:
    config, _ = make(trials=20)
    shape = ModelShape("llama", 2, 2, 2, 16)
    table = ScoreTables([[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [3.0, 4.0]])
    proposals = make_proposals(config, shape, {"causal": table, "replacement_kl": table}, "bits@0")
    history: list[Evaluated] = []
    for candidate in range(16):
        found = proposals.propose(candidate, history, ()).head_map
        size = float(len(found.full_heads()))
        history.append(Evaluated(candidate, found, (-size, size)))
    assert len({e.head_map for e in history}) == 16
    with pytest.raises(ConfigError, match="no head map is left"):
        proposals.propose(16, history, ())


def test_parameters_of_a_trial_fit_their_distributions(make: Make) -> None:
    _, proposals = make()
    described = proposals.describe(HeadMap.from_full_heads(SHAPE, SHAPE.heads()[:7]))
    assert described.keys() == proposals.distributions.keys()
    assert len(described) <= 4
    for name, value in described.items():
        assert proposals.distributions[name]._contains(value)
