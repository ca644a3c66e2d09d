"""Successive halving over readings that are at hand, as the driver of a search would do it.

A length's maps are judged together once all of them are read there, and those that go on are all that the next length sees. What
is proposed at the first length depends on no later one, so that a run with keep 1 holds the candidates of any other keep. A
random control, which would only widen the box, is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

from ..config import RunConfig, SearchConfig
from ..search.front import Candidate, Fronts, Scale, pareto_front
from ..search.promotion import promote
from ..search.stopping import candidate_tokens

DRAWS = 200


@dataclass(frozen=True)
class Replay:
    """What halving would have come to."""

    kept: tuple[int, ...]
    """Maps at each length."""
    tokens: int
    """Of all training."""
    tokens_share: float
    """Of those that train every map to full length."""
    volume: float
    """Share of the full front's hypervolume,"""
    drawn: float
    """and the mean of maps drawn at random, as many as these tokens train to full length."""
    box_volume: float
    """Both in the full front's box."""
    box_drawn: float
    front: int
    """Maps on the full front,"""
    front_reached: int
    """and those of them that halving took all the way."""


def replay(config: RunConfig, rungs: Sequence[Sequence[Candidate]]) -> Replay:
    """Plays the rule of config.search over readings: rungs[i] holds every map at config.search.proxy_tokens[i]."""
    search, alive = config.search, survivors(config.search, rungs)
    kept = tuple(len(some) for some in alive)
    tokens = sum(count * candidate_tokens(config, rung) for rung, count in enumerate(kept))
    full = rungs[-1]
    reached = [c for c in full if c.candidate in alive[-1]]
    scale, length = Scale.of(search.objectives, full), search.proxy_tokens[-1]
    front = pareto_front(full, scale)
    box = Scale.of(search.objectives, front)
    return Replay(
        kept,
        tokens,
        tokens / (len(full) * length),
        share_of_front(scale, reached, front),
        drawn_share(scale, full, front, tokens // length),
        share_of_front(box, reached, front),
        drawn_share(box, full, front, tokens // length),
        len(front),
        sum(c.candidate in alive[-1] for c in front),
    )


def survivors(config: SearchConfig, rungs: Sequence[Sequence[Candidate]]) -> list[set[int]]:
    """The candidates that are trained to each length."""
    alive = [{c.candidate for c in rungs[0]}]
    for tokens, everyone in zip(config.proxy_tokens, rungs[:-1], strict=False):
        own = [c for c in everyone if c.candidate in alive[-1]]
        fronts = Fronts.of(config.objectives, own, [], tokens)
        promotion, _ = promote(config, fronts, own, [])
        alive.append({c.candidate for c in promotion.chosen})
    return alive


def share_of_front(scale: Scale, some: Sequence[Candidate], front: Sequence[Candidate]) -> float:
    """The hypervolume of some maps over the front's; 1 where that is nothing."""
    whole = scale.hypervolume(front)
    return scale.hypervolume(some) / whole if whole else 1.0


def drawn_share(
    scale: Scale, full: Sequence[Candidate], front: Sequence[Candidate], count: int
) -> float:
    """The mean share of the front's hypervolume that so many maps drawn at random have."""
    rng = Random(0)
    draws = [rng.sample(full, min(count, len(full))) for _ in range(DRAWS)]
    return fmean(share_of_front(scale, drawn, front) for drawn in draws)
