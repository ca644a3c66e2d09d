"""The search of a run: rung after rung of candidates, and the fronts they end in."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import get_args

from ..config import RunConfig, ScoreMethod, SearchConfig
from ..execution.base import Executor
from ..execution.choice import open_executor
from ..headmap import ModelShape
from ..passwords import shown_config
from ..progress import Progress, Unwatched, Watch, ignore_progress
from ..rundir import RunDir
from .entrants import Group, random_maps, repeats, within_bounds
from .front import CONTROL
from .outcome import RungOutcome, SearchOutcome, collect, write_outcome
from .promotion import Pruned, promote, promote_fronts
from .proposals.base import Proposals
from .proposals.choice import make_proposals
from .retention import baseline_seeds, measure_retention
from .rung import Job, Rung, Say
from .samplers import quiet_optuna
from .seeds import ScoreTables, Seed, needed_by_seeds, seeds_of_search
from .space import SPACE_SCORES, check_constraints
from .stopping import (
    Clock,
    Limit,
    Stop,
    affordable_candidates,
    ended_by_patience,
    first_of,
    patience_limit,
    standing,
    time_limit,
)
from .storage import keep_password, open_storage, storage_faults, storage_url
from .study import (
    SECONDS,
    STOPPED,
    RungStudy,
    find_study,
    open_study,
    study_name,
)

__all__ = ["SearchOutcome", "needed_scores", "run_search", "scored_methods"]

_log = logging.getLogger(__name__)


def run_search(
    config: RunConfig,
    run_dir: RunDir,
    shape: ModelShape,
    scores: Mapping[str, ScoreTables],
    progress: Progress = ignore_progress,
    *,
    say: Say = _log.info,
    watch: Watch | None = None,
    make_executor: Callable[[], Executor] | None = None,
) -> SearchOutcome:
    """Evaluates the candidates of every rung and writes pareto.json, trials.json and the front's maps.

    Goes on from where an earlier call was stopped. scores: tables by method, at least those of needed_scores. make_executor starts the executor; the config's, with real workers, where it is None.
    Raises ConfigError on constraints that nothing meets, EnvironmentFault where workers or storage fail.
    """
    quiet_optuna()
    check_constraints(config.search.constraints, shape, config.cost)
    with storage_faults(storage_url(config, run_dir)):
        search = _Search(config, run_dir, shape, scores, progress, say, watch or Unwatched())
    executor = make_executor() if make_executor else _real_executor(config, run_dir)
    try:
        with storage_faults(storage_url(config, run_dir)):
            outcome = search.run(executor)
        write_outcome(run_dir, outcome)
        if config.search.retention.prompts:
            if watch is not None:
                watch.begin("retention:")
            measure_retention(config, run_dir, shape, scores, outcome, executor, say)
    finally:
        executor.shutdown()
    return outcome


def scored_methods(config: RunConfig) -> list[ScoreMethod]:
    """The scores of a run, in the order of ScoreMethod: causal, what the search reads, and scoring.methods."""
    wanted = {"causal", *needed_scores(config.search), *config.scoring.methods}
    return [method for method in get_args(ScoreMethod) if method in wanted]


def needed_scores(config: SearchConfig) -> list[ScoreMethod]:
    """The scores that a search reads, for its seeds and for its space, in the order of ScoreMethod."""
    needed = needed_by_seeds(config.seeds) | {*SPACE_SCORES}
    if config.retention.prompts:
        needed |= needed_by_seeds(baseline_seeds(config.retention))
    return [method for method in get_args(ScoreMethod) if method in needed]


def _real_executor(config: RunConfig, run_dir: RunDir) -> Executor:
    from .trial import TrialWorker  # Brings torch, which the driver itself does without.

    payload = {
        "config": shown_config(config),
        "run_dir": str(run_dir.path),
    }
    return open_executor(config.execution, TrialWorker, payload)


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
        watch: Watch,
    ) -> None:
        self._config, self._run_dir, self._shape, self._say = config, run_dir, shape, say
        search = config.search
        name = study_name(config, search.proxy_tokens[0])
        self._storage = open_storage(storage_url(config, run_dir))
        keep_password(config, run_dir)
        self._proposals: Proposals = make_proposals(config, shape, scores, name)
        self._seeds = within_bounds(config, self._first_seeds(name, scores), say)
        if (more := len(self._seeds) - search.trials) >= 0:
            out = f"; the last {more} seeds are left out" if more else ""
            say(
                f"search.trials {search.trials}: all are seeds, {search.sampler} proposes none{out}"
            )
        self._progress, self._watch = progress, watch
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

    def _first_seeds(self, name: str, scores: Mapping[str, ScoreTables]) -> list[Seed]:
        """The seeds by the trials and the scores of the call that began the study: how many there are follows from both.

        With those of a later call, seeds would get the numbers of candidates that are evaluated.
        """
        study = find_study(self._storage, name, self._shape)
        first = (study.first_config() if study else None) or self._config
        known: dict[str, ScoreTables] = {
            method: scores[method] for method in scored_methods(first) if method in scores
        }
        return seeds_of_search(
            self._shape, known, first.search, self._config.seed, self._config.cost
        )

    def _first_groups(self) -> list[Group]:
        """The first rung's candidates: the seeds, what will be proposed, and the control."""
        trials = self._config.search.trials
        search = [
            Job(number, seed.head_map, seed.method, seed.also)
            for number, seed in enumerate(self._seeds[:trials])
        ]
        search += [Job(number) for number in range(len(search), trials)]
        if not self._config.search.random_control:
            return [Group(search)]
        maps = random_maps(self._shape, self._config, trials)
        control = [Job(number, head_map, CONTROL) for number, head_map in enumerate(maps)]
        return [Group(search), Group(control, control=True)]

    def _later_groups(self, before: RungOutcome, rung: int) -> list[Group]:
        """Those that go on from the rung before."""
        config = self._config.search
        parts = (before.fronts, before.search, before.control)
        if config.is_final(rung):
            found = promote_fronts(*parts, config.final.max_points, "search.final.max_points")
        else:
            found = promote(config, *parts)
        return [
            Group(repeats(promotion.chosen), bool(control), promotion, before.proxy_tokens)
            for control, promotion in enumerate(found)
        ]

    def _run_rung(self, executor: Executor, rung: int, groups: Sequence[Group]) -> list[RungStudy]:
        """Evaluates the search's candidates and then the control's, as many as the search could have."""
        groups = [group for group in groups if group.wanted]
        later = self._spent_after(rung)
        bound = affordable_candidates(self._config, rung, self._spent, len(groups), later)
        studies: list[RungStudy] = []
        for group in groups:
            records = self._open(rung, group)
            stop = studies[0].stop() if studies and not rung else None
            caps = [bound, (stop.begun, stop.reason) if stop else None]
            self._evaluate(executor, rung, self._within_limits(rung, group, records, caps), records)
            studies.append(records)
        self._spent += sum(study.tokens() for study in studies)
        return studies

    def _spent_after(self, rung: int) -> int:
        """Tokens that earlier calls have spent on later rungs."""
        names = [
            study_name(self._config, tokens, control=control)
            for tokens in self._config.search.lengths[rung + 1 :]
            for control in (False, True)
        ]
        found = (find_study(self._storage, name, self._shape) for name in names)
        return sum(study.tokens() for study in found if study is not None)

    def _open(self, rung: int, group: Group) -> RungStudy:
        config = self._config
        name = study_name(config, config.search.lengths[rung], control=group.control)
        records = RungStudy(
            open_study(self._storage, name, config, self._run_dir), self._storage, self._shape
        )
        if self._clock is None:
            self._clock = Clock(
                records.seconds(), lambda seconds: records.remember(SECONDS, seconds)
            )
        return records

    def _within_limits(
        self,
        rung: int,
        group: Group,
        records: RungStudy,
        caps: Sequence[tuple[int, str] | None],
    ) -> Group:
        """The candidates that these caps leave a group, and the patience that ended it in an earlier call."""
        begun, wanted = records.attempts().keys(), len(group.jobs)
        earlier = None if rung or group.control else records.stop()
        if earlier is not None and ended_by_patience(self._config.search, earlier):
            caps = [*caps, (earlier.begun, earlier.reason)]
        for cap in caps:
            if cap is not None:
                group = group.within(*cap, begun)
        if not (rung or group.control) and len(begun) > wanted:
            self._say(f"search.trials {wanted}: {len(begun)} are begun already, and stay")
        return group

    def _evaluate(self, executor: Executor, rung: int, group: Group, records: RungStudy) -> None:
        config, first = self._config, rung == 0 and not group.control
        if group.promotion is not None:
            records.mark_pruned(group.promotion.pruned, group.tokens_before)
        self._watch.begin(self._part(rung, group))
        limit, ends = self._limit(rung, group)
        runner = Rung(
            config,
            self._run_dir,
            records,
            executor,
            rung=rung,
            jobs=group.jobs,
            proposals=self._proposals if first else None,
            limit=limit,
            finished=lambda over: self._advance(over, len(group.jobs)),
            say=self._say,
        )
        self._watch.tell(lambda: standing(config.search, runner.history), ends)
        runner.run()
        if runner.reason is not None:
            group = self._leave_out(records, group, runner.left, runner.reason)
        records.remember(STOPPED, None if group.stop is None else asdict(group.stop))

    def _part(self, rung: int, group: Group) -> str:
        """What the head maps of a group are, for lines of progress."""
        search = self._config.search
        number = f"proxy {rung + 1} of {len(search.proxy_tokens)}"
        name = "final stage" if search.is_final(rung) else number
        tokens = search.lengths[rung]
        length = f"{tokens:,} tokens" if tokens else "untrained"
        return f"{name}, {length}{', random control' if group.control else ''}:"

    def _limit(self, rung: int, group: Group) -> tuple[Limit, float | None]:
        """What ends a group, and when that is if it is time, by time.monotonic."""
        search = self._config.search
        groups = 2 if search.random_control else 1
        part = rung * groups + group.control
        assert self._clock is not None
        self._clock.begin(part)
        share = (part + 1) / (len(search.lengths) * groups)
        limit, ends = time_limit(search, self._clock, share), None
        if search.max_minutes is not None:
            ends = time.monotonic() + self._clock.left(search.max_minutes, share)
        if rung or group.control:
            return limit, ends
        return first_of(limit, patience_limit(search, len(self._seeds))), ends

    def _leave_out(
        self, records: RungStudy, group: Group, left: Sequence[Job], reason: str
    ) -> Group:
        """Marks those that a limit kept from being begun."""
        numbers = {job.candidate for job in left}
        if group.promotion is not None:
            cut = [Pruned(c, reason) for c in group.promotion.chosen if c.candidate in numbers]
            records.mark_pruned(cut, group.tokens_before)
        wanted = group.stop.wanted if group.stop is not None else len(group.jobs)
        return replace(group, stop=Stop(reason, len(group.jobs) - len(left), wanted))

    def _advance(self, over: int, total: int) -> None:
        if self._clock is not None:
            self._clock.save()
        self._progress(over, total)
