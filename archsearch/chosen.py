"""Which head map of a run is meant: the knee of its front, the best within a share, any candidate, or a file's. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .headmap import HeadMap, ModelShape
from .metrics import COSTS
from .rundir import RunDir
from .search.outcome import read_outcome
from .search.seeds import within_share

NO_MAPS = {"points": "the front of a run", "rungs": "all candidates of a run"}
"""What files are that could be taken for a head map's, by a field that only they have."""


@dataclass(frozen=True)
class Choice:
    """A candidate by its number, the front's knee, its best within a share, or the map of a file."""

    candidate: int | None = None
    knee: bool = False
    fa_share: float | None = None
    file: Path | None = None

    def check(self, command: str) -> None:
        """Raises ConfigError unless one thing is chosen that could be there."""
        given = [x is not None for x in (self.candidate, self.fa_share, self.file)]
        if sum([*given, self.knee]) != 1:
            raise ConfigError(
                f"{command}: give exactly one of --candidate, --knee, --fa-share and --head-map"
            )
        if self.fa_share is not None and not 0 <= self.fa_share <= 1:
            raise ConfigError(f"--fa-share {self.fa_share:g}: not allowed; allowed: 0 to 1")
        if self.candidate is not None and self.candidate < 0:
            raise ConfigError(
                f"--candidate {self.candidate}: not allowed; allowed: a number of the report"
            )


@dataclass(frozen=True)
class Chosen:
    """What was chosen. candidate and proxy_tokens, those that its metrics are of, are None and 0 for a map of a file."""

    head_map: HeadMap
    source: str
    metrics: dict[str, float]
    candidate: int | None = None
    proxy_tokens: int = 0

    @property
    def name(self) -> str:
        """Whose map it is, in words."""
        return self.source if self.candidate is None else f"candidate {self.candidate}"


def find(run_dir: RunDir, choice: Choice, shape: ModelShape) -> Chosen:
    """What is chosen of a run, whose teacher has that shape.

    Raises ConfigError where there is no such candidate, no front yet, or no such file with a map of this teacher.
    """
    if choice.file is not None:
        return Chosen(_read_map(choice.file, shape), f"head map {choice.file.name}", {})
    run_dir.require_search("pareto.json")
    pareto: dict[str, Any] = run_dir.read_json("pareto.json")
    points: list[dict[str, Any]] = pareto["points"]
    if choice.candidate is not None:
        of_seeds = pareto["seeds"]["points"]
        for point in [*points, *of_seeds]:
            if point["candidate"] == choice.candidate:
                return _of_point(pareto, point)
        return _evaluated(run_dir, choice.candidate, shape)
    if not points:
        why = pareto.get("unmet") or "no head map was evaluated"
        raise ConfigError(
            f"{run_dir.path}: the front is empty, {why}; allowed: --candidate with a number of the report, --head-map"
        )
    if choice.fa_share is not None:
        return _of_point(pareto, _at_share(points, pareto["objectives"], choice.fa_share))
    return _of_point(pareto, next(p for p in points if p["candidate"] == pareto["knee"]))


def _of_point(pareto: dict[str, Any], point: dict[str, Any]) -> Chosen:
    return Chosen(
        HeadMap.from_json(point["head_map"]),
        point["source"],
        point["metrics"],
        point["candidate"],
        int(pareto["proxy_tokens"]),
    )


def _evaluated(run_dir: RunDir, number: int, shape: ModelShape) -> Chosen:
    """A candidate that is on no front, as the longest proxy that it got to left it."""
    rungs = read_outcome(run_dir.load_config(), run_dir, shape).rungs
    for rung in reversed(rungs):
        for c in rung.search:
            if c.candidate == number:
                return Chosen(c.head_map, c.source, dict(c.metrics), number, rung.proxy_tokens)
    known = sorted({c.candidate for rung in rungs for c in rung.search})
    allowed = f"a number from {known[0]} to {known[-1]}" if known else "none, nothing is evaluated"
    raise ConfigError(
        f"--candidate {number}: not evaluated in {run_dir.path}; allowed: {allowed} (archsearch report)"
    )


def _at_share(
    points: list[dict[str, Any]], objectives: list[dict[str, str]], fa_share: float
) -> dict[str, Any]:
    """The best point within the share, by the first objective that is no cost."""
    maps = [HeadMap.from_json(point["head_map"]) for point in points]
    within = [p for p, m in zip(points, maps, strict=True) if within_share(m, fa_share)]
    if not within:
        raise ConfigError(
            f"--fa-share {fa_share:g}: the front has no map of so few FA heads; "
            f"its smallest share is {min(m.fa_share for m in maps):.4g}"
        )
    qualities = [o for o in objectives if o["metric"] not in COSTS] or objectives
    sign = 1 if qualities[0]["direction"] == "minimize" else -1
    return min(within, key=lambda p: sign * p["metrics"][qualities[0]["metric"]])


def _read_map(path: Path, shape: ModelShape) -> HeadMap:
    option = f"--head-map {path}"
    allowed = "allowed: a file like RUN/front/N.json, or for a candidate of the run --candidate N"
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{option}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"{option}: no JSON; {allowed}") from error
    for field, what in NO_MAPS.items():
        if isinstance(data, dict) and field in data:
            raise ConfigError(f"{option}: holds {what}, not one head map; {allowed}")
    try:
        head_map = HeadMap.from_json(data)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}; {allowed}") from error
    found, wanted = (_geometry(model) for model in (head_map.model, shape))
    if found != wanted:
        raise ConfigError(f"{option}: a map of {found}; the run's teacher has {wanted}")
    return head_map


def _geometry(shape: ModelShape) -> str:
    return f"{shape.num_layers} layers of {shape.num_heads} heads over {shape.num_kv_heads} KV heads of {shape.head_dim}"
