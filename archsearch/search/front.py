"""Fronts of finished trials: who is on them, their hypervolume, the knee, and pareto.json."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import moocore
import numpy as np
from numpy.typing import NDArray

from ..config import ObjectiveConfig
from ..headmap import HeadMap

SCHEMA = 1
CONTROL = "random-control"
SEARCH = "search"
MARGIN = 0.1
"""The reference point lies this share of each objective's range beyond its worst value."""


@dataclass(frozen=True)
class Candidate:
    """A finished candidate: source names the seed method, "search" or "random-control".

    The random control counts its candidates by itself.
    """

    candidate: int
    source: str
    metrics: Mapping[str, float]
    head_map: HeadMap
    feasible: bool = True
    trial: int | None = None
    also: tuple[str, ...] = ()
    """Other seed methods that chose the same map."""
    intervals: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Lower and upper end of the metrics of the final stage."""

    def to_json(self) -> dict[str, Any]:
        """The candidate as a point of pareto.json."""
        intervals = {name: list(ends) for name, ends in self.intervals.items()}
        return {
            **({"intervals": intervals} if intervals else {}),
            "candidate": self.candidate,
            "source": self.source,
            "also": list(self.also),
            "metrics": dict(self.metrics),
            "head_map": self.head_map.to_json(),
        }


@dataclass(frozen=True)
class Scale:
    """Turns objectives into losses: 0 at the best value seen, 1 at the reference point."""

    objectives: tuple[ObjectiveConfig, ...]
    ideal: tuple[float, ...]
    reference: tuple[float, ...]

    @classmethod
    def of(cls, objectives: Sequence[ObjectiveConfig], candidates: Sequence[Candidate]) -> Scale:
        """The scale that spans all candidates; with none of them, a unit box."""
        found = [[c.metrics[o.metric] for o in objectives] for c in candidates]
        ideal, reference = _box(objectives, found)
        return cls(tuple(objectives), tuple(ideal), tuple(reference))

    def losses(self, candidates: Sequence[Candidate]) -> NDArray[np.float64]:
        """Losses as [candidates, objectives]."""
        metrics = [objective.metric for objective in self.objectives]
        values = np.array([[c.metrics[m] for m in metrics] for c in candidates], dtype=np.float64)
        ideal, reference = np.array(self.ideal), np.array(self.reference)
        losses: NDArray[np.float64] = (values.reshape(-1, len(metrics)) - ideal) / (
            reference - ideal
        )
        return losses

    def hypervolume(self, candidates: Sequence[Candidate]) -> float:
        """Share of the box between ideal and reference that feasible candidates dominate, 0 to 1."""
        kept = [c for c in candidates if c.feasible]
        if not kept:
            return 0.0
        return dominated_share(self.losses(kept))

    def spread(
        self, candidates: Sequence[Candidate], count: int, given: Sequence[Candidate] = ()
    ) -> list[Candidate]:
        """count of them one by one, always the one that adds most hypervolume to given and those before it; of equals the first.

        What one adds only shrinks while others are picked, so that an old figure is a bound and few are computed anew.
        """
        losses = self.losses([*candidates, *given])
        others = list(range(len(candidates), len(losses)))
        chosen: list[int] = []
        volume = dominated_share(losses[others]) if others else 0.0
        heap = [(-math.inf, place) for place in range(len(candidates))]
        while heap and len(chosen) < count:
            _, place = heapq.heappop(heap)
            gain = dominated_share(losses[[*others, *chosen, place]]) - volume
            if heap and (-gain, place) > heap[0]:
                heapq.heappush(heap, (-gain, place))
                continue
            chosen.append(place)
            volume += gain
        return [candidates[place] for place in chosen]


def scaled_losses(
    objectives: Sequence[ObjectiveConfig], values: Sequence[Sequence[float]]
) -> NDArray[np.float64]:
    """Losses on the scale that spans all values, both [candidates, objectives]."""
    ideal, reference = (np.array(side) for side in _box(objectives, values))
    losses: NDArray[np.float64] = (np.array(values, dtype=np.float64) - ideal) / (reference - ideal)
    return losses


def _box(
    objectives: Sequence[ObjectiveConfig], values: Sequence[Sequence[float]]
) -> tuple[list[float], list[float]]:
    """The best value of each objective, and the reference."""
    ideal, reference = [], []
    for place, objective in enumerate(objectives):
        sign = 1 if objective.direction == "minimize" else -1
        losses = [sign * row[place] for row in values] or [0.0, 1.0]
        best, worst = min(losses), max(losses)
        beyond = (worst - best) * MARGIN or abs(worst) * MARGIN or 1.0
        ideal.append(sign * best)
        reference.append(sign * (worst + beyond))
    return ideal, reference


def dominated_share(losses: NDArray[np.float64]) -> float:
    """Share of the box between ideal and reference that losses [candidates, objectives] of a Scale dominate."""
    if losses.shape[1] == 1:
        return float(max(0.0, 1 - losses.min()))
    return float(moocore.hypervolume(losses, ref=np.ones(losses.shape[1])))


def pareto_front(candidates: Sequence[Candidate], scale: Scale) -> list[Candidate]:
    """The feasible candidates that none dominates, by candidate number; of equals the first stays."""
    kept = sorted((c for c in candidates if c.feasible), key=lambda c: c.candidate)
    if not kept:
        return []
    losses = scale.losses(kept)
    if losses.shape[1] == 1:
        return [kept[int(losses[:, 0].argmin())]]
    mask = moocore.is_nondominated(losses, keep_weakly=False)
    return [candidate for candidate, on_front in zip(kept, mask, strict=True) if on_front]


def knee(front: Sequence[Candidate], objectives: Sequence[ObjectiveConfig]) -> Candidate | None:
    """The point that lies farthest below the plane through the front's extremes; None on an empty one."""
    if not front:
        return None
    losses = Scale.of(objectives, front).losses(front)
    return front[int(losses.sum(axis=1).argmin())]


