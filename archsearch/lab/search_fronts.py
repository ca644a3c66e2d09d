"""Fronts of several searches after equal seconds of evaluation, and after equal trials: tables and figures."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ..config import ObjectiveConfig
from ..search.front import SEARCH, Candidate, Scale
from ..timings import read_timings
from .records import LabBook, markdown
from .search_runs import Evaluation, Search
from .search_tables import SHARE, STEP
from .selection_tables import short

QUARTERS = (0.25, 0.5, 0.75, 1.0)
"""Of the seconds and of the trials of the search that had fewest: where fronts are compared."""
CONTROL = "random control"


@dataclass(frozen=True)
class Curve:
    """What was found one after the other, and what it took."""

    name: str
    evaluations: tuple[Evaluation, ...]

    @property
    def seconds(self) -> list[float]:
        """Seconds up to the end of each try."""
        return list(accumulate(e.seconds for e in self.evaluations))

    @property
    def total(self) -> float:
        """All seconds."""
        return sum(e.seconds for e in self.evaluations)

    @property
    def found(self) -> list[Candidate]:
        """All results."""
        return _results(self.evaluations)

    def within(self, seconds: float) -> list[Candidate]:
        """The results of that time. Seconds that differ by rounding alone are the same."""
        return _results(self.evaluations[: bisect_right(self.seconds, seconds * (1 + 1e-9))])

    def steps(self, scale: Scale) -> list[tuple[float, int, float]]:
        """(seconds, trials, hypervolume) after every STEP trials and at the end."""
        steps, found = [], list[Candidate]()
        for seconds, evaluation in zip(self.seconds, self.evaluations, strict=True):
            if evaluation.candidate is not None:
                found.append(evaluation.candidate)
                if len(found) % STEP == 0:
                    steps.append((seconds, len(found), scale.hypervolume(found)))
        if len(found) % STEP:
            steps.append((self.total, len(found), scale.hypervolume(found)))
        return steps

    def reaches(self, volume: float, scale: Scale) -> tuple[float, int] | None:
        """(seconds, trials) after which the hypervolume is at least that; None where it never is."""
        found = list[Candidate]()
        for seconds, evaluation in zip(self.seconds, self.evaluations, strict=True):
            if evaluation.candidate is not None:
                found.append(evaluation.candidate)
                if scale.hypervolume(found) >= volume:
                    return seconds, len(found)
        return None


def _results(evaluations: Sequence[Evaluation]) -> list[Candidate]:
    return [e.candidate for e in evaluations if e.candidate is not None]


@dataclass(frozen=True)
class Fronts:
    """The curves of one length of training in one box: of each search, of its seeds alone and of its random control.

    chosen: whether the candidates of this length were chosen by those of a shorter one, so that only the ends compare.
    """

    tokens: int
    chosen: bool
    scale: Scale
    curves: tuple[Curve, ...]
    searches: tuple[str, ...]
    """Names of the curves that are whole searches."""

    @classmethod
    def of(
        cls, objectives: Sequence[ObjectiveConfig], tokens: int, searches: Sequence[Search]
    ) -> Fronts:
        """From those searches that came so far."""
        curves = []
        for search in searches:
            for rung in (rung for rung in search.rungs if rung.tokens == tokens):
                seeds = tuple(e for e in rung.search if e.source != SEARCH)
                curves.append(Curve(search.name, rung.search))
                curves.append(Curve(f"{search.name}: seeds alone", seeds))
                curves.append(Curve(f"{search.name}: {CONTROL}", rung.control))
        curves = [curve for curve in curves if curve.found]
        scale = Scale.of(objectives, [c for curve in curves for c in curve.found])
        names = tuple(search.name for search in searches)
        chosen = tokens > searches[0].config.search.proxy_tokens[0]
        return cls(tokens, chosen, scale, tuple(curves), names)

    @property
    def whole(self) -> list[Curve]:
        """Those of whole searches."""
        return [curve for curve in self.curves if curve.name in self.searches]

    @property
    def seconds(self) -> list[float]:
        """Where fronts are compared: quarters of what the shortest search took."""
        least = min(curve.total for curve in self.whole)
        return [] if self.chosen else [quarter * least for quarter in QUARTERS]

    @property
    def trials(self) -> list[int]:
        """The same in trials."""
        least = min(len(curve.found) for curve in self.whole)
        return [] if self.chosen else sorted({max(1, round(q * least)) for q in QUARTERS})

    def after_seconds(self, curve: Curve) -> list[float]:
        """A curve's hypervolumes at seconds."""
        return [self.scale.hypervolume(curve.within(seconds)) for seconds in self.seconds]

    def after_trials(self, curve: Curve) -> list[float]:
        """A curve's hypervolumes at trials."""
        return [self.scale.hypervolume(curve.found[:number]) for number in self.trials]

    def races(self) -> list[Race]:
        """When each search had what every other one, and every random control, had once the seconds of all were over."""
        if self.chosen:
            return []
        last, found = self.seconds[-1], []
        for curve in self.whole:
            for other in self.curves:
                if other is not curve and (other in self.whole or other.name.endswith(CONTROL)):
                    volume = self.scale.hypervolume(other.within(last))
                    found.append(Race(curve, other, volume, curve.reaches(volume, self.scale)))
        return found


