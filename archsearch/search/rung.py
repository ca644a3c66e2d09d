"""One rung of a search: every candidate of a study evaluated exactly once, whatever dies on the way.

The driver is the study's only writer. A candidate's number is written last when its trial is set up, so
a trial that a kill left without one is simply asked for again; one that has it is requeued.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from optuna.trial import FrozenTrial, Trial, TrialState

from ..config import RunConfig
from ..execution.base import DEVICE_MEMORY, HOST_MEMORY, Executor, Outcome
from ..headmap import HeadMap
from ..rundir import RunDir
from .front import SEARCH
from .records import TrialResult, TrialSpec, measured_metrics, trained_path
from .samplers import admit, derive_seed, distributions, make_sampler, record_violations
from .space import Point, RankedSpace, violation
from .study import INTERRUPTED, ORPHANED, RungStudy, describe_trials, head_map_text

_log = logging.getLogger(__name__)

Say = Callable[[str], None]
_UNCOUNTED = (ORPHANED, INTERRUPTED)
_MEMORY = (HOST_MEMORY, DEVICE_MEMORY)


@dataclass(frozen=True)
class Job:
    """A candidate that is to be evaluated; head_map None lets the sampler choose."""

    candidate: int
    head_map: HeadMap | None = None
    method: str = SEARCH
    also: tuple[str, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
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
    """Evaluates jobs into one study. space is needed where the sampler chooses head maps."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDir,
        records: RungStudy,
        executor: Executor,
        *,
        rung: int,
        jobs: Sequence[Job],
        space: RankedSpace | None = None,
        finished: Callable[[], None] = lambda: None,
        say: Say = _log.info,
    ) -> None:
        self._config, self._run_dir, self._records = config, run_dir, records
        self._executor, self._space = executor, space
        self._rung, self._tokens = rung, config.search.proxy_tokens[rung]
        self._metrics = tuple(measured_metrics(config))
        self._jobs = {job.candidate: job for job in jobs}
        self._finished, self._say = finished, say
        self._todo: deque[Job] = deque()
        self._retries: deque[Job] = deque()
        self._open: dict[int, tuple[Trial, Job]] = {}
        self._used = {job.head_map.layers for job in jobs if job.head_map}

    def run(self) -> None:
        """Returns once every candidate has a result or has failed for good."""
        self._adopt()
        try:
            while self._fill():
                self._finish(self._executor.next_done())
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
            self._used.add(self._records.head_map(tries[-1]).layers)
            if any(t.state != TrialState.FAIL for t in tries) or not self._may_retry(tries):
                self._finished()
            else:
                self._retries.append(self._again(job, tries))

    def _may_retry(self, tries: Sequence[FrozenTrial]) -> bool:
        """Whether the failed tries of a candidate leave it another one."""
        reasons = [trial.user_attrs.get("reason", ORPHANED) for trial in tries]
        if reasons[-1] in _UNCOUNTED:
            return True
        if not tries[-1].user_attrs.get("retryable", False):
            return False
        # Out of memory is tried alone once, whatever the limit.
        limit = self._config.search.max_retries
        limit = max(1, limit) if reasons[-1].startswith(_MEMORY) else limit
        return sum(reason not in _UNCOUNTED for reason in reasons) <= limit

    def _again(self, job: Job, tries: Sequence[FrozenTrial]) -> Job:
        last = tries[-1]
        counted = [t.user_attrs.get("reason", "") for t in tries]
        counted = [reason for reason in counted if reason not in _UNCOUNTED]
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
        return self._todo.popleft() if self._todo else None

    def _start(self, job: Job) -> None:
        trial, job = self._create(job)
        self._open[trial.number] = (trial, job)
        self._executor.submit(trial.number, self._spec(job))

    def _create(self, job: Job) -> tuple[Trial, Job]:
        """Asks for a trial and writes down what it evaluates."""
        search, study = self._config.search, self._records.study
        study.sampler = make_sampler(
            search.sampler,
            derive_seed(self._config.seed, study.study_name, job.candidate),
            trials=search.trials,
            constrained=bool(search.constraints),
        )
        if job.head_map is None:
            assert self._space is not None
            trial = study.ask(distributions(*self._space.fa_range()))
            rng = Random(derive_seed(self._config.seed, "nearest", job.candidate))
            chosen = self._space.nearest(Point(**trial.params), self._is_new, rng)
            job = replace(job, head_map=chosen, params=trial.params)
            for key, value in self._attributes(job).items():
                trial.set_user_attr(key, value)
        else:
            study.enqueue_trial(dict(job.params), user_attrs=self._attributes(job))
            space = distributions(*self._space.fa_range()) if self._space and job.params else None
            trial = study.ask(space)
            if space:
                admit(study, trial)
        assert job.head_map is not None
        self._used.add(job.head_map.layers)
        return trial, job

    def _is_new(self, head_map: HeadMap) -> bool:
        assert self._space is not None
        return head_map.layers not in self._used and self._space.affordable(head_map)

    def _attributes(self, job: Job) -> dict[str, Any]:
        """What a trial is about. candidate comes last: it marks the set-up as complete."""
        assert job.head_map is not None
        attributes: dict[str, Any] = {
            "head_map": head_map_text(job.head_map),
            "method": job.method,
            "proxy_tokens": self._tokens,
            "seed": self._seed(job),
        }
        if job.also:
            attributes["also"] = list(job.also)
        if job.retry_of is not None:
            attributes["retry_of"] = job.retry_of
        return {**attributes, "candidate": job.candidate}

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
        )
        return replace(spec, parent=self._parent(spec))

    def _parent(self, spec: TrialSpec) -> str | None:
        """The candidate's weights of the rung before, where it was distilled there: training goes on from them."""
        earlier = self._config.search.proxy_tokens[self._rung - 1] if self._rung else 0
        if not earlier:
            return None
        path = trained_path(self._run_dir.path, replace(spec, proxy_tokens=earlier))
        return str(path) if path.exists() else None

    def _finish(self, outcome: Outcome) -> None:
        trial, job = self._open.pop(outcome.task_id)
        verdict = judge(outcome, self._metrics)
        if isinstance(outcome.result, TrialResult):
            trial.set_user_attr("seconds", outcome.result.seconds)
            trial.set_user_attr("tokens", outcome.result.tokens)
        if verdict.reason is None:
            self._complete(trial, verdict)
        else:
            self._fail(trial, job, verdict)

    def _complete(self, trial: Trial, verdict: Verdict) -> None:
        search, metrics = self._config.search, verdict.metrics
        trial.set_user_attr("metrics", dict(metrics))
        if search.constraints:
            names = [f"{index}:{bound.metric}" for index, bound in enumerate(search.constraints)]
            values = [violation(bound, metrics[bound.metric]) for bound in search.constraints]
            record_violations(trial, names, values)
        self._records.study.tell(trial, [metrics[o.metric] for o in search.objectives])
        self._finished()

    def _fail(self, trial: Trial, job: Job, verdict: Verdict) -> None:
        assert verdict.reason is not None
        trial.set_user_attr("reason", verdict.reason)
        trial.set_user_attr("retryable", verdict.retryable)
        state = TrialState.PRUNED if verdict.pruned else TrialState.FAIL
        self._run_dir.write_json(
            f"failed/{self._records.study.study_name}-{trial.number}.json",
            {"reason": verdict.reason, "spec": self._spec(job).to_json()},
        )
        self._records.study.tell(trial, state=state)
        tries = self._records.attempts()[job.candidate]
        again = not verdict.pruned and self._may_retry(tries)
        self._say(
            f"candidate {job.candidate} ({job.method}) failed: {verdict.reason}"
            f"{'; it is tried again' if again else ''}"
        )
        if again:
            self._retries.append(self._again(self._jobs[job.candidate], tries))
        else:
            self._finished()


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