@dataclass(frozen=True)
class Fronts:
    """The front of everything but the control, the seeds' own and the control's, on one scale."""

    scale: Scale
    proxy_tokens: int
    points: list[Candidate]
    seeds: list[Candidate]
    control: list[Candidate]
    evaluated: int

    @classmethod
    def of(
        cls,
        objectives: Sequence[ObjectiveConfig],
        search: Sequence[Candidate],
        control: Sequence[Candidate],
        proxy_tokens: int,
    ) -> Fronts:
        """Sorts finished candidates; search holds the seeds too."""
        scale = Scale.of(objectives, [*search, *control])
        seeds = [c for c in search if c.source != SEARCH]
        return cls(
            scale,
            proxy_tokens,
            pareto_front(search, scale),
            pareto_front(seeds, scale),
            pareto_front(control, scale),
            len(search),
        )

    def hypervolumes(self) -> dict[str, float]:
        """Hypervolume of each front, by name."""
        return {
            "front": self.scale.hypervolume(self.points),
            "seeds": self.scale.hypervolume(self.seeds),
            "random": self.scale.hypervolume(self.control),
        }

    def to_json(self) -> dict[str, Any]:
        """The content of pareto.json."""
        volumes, best = self.hypervolumes(), knee(self.points, self.scale.objectives)
        return {
            "schema": SCHEMA,
            "objectives": [objective.model_dump() for objective in self.scale.objectives],
            "reference": list(self.scale.reference),
            "ideal": list(self.scale.ideal),
            "proxy_tokens": self.proxy_tokens,
            "evaluated": self.evaluated,
            "hypervolume": volumes["front"],
            "points": [c.to_json() for c in self.points],
            "knee": best.candidate if best else None,
            "seeds": {"hypervolume": volumes["seeds"], "points": [c.to_json() for c in self.seeds]},
            "random": {
                "hypervolume": volumes["random"],
                "points": [c.to_json() for c in self.control],
            },
        }

    def lines(self, length: str) -> list[str]:
        """The summary that a run prints; length says in words how long the candidates were trained."""
        volumes = self.hypervolumes()
        own = sum(c.source == SEARCH for c in self.points)
        text = f"front: {len(self.points)} points of {self.evaluated} ({length}), {own} that no seed supplied"
        parts = [f"front {volumes['front']:.4f}", f"seeds alone {volumes['seeds']:.4f}"]
        if self.control:
            parts.append(f"random search {volumes['random']:.4f}")
        return [text, f"hypervolume: {', '.join(parts)}"]
