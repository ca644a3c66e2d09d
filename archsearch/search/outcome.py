"""What a search came to, rung by rung, and the files that say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..config import ConstraintConfig, RunConfig
from ..headmap import ModelShape
from ..rundir import RunDir
from .front import CONTROL, Candidate, Fronts
from .space import violation
from .stopping import Stop
from .storage import find_storage
from .study import (
    Failure,
    PrunedRow,
    RungStudy,
    find_study,
    head_map_text,
    study_name,
)

SCHEMA = 1


def _meets(candidate: Candidate, bound: ConstraintConfig) -> bool:
    return violation(bound, candidate.metrics[bound.metric]) <= 0


@dataclass(frozen=True)
class RungOutcome:
    """What one rung came to."""

    proxy_tokens: int
    search: list[Candidate]
    control: list[Candidate]
    failures: list[Failure]
    fronts: Fronts
    pruned: tuple[list[PrunedRow], list[PrunedRow]] = ([], [])
    """The search's candidates and the control's that did not get as far as this rung."""
    confidence: float | None = None
    """Of the intervals, where this is the final stage."""
    stop: Stop | None = None
    """Why fewer candidates were begun than were wanted, where that is so."""
    control_stop: Stop | None = None
    """The same of the random control, which may have no more candidates than the search had."""
    constraints: tuple[ConstraintConfig, ...] = ()

    @property
    def unmet(self) -> str | None:
        """How near the search's candidates came to the constraints, where none of them meets all; else None."""
        if not self.search or any(c.feasible for c in self.search):
            return None
        said = (
            count + self._nearest(bound)
            for count, bound in zip(self.met(), self.constraints, strict=True)
        )
        return f"no head map ({self.length}) meets search.constraints: {'; '.join(said)}"

    def met(self) -> list[str]:
        """Each constraint, and how many of the search's candidates meet it."""
        counts = (sum(_meets(c, bound) for c in self.search) for bound in self.constraints)
        return [
            f"{bound.text} met by {count} of {len(self.search)}"
            for bound, count in zip(self.constraints, counts, strict=True)
        ]

    def _nearest(self, bound: ConstraintConfig) -> str:
        """The value that comes nearest to the bound, of those candidates that meet the others if there are any."""
        others = [other for other in self.constraints if other is not bound]
        within = [c for c in self.search if all(_meets(c, other) for other in others)]
        values = [c.metrics[bound.metric] for c in within or self.search]
        near = float(min(values, key=lambda value: violation(bound, value)))
        if violation(bound, near) <= 0:
            return ""
        whose = " that meets the others" if others and within else ""
        return f", the nearest{whose} has {near:.{10 if near.is_integer() else 4}g}"

    @property
    def length(self) -> str:
        """How long its candidates were trained, in words."""
        tokens = f"{self.proxy_tokens:,} tokens" if self.proxy_tokens else "untrained"
        return tokens if self.confidence is None else f"the final {tokens}"

    @property
    def end(self) -> str:
        """How many candidates were begun and what ended that, and how many failed."""
        control = [failure for failure in self.failures if failure.method == CONTROL]
        begun = len(self.search) + len(self.failures) - len(control)
        said = f"{self.length}: all {begun} head maps" if begun else f"{self.length}: none"
        if self.stop:
            said = f"{self.length}: {self.stop.begun} of {self.stop.wanted} head maps, then {self.stop.reason}"
        if len(self.failures) > len(control):
            said += f", {len(self.failures) - len(control)} failed"
        if control:
            said += f", {len(control)} failed of the random control"
        if self.control_stop and self.control_stop != self.stop:
            stop = self.control_stop
            said += f"; random control: {stop.begun} of {stop.wanted}, then {stop.reason}"
        return said

    def to_json(self) -> dict[str, Any]:
        """The rung as an entry of trials.json."""
        fronts = self.fronts
        return {
            "proxy_tokens": self.proxy_tokens,
            "reference": list(fronts.scale.reference),
            "hypervolume": fronts.hypervolumes(),
            "candidates": [
                {
                    "candidate": c.candidate,
                    "method": c.source,
                    "also": list(c.also),
                    "metrics": dict(c.metrics),
                    "head_map": head_map_text(c.head_map),
                    "feasible": c.feasible,
                    "on_front": c in (fronts.control if c.source == CONTROL else fronts.points),
                }
                for c in (*self.search, *self.control)
            ],
            "failures": [asdict(failure) for failure in self.failures],
            "stopped": str(self.stop) if self.stop else None,
            "control_stopped": str(self.control_stop) if self.control_stop else None,
            "pruned": [asdict(row) for rows in self.pruned for row in rows],
        }


