"""One rung of a search: every candidate of a study evaluated exactly once, whatever dies on the way.

The driver is the study's only writer. A trial is set up in one write: after a kill it is there with all that it needs to
be evaluated again, or not there at all.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from optuna.trial import FrozenTrial, TrialState

from ..config import RunConfig
from ..errors import ArchsearchError, EnvironmentFault
from ..execution.base import DEVICE_MEMORY, HOST_MEMORY, Executor, Outcome
from ..headmap import HeadMap
from ..rundir import RunDir
from .bounds import broken_bound
from .front import SEARCH
from .proposals.base import Evaluated, Proposals
from .records import TrialResult, TrialSpec, measured_metrics, trained_path
from .samplers import derive_seed
from .space import violation
from .stopping import Limit, never
from .study import (
    INTERRUPTED,
    ORPHANED,
    OUTSIDE,
    UNCOUNTED,
    OpenTrial,
    RungStudy,
    describe_trials,
    head_map_text,
)

_log = logging.getLogger(__name__)

Say = Callable[[str], None]
_MEMORY = (HOST_MEMORY, DEVICE_MEMORY)
STARVED = 3
"""Candidates in a row that ran out of memory even alone before it is held to be the machine's fault."""


@dataclass(frozen=True)
class Job:
    """A candidate that is to be evaluated; head_map None lets the proposals choose."""

    candidate: int
    head_map: HeadMap | None = None
    method: str = SEARCH
    also: tuple[str, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    """What the proposal says of itself."""
    retry_of: int | None = None
    alone: bool = False
    """Nothing else may run meanwhile: its last try ran out of memory."""


@dataclass(frozen=True)
class Verdict:
    """What a try came to: a reason where it has no usable metrics, and whether another try may help."""

    metrics: Mapping[str, float]
    reason: str | None = None
    retryable: bool = False
    pruned: bool = False


class Rung:
    """Evaluates jobs into one study. proposals are needed where a job has no head map."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDir,
        records: RungStudy,
        executor: Executor,
        *,
        rung: int,
        jobs: Sequence[Job],
        proposals: Proposals | None = None,
        limit: Limit = never,
        finished: Callable[[int], None] = lambda over: None,
        say: Say = _log.info,
    ) -> None:
        self._config, self._run_dir, self._records = config, run_dir, records
        self._executor, self._proposals = executor, proposals
        self._rung, self._tokens = rung, config.search.lengths[rung]
        self._metrics = tuple(measured_metrics(config))
        self._jobs = {job.candidate: job for job in jobs}
        self._limit, self._finished, self._say = limit, finished, say
        self.left: list[Job] = []
        """Jobs that were not begun."""
        self.reason: str | None = None
        """What the limit said to that."""
        self._todo: deque[Job] = deque()
        self._retries: deque[Job] = deque()
        self._open: dict[int, tuple[OpenTrial, Job]] = {}
        self.history: list[Evaluated] = []
        """The candidates that are over."""
        self._starved: list[int] = []
        self._busy = {job.candidate: job.head_map for job in jobs if job.head_map}
        self._known = {head_map.layers for head_map in self._busy.values()}

    def run(self) -> None:
        """Returns once every candidate has a result or has failed for good, or is left out by the limit."""
        self._adopt()
        try:
            while self._fill():
                over = len(self.history)
                self._finish(self._executor.next_done())
                if len(self.history) > over:
                    self._finished(len(self.history))
        except BaseException:
            self._records.close_open_trials(INTERRUPTED)
            raise

    def _adopt(self) -> None:
        """Takes over what an earlier call left: closes its open trials and sorts the candidates."""
        orphans = self._records.close_open_trials(ORPHANED)
        if orphans:
            self._say(
                f"{self._records.study.study_name}: requeued after an interruption: "
                f"{describe_trials(orphans)}"
            )
        attempts = self._records.attempts()
        for candidate, job in self._jobs.items():
            tries = attempts.get(candidate, [])
            if not tries:
                self._todo.append(job)
                continue
            self._busy[candidate] = self._records.head_map(tries[-1])
            self._known.add(self._busy[candidate].layers)
            # More memory may be free than in the call that it failed in.
            again = self._may_retry(tries) or _ran_out(tries)
            if any(t.state != TrialState.FAIL for t in tries) or not again:
                self._over(self._records.evaluated(tries))
            else:
                self._retries.append(self._again(job, tries))
        if self.history:
            self._finished(len(self.history))

    def _over(self, evaluated: Evaluated) -> None:
        """A candidate has its result, or will never have one."""
        self._busy.pop(evaluated.candidate)
        self.history.append(evaluated)

    def _may_retry(self, tries: Sequence[FrozenTrial]) -> bool:
        """Whether the failed tries of a candidate leave it another one."""
        reasons = [trial.user_attrs.get("reason", ORPHANED) for trial in tries]
        if reasons[-1].startswith(UNCOUNTED):
            return True
        if not tries[-1].user_attrs.get("retryable", False):
            return False
        # Out of memory is tried alone once, whatever the limit.
        limit = self._config.search.max_retries
        limit = max(1, limit) if reasons[-1].startswith(_MEMORY) else limit
        return sum(not reason.startswith(UNCOUNTED) for reason in reasons) <= limit

    def _again(self, job: Job, tries: Sequence[FrozenTrial]) -> Job:
        last = tries[-1]
        counted = [t.user_attrs.get("reason", "") for t in tries]
        counted = [reason for reason in counted if not reason.startswith(UNCOUNTED)]
        return replace(
            job,
            head_map=self._records.head_map(last),
            params=next((t.params for t in reversed(tries) if t.params), job.params),
            retry_of=last.number,
            alone=bool(counted) and counted[-1].startswith(_MEMORY),
        )

    def _fill(self) -> bool:
        """Starts what can start; whether anything is running then."""
        while (job := self._next()) is not None:
            self._start(job)
        return bool(self._open)

    def _next(self) -> Job | None:
        busy = [job for _, job in self._open.values()]
        if len(busy) >= self._executor.capacity or any(job.alone for job in busy):
            return None
        if self._retries:
            if self._retries[0].alone and busy:
                return None
            return self._retries.popleft()
        if self._todo and (reason := self._limit(self.history)):
            self.reason, self.left = reason, list(self._todo)
            self._todo.clear()
        return self._todo.popleft() if self._todo else None

    def _start(self, job: Job) -> None:
        trial, job = self._create(job)
        self._open[trial.number] = (trial, job)
        self._executor.submit(trial.number, self._spec(job))

    def _create(self, job: Job) -> tuple[OpenTrial, Job]:
        """Chooses the head map where that is open, and writes down what is evaluated."""
        proposals = self._proposals
        if job.head_map is None:
            assert proposals is not None
            chosen = proposals.propose(job.candidate, self.history, list(self._busy.values()))
            bounds = (self._config.search.constraints, self._config.cost)
            assert broken_bound(chosen.head_map, *bounds) is None, "proposed outside the bounds"
            assert chosen.head_map.layers not in self._known, "proposed a second time"
            job = replace(job, head_map=chosen.head_map, params=chosen.params)
            self._busy[job.candidate] = chosen.head_map
        elif proposals is not None and not job.params:
            job = replace(job, params=proposals.describe(job.head_map))
        known = proposals.distributions if proposals is not None else {}
        params = {name: value for name, value in job.params.items() if name in known}
        assert job.head_map is not None
        self._known.add(job.head_map.layers)
        return self._records.begin(self._attributes(job), params, known), job

    def _attributes(self, job: Job) -> dict[str, Any]:
        """What a trial is about."""
        assert job.head_map is not None
        attributes: dict[str, Any] = {
            "candidate": job.candidate,
            "head_map": head_map_text(job.head_map),
            "method": job.method,
            "proxy_tokens": self._tokens,
            "seed": self._seed(job),
        }
        if job.also:
            attributes["also"] = list(job.also)
        if job.retry_of is not None:
            attributes["retry_of"] = job.retry_of
        return attributes

    def _seed(self, job: Job) -> int:
        return derive_seed(self._config.seed, job.candidate)

    def _spec(self, job: Job) -> TrialSpec:
        assert job.head_map is not None
        spec = TrialSpec(
            candidate=job.candidate,
            head_map=job.head_map.to_json(),
            proxy_tokens=self._tokens,
            seed=self._seed(job),
            method=job.method,
            rung=self._rung,
            retry_of=job.retry_of,
            metrics=self._metrics,
            final=self._config.search.is_final(self._rung),
        )
        return replace(spec, parent=self._parent(spec))

    def _parent(self, spec: TrialSpec) -> str | None:
        """The candidate's weights of the rung before, where it was distilled there: training goes on from them."""
        earlier = self._config.search.lengths[self._rung - 1] if self._rung else 0
        if not earlier:
            return None
        path = trained_path(self._run_dir.path, replace(spec, proxy_tokens=earlier))
        return str(path) if path.exists() else None

    def _finish(self, outcome: Outcome) -> None:
        trial, job = self._open.pop(outcome.task_id)
        verdict = judge(outcome, self._metrics)
        if isinstance(outcome.result, TrialResult):
            result = outcome.result
            spent = {"seconds": result.seconds, "tokens": result.tokens}
            self._records.note(trial, spent=spent)
            if result.intervals:
                self._records.note(trial, intervals=result.intervals)
        if outcome.fault is not None:
            self._leave(trial, job, str(outcome.error), outcome.fault)
        elif verdict.reason is None:
            self._complete(trial, job, verdict)
        else:
            self._fail(trial, job, verdict)

    def _leave(
        self, trial: OpenTrial, job: Job, error: str, fault: type[ArchsearchError]
    ) -> NoReturn:
        """Ends the run over what is no fault of the candidate, which the next call evaluates again."""
        self._records.note(trial, reason=f"{OUTSIDE}: {error}")
        self._records.end(trial, TrialState.FAIL)
        raise fault(
            f"candidate {job.candidate} ({job.method}): {error}; the same command evaluates it again"
        )

    def _complete(self, trial: OpenTrial, job: Job, verdict: Verdict) -> None:
        search, metrics = self._config.search, verdict.metrics
        self._starved.clear()
        self._records.note(trial, metrics=dict(metrics))
        violations = [violation(bound, metrics[bound.metric]) for bound in search.constraints]
        if violations:
            names = [f"{index}:{bound.metric}" for index, bound in enumerate(search.constraints)]
            self._records.note_violations(trial, names, violations)
        values = [metrics[objective.metric] for objective in search.objectives]
        self._records.end(trial, TrialState.COMPLETE, values)
        # What a later call will read of it.
        assert job.head_map is not None
        self._over(
            Evaluated(
                job.candidate,
                job.head_map,
                tuple(values),
                tuple(violations),
                trial.params,
            )
        )

    def _fail(self, trial: OpenTrial, job: Job, verdict: Verdict) -> None:
        assert verdict.reason is not None
        self._records.note(trial, reason=verdict.reason, retryable=verdict.retryable)
        state = TrialState.PRUNED if verdict.pruned else TrialState.FAIL
        self._run_dir.write_json(
            f"failed/{self._records.study.study_name}-{trial.number}.json",
            {"reason": verdict.reason, "spec": self._spec(job).to_json()},
        )
        self._records.end(trial, state)
        tries = self._records.attempts()[job.candidate]
        again = not verdict.pruned and self._may_retry(tries)
        self._say(
            f"candidate {job.candidate} ({job.method}) failed: {verdict.reason}"
            f"{'; it is tried again' if again else ''}"
        )
        if again:
            self._retries.append(self._again(self._jobs[job.candidate], tries))
            return
        self._over(self._records.evaluated(tries))
        if job.alone and verdict.reason.startswith(_MEMORY):
            self._starved.append(job.candidate)
            if len(self._starved) == STARVED:
                named = ", ".join(map(str, self._starved))
                raise EnvironmentFault(
                    f"candidates {named} ran out of memory one after the other, each alone ({verdict.reason}); once "
                    "there is more, the same command tries them again"
                )


def _ran_out(tries: Sequence[FrozenTrial]) -> bool:
    """Whether it was too little memory that a candidate failed by."""
    return str(tries[-1].user_attrs.get("reason", "")).startswith(_MEMORY)


def judge(outcome: Outcome, wanted: Sequence[str]) -> Verdict:
    """Whether an outcome holds every metric that is wanted as a finite number, and if not, why."""
    result = outcome.result
    if outcome.error is not None:
        return Verdict({}, outcome.error, retryable=True)
    if not isinstance(result, TrialResult):
        return Verdict({}, f"the worker answered with a {type(result).__name__}", retryable=False)
    if result.status != "ok":
        reason = result.reason or result.status
        # The same weights and seed give the same NaN: another try is no help.
        retryable = result.status == "failed" and not reason.startswith("non-finite")
        return Verdict({}, reason, retryable, pruned=result.status == "pruned")
    missing = [name for name in wanted if name not in result.metrics]
    if missing:
        return Verdict({}, f"the worker left out {', '.join(missing)}")
    metrics = {name: float(value) for name, value in result.metrics.items()}
    broken = [name for name, value in metrics.items() if not abs(value) < float("inf")]
    if broken:
        return Verdict({}, f"non-finite: {', '.join(broken)}")
    return Verdict(metrics)
