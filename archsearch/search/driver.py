"""The search of a run: rung after rung of candidates, and the fronts they end in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import get_args

from ..config import RunConfig, ScoreMethod, SearchConfig
from ..execution.base import Executor
from ..execution.choice import open_executor
from ..headmap import HeadMap, ModelShape
from ..progress import Progress, ignore_progress
from ..rundir import RunDir
from .bounds import broken_bound
from .front import CONTROL, Candidate
from .outcome import RungOutcome, SearchOutcome, collect, write_outcome
from .promotion import Promotion, Pruned, promote, promote_fronts
from .proposals.base import Proposals
from .proposals.choice import make_proposals
from .retention import baseline_seeds, measure_retention
from .rung import Job, Rung, Say
from .samplers import derive_seed, quiet_optuna
from .seeds import ScoreTables, Seed, needed_by_seeds, seeds_of_search
from .space import SPACE_SCORES, check_constraints, full_head_range, random_map
from .stopping import (
    Clock,
    Limit,
    Stop,
    affordable_candidates,
    ended_by_patience,
    first_of,
    patience_limit,
    time_limit,
)
from .study import SECONDS, STOPPED, RungStudy, open_storage, open_study, study_name

__all__ = ["SearchOutcome", "needed_scores", "run_search"]

_log = logging.getLogger(__name__)

_ENDS = ("all_full", "all_gdn")


def run_search(
    config: RunConfig,
    run_dir: RunDir,
    shape: ModelShape,
    scores: Mapping[str, ScoreTables],
    progress: Progress = ignore_progress,
    *,
    say: Say = _log.info,
    make_executor: Callable[[], Executor] | None = None,
) -> SearchOutcome:
    """Evaluates the candidates of every rung and writes pareto.json, trials.json and the front's maps.

    Goes on from where an earlier call was stopped. scores: tables by method, at least those of needed_scores. make_executor starts the executor; the config's, with real workers, where it is None.
    Raises ConfigError on constraints that nothing meets, EnvironmentFault where workers or storage fail.
    """
    quiet_optuna()
    check_constraints(config.search.constraints, shape, config.cost)
    search = _Search(config, run_dir, shape, scores, progress, say)
    executor = make_executor() if make_executor else _real_executor(config, run_dir)
    try:
        outcome = search.run(executor)
        write_outcome(run_dir, outcome)
        if config.search.retention.prompts:
            measure_retention(config, run_dir, shape, scores, outcome, executor, say)
    finally:
        executor.shutdown()
    return outcome


def needed_scores(config: SearchConfig) -> list[ScoreMethod]:
    """The scores that a search reads, for its seeds and for its space, in the order of ScoreMethod."""
    needed = needed_by_seeds(config.seeds) | {*SPACE_SCORES}
    if config.retention.prompts:
        needed |= needed_by_seeds(baseline_seeds(config.retention))
    return [method for method in get_args(ScoreMethod) if method in needed]


def _real_executor(config: RunConfig, run_dir: RunDir) -> Executor:
    from .trial import TrialWorker  # Brings torch, which the driver itself does without.

    payload = {
        "config": config.model_dump(mode="json", by_alias=True),
        "run_dir": str(run_dir.path),
    }
    return open_executor(config.execution, TrialWorker, payload)


@dataclass(frozen=True)
class _Group:
    """What one study of a rung has to evaluate, those first that matter most."""

    jobs: Sequence[Job]
    control: bool = False
    promotion: Promotion | None = None
    """Whom of the rung before it goes on with; None at the first rung."""
    tokens_before: int = 0
    stop: Stop | None = None

    @property
    def wanted(self) -> bool:
        """Whether it needs a study."""
        pruned = self.promotion is not None and self.promotion.pruned
        return not self.control or bool(self.jobs or pruned)

    def within(self, count: int, reason: str) -> _Group:
        """The first count of its jobs; the others are left out for that reason."""
        if count >= len(self.jobs):
            return self
        promotion = self.promotion and self.promotion.within(count, reason)
        wanted = len(self.jobs) if self.stop is None else self.stop.wanted
        stop = Stop(reason, count, wanted)
        return replace(self, jobs=self.jobs[:count], promotion=promotion, stop=stop)


class _Search:
    """The rungs of one search and what they share."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDir,
        shape: ModelShape,
        scores: Mapping[str, ScoreTables],
        progress: Progress,
        say: Say,
    ) -> None:
        self._config, self._run_dir, self._shape, self._say = config, run_dir, shape, say
        search = config.search
        name = study_name(config, search.proxy_tokens[0])
        self._proposals: Proposals = make_proposals(config, shape, scores, name)
        seeds = seeds_of_search(shape, scores, search, config.seed, config.cost)
        self._seeds = _within_bounds(config, seeds, say)
        if len(self._seeds) > search.trials:
            left_out = len(self._seeds) - search.trials
            say(f"search.trials {search.trials} leaves no room for the last {left_out} seeds")
        self._storage = open_storage(search.storage or run_dir.storage)
        self._progress, self._done, self._total = progress, 0, 0
        self._clock: Clock | None = None
        self._spent = 0

    def run(self, executor: Executor) -> SearchOutcome:
        """Evaluates every rung, each on those of the one before that go on."""
        rungs: list[RungOutcome] = []
        try:
            for rung, tokens in enumerate(self._config.search.lengths):
                groups = self._later_groups(rungs[-1], rung) if rungs else self._first_groups()
                rungs.append(collect(self._config, tokens, self._run_rung(executor, rung, groups)))
        finally:
            if self._clock is not None:
                self._clock.save()
        return SearchOutcome(rungs)

    def _first_groups(self) -> list[_Group]:
        """The first rung's candidates: the seeds, what will be proposed, and the control."""
        trials = self._config.search.trials
        search = [
            Job(number, seed.head_map, seed.method, seed.also)
            for number, seed in enumerate(self._seeds[:trials])
        ]
        search += [Job(number) for number in range(len(search), trials)]
        if not self._config.search.random_control:
            return [_Group(search)]
        maps = _random_maps(self._shape, self._config, trials)
        control = [Job(number, head_map, CONTROL) for number, head_map in enumerate(maps)]
        return [_Group(search), _Group(control, control=True)]

    def _later_groups(self, before: RungOutcome, rung: int) -> list[_Group]:
        """Those that go on from the rung before."""
        config = self._config.search
        parts = (before.fronts, before.search, before.control)
        if config.is_final(rung):
            found = promote_fronts(*parts, config.final.max_points, "search.final.max_points")
        else:
            found = promote(config, *parts)
        return [
            _Group(_repeats(promotion.chosen), bool(control), promotion, before.proxy_tokens)
            for control, promotion in enumerate(found)
        ]

    def _run_rung(self, executor: Executor, rung: int, groups: Sequence[_Group]) -> list[RungStudy]:
        """Evaluates the search's candidates and then the control's, as many as the search could have."""
        groups = [group for group in groups if group.wanted]
        bound = affordable_candidates(self._config, rung, self._spent, len(groups))
        if bound is not None:
            groups = [group.within(*bound) for group in groups]
        studies: list[RungStudy] = []
        for group in groups:
            stop = studies[0].stop() if studies and not rung else None
            studies.append(
                self._evaluate(
                    executor, rung, group.within(stop.begun, stop.reason) if stop else group
                )
            )
        self._spent += sum(study.tokens() for study in studies)
        return studies

    def _evaluate(self, executor: Executor, rung: int, group: _Group) -> RungStudy:
        config, first = self._config, rung == 0 and not group.control
        name = study_name(config, config.search.lengths[rung], control=group.control)
        records = RungStudy(open_study(self._storage, name, config), self._storage, self._shape)
        if first:
            self._clock = self._start_clock(records)
            earlier = records.stop()
            if earlier is not None and ended_by_patience(config.search, earlier):
                group = group.within(earlier.begun, earlier.reason)
        if group.promotion is not None:
            records.mark_pruned(group.promotion.pruned, group.tokens_before)
        self._total += len(group.jobs)
        runner = Rung(
            config,
            self._run_dir,
            records,
            executor,
            rung=rung,
            jobs=group.jobs,
            proposals=self._proposals if first else None,
            limit=self._limit(rung, group),
            finished=self._advance,
            say=self._say,
        )
        runner.run()
        if runner.reason is not None:
            group = self._leave_out(records, group, runner.left, runner.reason)
        records.remember(STOPPED, None if group.stop is None else asdict(group.stop))
        return records

    def _start_clock(self, records: RungStudy) -> Clock | None:
        """Without a limit on time nothing is written down."""
        if self._config.search.max_minutes is None:
            return None
        used = records.study.user_attrs.get(SECONDS, 0.0)
        return Clock(used, lambda seconds: records.remember(SECONDS, seconds))

    def _limit(self, rung: int, group: _Group) -> Limit:
        search = self._config.search
        groups = 2 if search.random_control else 1
        share = (rung * groups + group.control + 1) / (len(search.lengths) * groups)
        limit = time_limit(search, self._clock, share)
        if rung or group.control:
            return limit
        return first_of(limit, patience_limit(search, len(self._seeds)))

    def _leave_out(
        self, records: RungStudy, group: _Group, left: Sequence[Job], reason: str
    ) -> _Group:
        """Marks those that a limit kept from being begun."""
        self._total -= len(left)
        numbers = {job.candidate for job in left}
        if group.promotion is not None:
            cut = [Pruned(c, reason) for c in group.promotion.chosen if c.candidate in numbers]
            records.mark_pruned(cut, group.tokens_before)
        wanted = group.stop.wanted if group.stop is not None else len(group.jobs)
        return replace(group, stop=Stop(reason, len(group.jobs) - len(left), wanted))

    def _advance(self) -> None:
        self._done += 1
        if self._clock is not None:
            self._clock.save()
        self._progress(self._done, self._total)


