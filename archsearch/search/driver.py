"""The search of a run: rung after rung of candidates, and the fronts they end in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import get_args

from ..config import RunConfig, ScoreMethod, SearchConfig
from ..execution.base import Executor
from ..execution.choice import open_executor
from ..headmap import HeadMap, ModelShape
from ..progress import Progress, ignore_progress
from ..rundir import RunDir
from .front import CONTROL, Candidate
from .outcome import RungOutcome, SearchOutcome, collect, write_outcome
from .promotion import Pruned, promote
from .proposals.base import Proposals
from .proposals.ranked import RankedProposals
from .retention import baseline_seeds, measure_retention
from .rung import Job, Rung, Say
from .samplers import derive_seed, quiet_optuna
from .seeds import ScoreTables, needed_by_seeds, seed_maps
from .space import SPACE_SCORES, RankedSpace, check_constraints, random_map
from .study import RungStudy, open_storage, open_study, study_name

__all__ = ["SearchOutcome", "needed_scores", "run_search"]

_log = logging.getLogger(__name__)


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

    Goes on from where an earlier call was stopped. scores holds the tables of needed_scores. make_executor starts the executor; the config's, with real workers, where it is None.
    Raises ConfigError on constraints that nothing meets, EnvironmentFault where workers or storage fail.
    """
    quiet_optuna()
    check_constraints(config.search.constraints, shape, config.cost)
    search = _Search(config, run_dir, shape, scores, progress, say)
    executor = make_executor() if make_executor else _real_executor(config, run_dir)
    try:
        outcome = search.run(executor)
        if config.search.retention.prompts:
            measure_retention(config, run_dir, shape, scores, outcome, executor, say)
    finally:
        executor.shutdown()
    write_outcome(run_dir, outcome)
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
    """What one study of a rung has to evaluate, and who of the rung before did not get there."""

    jobs: Sequence[Job]
    pruned: Sequence[Pruned] = ()
    tokens_before: int = 0
    control: bool = False

    @property
    def wanted(self) -> bool:
        """Whether it needs a study."""
        return not self.control or bool(self.jobs or self.pruned)


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
        space = RankedSpace(shape, scores, search.constraints, config.cost)
        self._proposals: Proposals = RankedProposals(config, space, name)
        self._seeds = seed_maps(shape, scores, search.seeds, config.seed, config.cost)
        if len(self._seeds) > search.trials:
            left_out = len(self._seeds) - search.trials
            say(f"search.trials {search.trials} leaves no room for the last {left_out} seeds")
        self._storage = open_storage(search.storage or run_dir.storage)
        self._progress, self._done, self._total = progress, 0, 0

    def run(self, executor: Executor) -> SearchOutcome:
        """Evaluates every rung, each on the fronts of the one before."""
        rungs: list[RungOutcome] = []
        for rung, tokens in enumerate(self._config.search.proxy_tokens):
            groups = self._later_groups(rungs[-1]) if rungs else self._first_groups()
            self._total += sum(len(group.jobs) for group in groups)
            studies = [self._evaluate(executor, rung, group) for group in groups if group.wanted]
            rungs.append(collect(self._config, tokens, studies))
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
        maps = _random_maps(self._shape, self._config.seed, trials)
        control = [Job(number, head_map, CONTROL) for number, head_map in enumerate(maps)]
        return [_Group(search), _Group(control, control=True)]

    def _later_groups(self, before: RungOutcome) -> list[_Group]:
        """Those that go on from the rung before."""
        config = self._config.search
        found = promote(config, before.fronts, before.search, before.control)
        return [
            _Group(_repeats(promotion.chosen), promotion.pruned, before.proxy_tokens, bool(control))
            for control, promotion in enumerate(found)
        ]

    def _evaluate(self, executor: Executor, rung: int, group: _Group) -> RungStudy:
        config = self._config
        name = study_name(config, config.search.proxy_tokens[rung], control=group.control)
        records = RungStudy(open_study(self._storage, name, config), self._storage, self._shape)
        records.mark_pruned(group.pruned, group.tokens_before)
        Rung(
            config,
            self._run_dir,
            records,
            executor,
            rung=rung,
            jobs=group.jobs,
            proposals=self._proposals if rung == 0 and not group.control else None,
            finished=self._advance,
            say=self._say,
        ).run()
        return records

    def _advance(self) -> None:
        self._done += 1
        self._progress(self._done, self._total)


def _repeats(candidates: Sequence[Candidate]) -> list[Job]:
    """Jobs for candidates of an earlier rung."""
    return [Job(c.candidate, c.head_map, c.source, c.also) for c in candidates]


def _random_maps(shape: ModelShape, seed: int, count: int) -> list[HeadMap]:
    """Different random maps, the same first ones whatever the count; fewer where there are no more."""
    found: dict[HeadMap, None] = {}
    for number in range(count):
        rng = Random(derive_seed(seed, CONTROL, number))
        for _ in range(64):
            head_map = random_map(shape, rng, 0, shape.total_heads)
            if head_map not in found:
                found[head_map] = None
                break
    return list(found)