@dataclass(frozen=True)
class Race:
    """(seconds, trials) after which a search had a hypervolume that another has in the end; None where it never had."""

    search: Curve
    other: Curve
    volume: float
    reached: tuple[float, int] | None

    @property
    def text(self) -> str:
        """A line."""
        at = self.reached
        when = f"after {at[0]:.1f} s and {at[1]} trials" if at else "never"
        return f"{self.search.name} has the {self.volume:.4f} of {self.other.name}: {when}"


def show_fronts(fronts: Fronts) -> str:
    """A Markdown table, a row a curve, and the races."""
    head = [f"hypervolume after {fronts.tokens:,} tokens a map", "trials", "seconds"]
    head += [f"{seconds:.1f} s" for seconds in fronts.seconds]
    head += [f"{number} trials" for number in fronts.trials]
    rows = []
    for curve in fronts.curves:
        whole = fronts.scale.hypervolume(curve.found)
        values = [*fronts.after_seconds(curve), *fronts.after_trials(curve), whole]
        counts = [str(len(curve.found)), f"{curve.total:.1f}"]
        rows.append([curve.name, *counts, *(f"{value:.4f}" for value in values)])
    races = [race.text for race in fronts.races()]
    return "\n".join([markdown([*head, "all"], rows), *([""] if races else []), *races])


def record_search(book: LabBook, search: Search) -> None:
    """Adds what a search took as a whole, proposals and its random control included, over all calls."""
    execution = search.config.execution
    for row in read_timings(search.run)[0]:
        if row["stage"] == "search":
            book.add(
                f"seconds of the search stage, {search.name}",
                row["seconds"],
                "s",
                None,
                trials=search.config.search.trials,
                random_control=search.config.search.random_control,
                workers=execution.workers,
                gpus_per_worker=execution.gpus_per_worker,
            )


def record_fronts(book: LabBook, fronts: Fronts) -> None:
    """Adds every figure of the table, and each curve in steps."""
    at = f"at {fronts.tokens} tokens a map"
    box = {"ideal": list(fronts.scale.ideal), "reference": list(fronts.scale.reference)}
    objectives = [objective.metric for objective in fronts.scale.objectives]
    facts: dict[str, Any] = {"tokens": fronts.tokens, "objectives": objectives}
    for curve in fronts.curves:
        whole = fronts.scale.hypervolume(curve.found)
        steps = [[short(s), n, short(v)] for s, n, v in curve.steps(fronts.scale)]
        counts = {"trials": len(curve.found), "seconds": short(curve.total)}
        text = f"hypervolume of {curve.name}, {at}"
        book.add(text, short(whole), SHARE, None, **facts, **counts, **box, curve=steps)
        for seconds, volume in zip(fronts.seconds, fronts.after_seconds(curve), strict=True):
            own = {"trials": len(curve.within(seconds)), "ended": curve.total < seconds}
            book.add(f"{text}, after {seconds:.2f} s", short(volume), SHARE, None, **facts, **own)
        for number, volume in zip(fronts.trials, fronts.after_trials(curve), strict=True):
            own = {"ended": len(curve.found) < number}
            book.add(f"{text}, after {number} trials", short(volume), SHARE, None, **facts, **own)
    for race in fronts.races():
        seconds, number = race.reached or (-1.0, -1)
        book.add(
            f"seconds of {race.search.name} to the hypervolume of {race.other.name}, {at}",
            short(seconds),
            "s; -1 is never",
            f"{short(race.volume)} within {fronts.seconds[-1]:.2f} s",
            trials=number,
            **facts,
        )