def _repeats(candidates: Sequence[Candidate]) -> list[Job]:
    """Jobs for candidates of an earlier rung."""
    return [Job(c.candidate, c.head_map, c.source, c.also) for c in candidates]


def _within_bounds(config: RunConfig, seeds: Sequence[Seed], say: Say) -> list[Seed]:
    """The seeds that meet every bound on a cost; the two ends stay, as what all others are compared with."""
    kept, left_out = [], []
    for seed in seeds:
        broken = broken_bound(seed.head_map, config.search.constraints, config.cost)
        if broken is None or seed.method in _ENDS:
            kept.append(seed)
        else:
            left_out.append(f"{seed.method} ({broken})")
    if left_out:
        say(f"seeds left out, outside search.constraints: {', '.join(left_out)}")
    return kept


def _random_maps(shape: ModelShape, config: RunConfig, count: int) -> list[HeadMap]:
    """Different random maps within the bounds on costs, the same first ones whatever the count; fewer where there are no more."""
    found: dict[HeadMap, None] = {}
    bounds = config.search.constraints
    low, high = full_head_range(bounds, shape)
    for number in range(count):
        rng = Random(derive_seed(config.seed, CONTROL, number))
        for _ in range(64):
            head_map = random_map(shape, rng, low, high)
            if head_map not in found and broken_bound(head_map, bounds, config.cost) is None:
                found[head_map] = None
                break
    return list(found)
