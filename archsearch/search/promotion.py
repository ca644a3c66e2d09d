"""Who goes on from one proxy to the next, and why the others do not: the fronts, or successive halving.

Optuna prunes no study of several objectives, hence a rule of our own. A rung's candidates are all judged at once, after
as many tokens each.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import moocore
import numpy as np
from numpy.typing import NDArray

from ..config import HalvingConfig, SearchConfig
from ..metrics import COSTS
from .bounds import broken_by
from .front import Candidate, Fronts, Scale


@dataclass(frozen=True)
class Pruned:
    """A candidate that does not go on, and why."""

    candidate: Candidate
    reason: str


@dataclass(frozen=True)
class Promotion:
    """Those that go on, those first that matter most; and the others."""

    chosen: tuple[Candidate, ...]
    pruned: tuple[Pruned, ...] = ()

    def only(self, numbers: Collection[int], reason: str) -> Promotion:
        """With those of these numbers alone; the rest does not go on, for that reason."""
        kept = tuple(c for c in self.chosen if c.candidate in numbers)
        cut = tuple(Pruned(c, reason) for c in self.chosen if c.candidate not in numbers)
        return Promotion(kept, (*self.pruned, *cut))


def promote(
    config: SearchConfig,
    fronts: Fronts,
    search: Sequence[Candidate],
    control: Sequence[Candidate],
) -> tuple[Promotion, Promotion]:
    """The search's candidates and the random control's, by the same rule. fronts are those of both."""
    if config.halving is None:
        return promote_fronts(fronts, search, control, config.max_promoted, "search.max_promoted")
    seeds = fronts.seeds if config.halving.seeds else ()
    later = fronts.proxy_tokens > config.proxy_tokens[0]
    found = [
        halve(config, config.halving, fronts.scale, candidates, always, later=later)
        for candidates, always in ((search, seeds), (control, ()))
    ]
    return found[0], found[1]


def promote_fronts(
    fronts: Fronts,
    search: Sequence[Candidate],
    control: Sequence[Candidate],
    most: int | None,
    field: str,
) -> tuple[Promotion, Promotion]:
    """The front's and the seeds' front's points, and the control's; of each, most that field names."""
    found = []
    for group, own in ((search, (fronts.points, fronts.seeds)), (control, (fronts.control,))):
        chosen: list[Candidate] = []
        for front in own:
            best = fronts.scale.spread(front, len(front) if most is None else most)
            # A point of both fronts counts for both.
            chosen += [c for c in best if c not in chosen]
        taken = {c.candidate for c in chosen}
        near = {c.candidate for front in own for c in front}
        length = f"{fronts.proxy_tokens} tokens"
        pruned = [
            Pruned(c, _why_not(c, c.candidate in near, length, most, field))
            for c in group
            if c.candidate not in taken
        ]
        found.append(Promotion(tuple(chosen), tuple(pruned)))
    return found[0], found[1]


def _why_not(
    candidate: Candidate, on_front: bool, length: str, most: int | None, field: str
) -> str:
    if on_front:
        return f"on the front after {length}, but {field} {most} others add more hypervolume"
    if not candidate.feasible:
        return f"outside search.constraints after {length}"
    return f"on no front after {length}"


def halve(
    config: SearchConfig,
    options: HalvingConfig,
    scale: Scale,
    candidates: Sequence[Candidate],
    always: Sequence[Candidate] = (),
    *,
    later: bool = False,
) -> Promotion:
    """options.keep of the candidates, options.floor of each cost band at the least, and beyond these always.

    later: whether they are not the first proxy's, so that options.front counts. A share of a share would cut the front.
    """
    bounds = [bound for bound in config.constraints if bound.metric in COSTS]
    too_costly = {
        c.candidate: f"outside search.constraints: {reason}"
        for c in candidates
        if (reason := broken_by(c.metrics, bounds))
    }
    judged = [c for c in candidates if c.candidate not in too_costly]
    ranks, bands = pareto_ranks(scale, judged), cost_bands(config, judged, options.bands)
    count = math.ceil(options.keep * len(judged) - 1e-9)
    chosen: list[Candidate] = []
    for band in range(max(bands.values(), default=-1) + 1):
        own = [c for c in judged if bands[c.candidate] == band]
        chosen += _best(scale, own, ranks, options.floor)
    if later and options.front:
        front = [c for c in judged if c.feasible and ranks[c.candidate] == 0]
        count = max(count, len({c.candidate for c in (*chosen, *front)}))
    chosen += _best(scale, judged, ranks, count - len(chosen), chosen)
    # Whoever is cut off the end for want of tokens or time ranks last.
    chosen.sort(key=lambda c: ranks[c.candidate])
    others = too_costly.keys() | {c.candidate for c in chosen}
    chosen += [c for c in always if c.candidate not in others]
    last = max(ranks.values(), default=0) + 1, max(bands.values(), default=0) + 1
    reasons = too_costly | {
        c.candidate: f"halving: rank {ranks[c.candidate] + 1} of {last[0]}, cost band {bands[c.candidate] + 1} of "
        f"{last[1]}; {len(chosen)} of {len(judged)} go on"
        for c in judged
    }
    taken = {c.candidate for c in chosen}
    pruned = [Pruned(c, reasons[c.candidate]) for c in candidates if c.candidate not in taken]
    return Promotion(tuple(chosen), tuple(pruned))


def _best(
    scale: Scale,
    candidates: Sequence[Candidate],
    ranks: Mapping[int, int],
    count: int,
    chosen: Sequence[Candidate] = (),
) -> list[Candidate]:
    """count more beside those chosen: rank after rank, and within a rank those that add most hypervolume to it."""
    found: list[Candidate] = []
    taken = {c.candidate for c in chosen}
    for level in sorted(set(ranks.values())):
        if len(found) >= count:
            break
        given = [c for c in chosen if ranks[c.candidate] == level]
        left = [c for c in candidates if ranks[c.candidate] == level and c.candidate not in taken]
        found += scale.spread(left, count - len(found), given)
    return found


def pareto_ranks(scale: Scale, candidates: Sequence[Candidate]) -> dict[int, int]:
    """The rank of each by non-dominated sorting, 0 that of the front.

    Those that miss a bound rank after all that miss none: training may still bring them within it.
    """
    found: dict[int, int] = {}
    for group in ([c for c in candidates if c.feasible], [c for c in candidates if not c.feasible]):
        if group:
            first = max(found.values(), default=-1) + 1
            own = _sorted_ranks(scale.losses(group))
            found |= {c.candidate: first + int(r) for c, r in zip(group, own, strict=True)}
    return found


def _sorted_ranks(losses: NDArray[np.float64]) -> NDArray[np.int_]:
    if losses.shape[1] == 1:
        _, places = np.unique(losses[:, 0], return_inverse=True)
        return places
    ranks: NDArray[np.int_] = moocore.pareto_rank(losses)
    return ranks


def cost_bands(config: SearchConfig, candidates: Sequence[Candidate], count: int) -> dict[int, int]:
    """The band of each, the cheapest 0: quantiles of the first objective that is a cost. Equal costs lie in one band."""
    costs = [objective.metric for objective in config.objectives if objective.metric in COSTS]
    if not costs or not candidates:
        return dict.fromkeys((c.candidate for c in candidates), 0)
    values = np.array([c.metrics[costs[0]] for c in candidates], dtype=np.float64)
    edges = np.quantile(values, np.arange(1, count) / count)
    # Quantiles that coincide would leave bands without anyone.
    places = np.unique(np.searchsorted(edges, values, side="left"), return_inverse=True)[1]
    return {c.candidate: int(place) for c, place in zip(candidates, places, strict=True)}
