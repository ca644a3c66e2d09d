"""Who is chosen for each operator on a machine, and whether it is right: children of kernel_workers.py find out, under a time limit.

By default only what may be chosen is proven. What is chosen for single tokens is asked apart, since it may have to import
what nothing else needs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TypeVar

from .attention.backends import AUTO, STEP
from .attention.dispatch import OPERATORS
from .config import KernelsConfig
from .findings import Finding, Verdict
from .kernel_cases import KINDS
from .kernel_proofs import SHORT, Choice, Job, Proof, Use
from .kernel_workers import Answer, Workers

T = TypeVar("T")

WORKER = (sys.executable, "-P", "-m", "archsearch.kernel_proofs")
TICK_SECONDS = 0.5
SHOWN = 3
"""Jobs that are named while they are waited for."""


@dataclass(frozen=True)
class Target:
    """What runs where: dtypes in order; needed: (purpose, dtype) that a run can't go without; kernels: its wishes."""

    device: str
    head_dim: int
    dtypes: tuple[str, ...]
    needed: frozenset[tuple[str, str]] = frozenset()
    kernels: KernelsConfig = field(default_factory=KernelsConfig)

    def uses(self, operator: str) -> list[Use]:
        """Every kind of call of an operator."""
        return [
            Use(kind, purpose, masked, dtype, not masked and (purpose, dtype) in self.needed)
            for dtype in self.dtypes
            for kind, purpose, masked in KINDS[operator]
        ]


@dataclass(frozen=True)
class Scope:
    """What is proven: what may be chosen, or every backend, or the named ones alone; each dtype of a backend in `seconds`."""

    every: bool = False
    named: tuple[str, ...] = ()
    seconds: float = 60.0

    @property
    def is_asked(self) -> bool:
        """Whether backends are proven whoever is chosen."""
        return self.every or bool(self.named)


@dataclass
class _Plan:
    """Of one operator: what came of its choices, who may serve each use, and of each backend the answers to come."""

    choices: list[Answer] = field(default_factory=list)
    chosen: list[tuple[Use, list[str]]] = field(default_factory=list)
    proofs: dict[str, list[tuple[list[Use], Future[Answer]]]] = field(default_factory=dict)

    def first(self, backend: str) -> list[Use]:
        """What the backend is chosen for."""
        return [use for use, names in self.chosen if names[:1] == [backend]]

    def has(self, backend: str) -> bool:
        """Whether it may be chosen."""
        return any(backend in names for _, names in self.chosen)


class KernelReport:
    """Sets the children to work when made; `findings` waits for them."""

    def __init__(self, target: Target, scope: Scope, workers: Workers) -> None:
        self._target, self._scope, self._workers = target, scope, workers
        self._plans = {
            name: workers.submit(partial(self._begin, name))
            for name in OPERATORS
            if self._shown(name)
        }

    def findings(self, waiting: Callable[[str], None]) -> Iterator[Finding]:
        """Of each operator its choice, then a line a backend. waiting is told now and then what is being worked on."""
        for name, begun in self._plans.items():
            plan = self._result(begun, waiting)
            yield _choice_line(OPERATORS[name].title, plan, self._scope.seconds)
            for backend, proofs in plan.proofs.items():
                found = [(uses, self._result(said, waiting)) for uses, said in proofs]
                if found:
                    yield _backend_line(backend, plan, found, self._scope)

    def _result(self, future: Future[T], waiting: Callable[[str], None]) -> T:
        while not wait([future], TICK_SECONDS).done:
            running = [f"{name} ({seconds:.0f} s)" for name, seconds in self._workers.running()]
            more = f" and {len(running) - SHOWN} more" if len(running) > SHOWN else ""
            waiting(", ".join(running[:SHOWN]) + more)
        return future.result()

    def _shown(self, name: str) -> list[str]:
        """Backends of an operator that lines are printed of, in its order."""
        named = self._scope.named
        return [b.name for b in OPERATORS[name].backends if not named or b.name in named]

    def _begin(self, name: str) -> _Plan:
        """Chooses, and sets proofs to work as soon as it is known whose: on a worker's thread."""
        plan, uses = _Plan(proofs={backend: [] for backend in self._shown(name)}), []
        batches = [use for use in self._target.uses(name) if use.purpose != STEP]
        steps = [use for use in self._target.uses(name) if use.purpose == STEP]
        if self._scope.is_asked:
            for backend in plan.proofs:
                self._prove(plan, name, backend, batches + steps)
        for uses in (batches, steps):
            answer = self._ask(self._job("choose", name, uses))
            plan.choices.append(answer)
            if answer.result is None:
                continue
            serving = list(zip(uses, Choice(**answer.result).backends, strict=True))
            plan.chosen += serving
            for backend in () if self._scope.is_asked else plan.proofs:
                self._prove(plan, name, backend, [u for u, names in serving if backend in names])
        if all(answer.result is not None for answer in plan.choices):
            for backend, proofs in plan.proofs.items():
                if not proofs:
                    self._submit(plan, "refuse", name, backend, batches + steps)
        return plan

    def _prove(self, plan: _Plan, name: str, backend: str, uses: Iterable[Use]) -> None:
        """A job a dtype, since compilations take most of the time and can go on side by side."""
        by_dtype: dict[str, list[Use]] = {}
        for use in uses:
            by_dtype.setdefault(use.dtype, []).append(use)
        for some in by_dtype.values():
            self._submit(plan, "prove", name, backend, some)

    def _submit(self, plan: _Plan, task: str, name: str, backend: str, uses: list[Use]) -> None:
        job = self._job(task, name, uses, backend)
        plan.proofs[backend].append((uses, self._workers.submit(partial(self._ask, job))))

    def _job(self, task: str, name: str, uses: Sequence[Use], backend: str = "") -> Job:
        wish = getattr(self._target.kernels, name)
        place = (self._target.device, self._target.head_dim, tuple(uses))
        return Job(task, name, *place, backend, wish, f"kernels.{name}")

    def _ask(self, job: Job) -> Answer:
        title = f"{OPERATORS[job.operator].title}: {job.backend or 'choice'}"
        dtypes = ", ".join(dict.fromkeys(SHORT[use.dtype] for use in job.uses))
        return self._workers.ask(asdict(job), self._scope.seconds, f"{title} in {dtypes}")


