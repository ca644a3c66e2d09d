"""How much of the teacher's accuracy the found map of few full-attention heads keeps, beside baselines of that share.

Measured after the last proxy, on more prompts than a trial has and on none of a trial's, so that maps are not judged by
what they were chosen by. Baselines are trained as long as the found map. No torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..config import ObjectiveConfig, RetentionConfig, RunConfig, SeedConfig
from ..errors import ConfigError
from ..execution.base import Executor
from ..headmap import HeadMap, ModelShape, Operator
from ..metrics import COSTS, FIGURES, metric_name
from ..rundir import RunDir
from .front import SEARCH, Candidate
from .outcome import SearchOutcome
from .records import TrialSpec, trained_path
from .rung import judge
from .samplers import derive_seed
from .seeds import ScoreTables, seed_maps, within_share

SCHEMA = 1
RETENTION_FILE = "retention.json"
TEACHER, FOUND = "teacher", "front"
"""What the teacher itself and the front's best map of at most the share are called; others by their method."""

Say = Callable[[str], None]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kept:
    """A map and what it answers: source is TEACHER, FOUND, "search" or a seed method; candidate that of a trial."""

    source: str
    layers: tuple[str, ...]
    candidate: int | None = None
    method: str | None = None
    """Who supplied a candidate."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str | None = None
    """Why there are no metrics."""


@dataclass(frozen=True)
class Retention:
    """All that is compared. tokens: of distillation, of every map but the teacher."""

    fa_share: float
    prompts: int
    kinds: tuple[str, ...]
    tokens: int
    maps: tuple[Kept, ...]

    def to_json(self) -> dict[str, Any]:
        """The content of retention.json."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> Retention:
        """Reads to_json's form. Raises ValueError on another schema or malformed data."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"schema {found!r} is not {SCHEMA}")
        fields = {name: value for name, value in data.items() if name != "schema"}
        try:
            maps = tuple(Kept(**{**row, "layers": tuple(row["layers"])}) for row in fields["maps"])
            return cls(**{**fields, "maps": maps, "kinds": tuple(fields["kinds"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"malformed ({error!r})") from error


def read_retention(run_dir: RunDir) -> Retention | None:
    """What a run measured, None where it did not. Raises ConfigError where the file is damaged."""
    if not (run_dir / RETENTION_FILE).exists():
        return None
    try:
        return Retention.from_json(run_dir.read_json(RETENTION_FILE))
    except ValueError as error:
        raise ConfigError(
            f"{run_dir / RETENTION_FILE}: damaged or of another version: {error}"
        ) from error


def baseline_seeds(config: RetentionConfig) -> SeedConfig:
    """The baselines as seeds of a search."""
    return SeedConfig(
        methods=config.methods, fa_shares=(config.fa_share,), random_maps=config.random_maps
    )


def measure_retention(
    config: RunConfig,
    run_dir: RunDir,
    shape: ModelShape,
    scores: Mapping[str, ScoreTables],
    outcome: SearchOutcome,
    executor: Executor,
    say: Say = _log.info,
) -> None:
    """Writes retention.json, a map after the other; what an earlier call measured of the same maps is kept."""
    options = config.search.retention
    maps = compared_maps(config, shape, scores, outcome)
    old = _earlier(run_dir)
    done = Retention(options.fa_share, options.prompts, options.kinds, outcome.tokens, ())
    if old is not None and replace(old, maps=()) == done:
        known = {kept.layers: kept for kept in old.maps if kept.reason is None}
        maps = [_with_metrics(kept, known.get(kept.layers)) for kept in maps]
    wanted = [f"{metric_name(kind)}_{figure}" for kind in options.kinds for figure in FIGURES]
    todo = [index for index, kept in enumerate(maps) if not kept.metrics]
    if todo:
        say(f"  retention: {len(todo)} maps, {options.prompts} prompts of each kind")
    for start in range(0, len(todo), executor.capacity):
        for index in todo[start : start + executor.capacity]:
            executor.submit(
                index, _spec(config, run_dir, shape, maps[index], index, outcome.tokens)
            )
        for _ in todo[start : start + executor.capacity]:
            result = executor.next_done()
            kept = maps[result.task_id]
            if result.fault is not None:
                raise result.fault(f"search.retention: {kept.source}: {result.error}")
            verdict = judge(result, wanted)
            if verdict.reason is not None:
                say(f"retention: {kept.source} failed: {verdict.reason}")
            maps[result.task_id] = replace(kept, metrics=verdict.metrics, reason=verdict.reason)
            measured = tuple(kept for kept in maps if kept.metrics or kept.reason)
            run_dir.write_json(RETENTION_FILE, replace(done, maps=measured).to_json())


def compared_maps(
    config: RunConfig,
    shape: ModelShape,
    scores: Mapping[str, ScoreTables],
    outcome: SearchOutcome,
) -> list[Kept]:
    """The teacher, the front's best map within the share, the search's own best where that is another, and the baselines."""
    options, objectives = config.search.retention, config.search.objectives
    found = [Kept(TEACHER, HeadMap.uniform(shape, Operator.FULL).layers)]
    own = [c for c in outcome.last.search if c.source == SEARCH and c.feasible]
    for source, candidates in ((FOUND, outcome.fronts.points), (SEARCH, own)):
        best = _best(candidates, objectives, options.fa_share)
        if best is not None and best.head_map.layers not in {kept.layers for kept in found}:
            found.append(Kept(source, best.head_map.layers, best.candidate, best.source))
    seeds = seed_maps(shape, scores, baseline_seeds(options), config.seed, config.cost)
    taken = {kept.layers for kept in found}
    found += [Kept(s.method, s.head_map.layers) for s in seeds if s.head_map.layers not in taken]
    return found


def _best(
    candidates: Sequence[Candidate], objectives: Sequence[ObjectiveConfig], share: float
) -> Candidate | None:
    """The best within the share by the first objective that is no cost."""
    within = [c for c in candidates if within_share(c.head_map, share)]
    qualities = [o for o in objectives if o.metric not in COSTS] or list(objectives)
    sign = 1 if qualities[0].direction == "minimize" else -1
    return min(within, key=lambda c: sign * c.metrics[qualities[0].metric], default=None)


def _spec(
    config: RunConfig, run_dir: RunDir, shape: ModelShape, kept: Kept, index: int, tokens: int
) -> TrialSpec:
    """A candidate's own weights, of as many tokens, are measured as they are; a baseline is trained first."""
    head_map = HeadMap(shape, kept.layers).to_json()
    spec = TrialSpec(
        index, head_map, tokens, seed=derive_seed(config.seed, "retention", index), retention=True
    )
    if kept.candidate is None:
        return spec
    trained = trained_path(run_dir.path, TrialSpec(kept.candidate, head_map, tokens))
    return replace(spec, parent=str(trained) if trained.exists() else None)


def _with_metrics(kept: Kept, old: Kept | None) -> Kept:
    return kept if old is None else replace(kept, metrics=old.metrics)


def _earlier(run_dir: RunDir) -> Retention | None:
    try:
        return read_retention(run_dir)
    except ConfigError:
        return None  # It is made again.