@dataclass(frozen=True)
class SearchOutcome:
    """What a search came to; the fronts of the last rung that anyone reached are the run's."""

    rungs: list[RungOutcome]

    @property
    def last(self) -> RungOutcome:
        """The last rung with results of the search, or if none has any, with those of the control."""
        reached = [rung for rung in self.rungs if rung.search] or [
            r for r in self.rungs if r.control
        ]
        return (reached or self.rungs)[-1]

    @property
    def tokens(self) -> int:
        """Distillation tokens of the last rung."""
        return self.last.proxy_tokens

    @property
    def fronts(self) -> Fronts:
        """The fronts of the last rung."""
        return self.last.fronts

    @property
    def failed(self) -> int:
        """Candidates that failed for good, in all rungs."""
        return sum(len(rung.failures) for rung in self.rungs)

    @property
    def lines(self) -> list[str]:
        """The front's size, the hypervolumes and what ended the search at each length, as a run prints them."""
        missed = [rung.length for rung in self.rungs[self.rungs.index(self.last) + 1 :]]
        front = [f"no result at {', '.join(missed)}: the front is from before ({self.last.length})"]
        unmet = [self.last.unmet] if self.last.unmet else []
        if unmet:
            front = [
                f"no result at {', '.join(missed)}: none goes on from an empty front; with search.halving those do that "
                "miss a bound which training may bring them within"
            ]
        ends = [rung.end for rung in self.rungs]
        return [*self.fronts.lines(self.last.length), *unmet, *ends, *front * bool(missed)]

    def stops(self) -> list[str]:
        """What ended rungs before all of their candidates were begun; of the random control only what did not end the search."""
        return [
            f"{who} stopped at {rung.proxy_tokens} tokens by {stop}"
            for rung in self.rungs
            for who, stop in (
                ("search", rung.stop),
                ("random control", rung.control_stop if rung.control_stop != rung.stop else None),
            )
            if stop
        ]

    @property
    def summary(self) -> str:
        """The same as one line."""
        return "; ".join(self.lines)


def collect(config: RunConfig, tokens: int, studies: Sequence[RungStudy | None]) -> RungOutcome:
    """Reads a rung's outcome from its study and its random control's, where there is one."""
    constrained = bool(config.search.constraints)
    found = [s.candidates(constrained=constrained) if s else [] for s in studies]
    search, control = found[0], found[1] if len(found) > 1 else []
    pruned = [*(s.pruned() if s else [] for s in studies), []]
    stops = [*(s.stop() if s else None for s in studies), None]
    return RungOutcome(
        tokens,
        search,
        control,
        [failure for study in studies if study for failure in study.failures()],
        Fronts.of(config.search.objectives, search, control, tokens),
        (pruned[0], pruned[1]),
        config.search.final.confidence if tokens == config.search.final.tokens else None,
        stops[0],
        stops[1],
        config.search.constraints,
    )


def read_outcome(config: RunConfig, run_dir: RunDir, shape: ModelShape) -> SearchOutcome:
    """What the studies of a run hold so far, finished or not; rungs that have not begun are left out."""
    rungs, storage = list[RungOutcome](), find_storage(config, run_dir)
    if storage is None:
        return SearchOutcome([])
    for tokens in config.search.lengths:
        names = (study_name(config, tokens), study_name(config, tokens, control=True))
        studies = [find_study(storage, name, shape) for name in names]
        if studies[0] is not None:
            rungs.append(collect(config, tokens, studies))
    return SearchOutcome(rungs)


@dataclass(frozen=True)
class RungDone:
    """Candidates whose evaluation is over at a rung, the random control's included, and the tokens of all their tries."""

    count: int
    tokens: int


def read_done(
    config: RunConfig, run_dir: RunDir, shape: ModelShape
) -> tuple[list[RungDone], float]:
    """What each rung of a run's studies has done, up to the last one that was begun, and the seconds of all."""
    storage = find_storage(config, run_dir)
    rungs, seconds = list[RungDone](), 0.0
    if storage is None:
        return rungs, seconds
    for tokens in config.search.lengths:
        names = (study_name(config, tokens), study_name(config, tokens, control=True))
        found = [s for name in names if (s := find_study(storage, name, shape)) is not None]
        if not found:
            break
        over = [
            any(t.state.is_finished() for t in tries)
            for s in found
            for tries in s.attempts().values()
        ]
        rungs.append(RungDone(sum(over), sum(study.tokens() for study in found)))
        seconds += sum(sum(study.seconds()) for study in found)
    return rungs, seconds


def write_outcome(run_dir: RunDir, outcome: SearchOutcome) -> None:
    """Writes trials.json (every candidate of every rung), pareto.json and a file for each of its maps.

    Whenever a call is killed, each map of the pareto.json that is there has its file.
    """
    run_dir.write_json(
        "trials.json", {"schema": SCHEMA, "rungs": [rung.to_json() for rung in outcome.rungs]}
    )
    for point in outcome.fronts.points:
        run_dir.write_json(f"front/{point.candidate}.json", point.head_map.to_json())
    last = outcome.last
    also = {"confidence": last.confidence, "unmet": last.unmet}
    said = {name: value for name, value in also.items() if value}
    run_dir.write_json("pareto.json", outcome.fronts.to_json() | said)
    kept = {f"{point.candidate}.json" for point in outcome.fronts.points}
    for old in (run_dir / "front").glob("*.json"):
        if old.name not in kept:
            old.unlink()