def _choice_line(title: str, plan: _Plan, seconds: float) -> Finding:
    choices = [Choice(**answer.result) for answer in plan.choices if answer.result is not None]
    faults = [f"the choice {answer.fault}" for answer in plan.choices if answer.fault]
    faults += [fault for choice in choices for fault in choice.faults[:1]]
    refusals = [refusal for choice in choices for refusal in choice.refusals]
    if refusals and not any(names for _, names in plan.chosen):
        faults = faults or refusals[:1]
        refusals = []
    late = [f"no choice in {seconds:g} s" for answer in plan.choices if answer.late]
    wishes = [f"{c.asked_by} asks for {c.wish}" for c in choices if c.wish != AUTO]
    backends = dict.fromkeys(names[0] for _, names in plan.chosen if names)
    said = [f"{backend}: {_listed(plan.first(backend))}" for backend in backends]
    notes = [note for choice in choices for note in choice.notes]
    parts = faults + late + wishes + said + refusals + notes
    verdict: Verdict = "WRONG" if faults else "open" if late else "ok"
    return Finding(title, "; ".join(dict.fromkeys(parts)), verdict)


def _backend_line(
    backend: str, plan: _Plan, answers: list[tuple[list[Use], Answer]], scope: Scope
) -> Finding:
    proofs = [Proof(**answer.result) for _, answer in answers if answer.result is not None]
    errors = {part: error for proof in proofs for part, error in proof.errors.items()}
    wrong = [part for proof in proofs for part in proof.wrong]
    reasons = [reason for proof in proofs for reason in proof.reasons]
    faults = [f"{_listed(uses)} {answer.fault}" for uses, answer in answers if answer.fault]
    late = [
        f"{_listed(uses)} not proven in {scope.seconds:g} s" for uses, said in answers if said.late
    ]
    able, has = any(proof.able for proof in proofs), plan.has(backend)
    said = ", ".join(f"{part} {error:.1e}" for part, error in errors.items())
    parts = []
    if wrong:
        parts.append(f"DIFFERS: {'; '.join(wrong)}{f' ({said})' if said else ''}")
    elif errors:
        parts.append(f"agrees with the fp64 reference ({said})")
    elif able:
        parts.append("could serve, others come first (--all proves it)")
    parts += faults + late
    if scope.is_asked or not able:
        parts += reasons
    chosen = "chosen" if plan.first(backend) else "chosen where faster" if has else "not chosen"
    verdict: Verdict = "WRONG" if wrong or faults else "open" if late else "ok"
    if backend in scope.named and not able and verdict == "ok":
        verdict = "lacks"
    text = f"{chosen}: {'; '.join(dict.fromkeys(parts))}"
    return Finding(f"  {backend}", text, verdict, needed=has or bool(scope.named))


def _listed(uses: Sequence[Use]) -> str:
    """Kinds by dtype, as `training, step in bf16 and fp32`."""
    by_dtype: dict[str, list[str]] = {}
    for use in uses:
        by_dtype.setdefault(use.dtype, []).append(use.kind)
    by_kinds: dict[tuple[str, ...], list[str]] = {}
    for dtype, kinds in by_dtype.items():
        by_kinds.setdefault(tuple(kinds), []).append(SHORT[dtype])
    return ", ".join(
        f"{', '.join(kinds)} in {' and '.join(dtypes)}" for kinds, dtypes in by_kinds.items()
    )
