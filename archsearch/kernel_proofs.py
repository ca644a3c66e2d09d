"""What doctor's child processes do: choose backends, and prove them against the fp64 reference, forward and backward.

kernel_cases.py draws the inputs. An error is the norm of the difference over the norm of the reference, the worst of outputs or of gradients.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from .attention.backends import (
    AUTO,
    STEP,
    TRAINING,
    BackendRefusal,
    Operator,
    Situation,
    race_text,
)
from .attention.dispatch import OPERATORS
from .attention.full_backends import AttentionCall
from .kernel_cases import CASES

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}
SHORT = {"float32": "fp32", "bfloat16": "bf16"}
RACE_TOKENS, RACE_HEADS = 4096, 16


@dataclass(frozen=True)
class Use:
    """A kind of call: a word for it, its purpose, whether pairs are masked, its dtype, and whether the run can't go without."""

    kind: str
    purpose: str
    masked: bool
    dtype: str
    needed: bool = False

    def __str__(self) -> str:
        return f"{self.kind} in {SHORT[self.dtype]}"


@dataclass(frozen=True)
class Job:
    """A task of TASKS on an operator's uses; for choose a wish of the config's, for the others a backend."""

    task: str
    operator: str
    device: str
    head_dim: int
    uses: tuple[Use, ...]
    backend: str = ""
    wish: str = AUTO
    asked_by: str = ""

    @classmethod
    def read(cls, line: str) -> Job:
        """The job of a line of JSON."""
        found = json.loads(line)
        return cls(**found | {"uses": tuple(Use(**use) for use in found["uses"])})

    def situation(self, use: Use) -> Situation:
        """What the choice of a backend depends on."""
        dtype = getattr(torch, use.dtype)
        return Situation(torch.device(self.device), dtype, self.head_dim, use.purpose, use.masked)


@dataclass(frozen=True)
class Choice:
    """The backends that may serve each use, the one chosen here first; none where one was asked for in vain.

    wish, asked_by: the backend that is forced and by what, else auto. faults: why it can't serve uses that the run needs,
    refusals: why it can't serve others. notes: what else there is to say, as the times of a race.
    """

    wish: str
    asked_by: str
    backends: list[list[str]]
    faults: list[str]
    refusals: list[str]
    notes: list[str]


@dataclass(frozen=True)
class Proof:
    """What a backend showed: errors by what was computed, what was wrong of it, and why it can't serve the other uses.

    able: how many uses it can serve.
    """

    able: int
    errors: dict[str, float]
    wrong: list[str]
    reasons: list[str]


def choose(job: Job) -> Choice:
    """Who serves each use. Where the fastest is taken, whoever can serve may be chosen for another shape."""
    operator = OPERATORS[job.operator]
    operator.force(job.wish, job.asked_by)
    wish = operator.wish
    asked_by = operator.variable if job.wish == AUTO else job.asked_by
    choice = Choice(wish, asked_by, [], [], [], [])
    for use in job.uses:
        situation, call = job.situation(use), None
        if wish != AUTO and use.needed and (reason := operator.refusal(wish, situation)):
            what = operator.denied(wish, situation, reason)
            choice.faults.append(f"{asked_by}: {wish} cannot serve {what}: {reason}")
        if _is_raced(operator, situation):
            call = _race_call(situation)
            situation = call.situation()
        try:
            names = [operator.choose(situation, call).name]
        except BackendRefusal as refusal:
            choice.backends.append([])
            choice.refusals.append(str(refusal))
            continue
        if times := operator.races.get(situation):
            raced = [name for name, time in times.items() if isinstance(time, float)]
            names += [name for name in raced if name not in names]
            choice.notes.append(f"{use}: {race_text(times)} ({RACE_TOKENS} tokens)")
        choice.backends.append(names)
    return choice


def _is_raced(operator: Operator, situation: Situation) -> bool:
    uncommon = situation.purpose == STEP or situation.masked
    return bool(operator.rivals) and situation.device.type == "cuda" and not uncommon


def _race_call(situation: Situation) -> AttentionCall:
    shape = (1, RACE_HEADS, RACE_TOKENS, situation.head_dim)
    options: dict[str, Any] = {"device": situation.device, "dtype": situation.dtype}
    q, k, v = (torch.randn(shape, **options) for _ in range(3))
    return AttentionCall(q.requires_grad_(situation.purpose == TRAINING), k, v, None)


def refuse(job: Job) -> Proof:
    """Why a backend can't serve its uses; nothing is computed."""
    found = [OPERATORS[job.operator].refusal(job.backend, job.situation(use)) for use in job.uses]
    reasons = list(dict.fromkeys(reason for reason in found if reason is not None))
    return Proof(found.count(None), {}, [], reasons)


def prove(job: Job) -> Proof:
    """A backend's errors in the uses that it can serve."""
    operator = OPERATORS[job.operator]
    errors: dict[str, float] = {}
    wrong: list[str] = []
    able = 0
    for use in job.uses:
        situation = job.situation(use)
        if operator.refusal(job.backend, situation) is not None:
            continue
        able += 1
        try:
            call, reference = CASES[job.operator](situation)
            run = operator.backend(job.backend).run
            found = _errors(run, call, reference, use.purpose == TRAINING)
        except Exception as error:  # whatever a broken kernel raises is the finding
            said = str(error).partition("\n")[0]
            wrong.append(f"{use} raised {type(error).__name__}: {said}")
            continue
        for part, value in found.items():
            label = f"{SHORT[use.dtype]} {part if use.purpose == TRAINING else use.kind}"
            errors[label] = value
            # NaN is wrong too.
            if not value <= TOLERANCE[situation.dtype]:
                wrong.append(label)
    return Proof(able, errors, wrong, refuse(job).reasons)


def _errors(
    run: Callable[[Any], Any], call: Any, reference: Callable[[Any], Any], trains: bool
) -> dict[str, float]:
    given, wanted = (_outputs_and_gradients(f, call, trains) for f in (run, reference))
    errors = {"forward": _worst(given[0], wanted[0])}
    return errors | {"backward": _worst(given[1], wanted[1])} if trains else errors


def _outputs_and_gradients(
    run: Callable[[Any], Any], call: Any, trains: bool
) -> tuple[list[Tensor], list[Tensor]]:
    leaves = {
        name: value.detach().clone().requires_grad_(trains)
        for name, value in call._asdict().items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    with torch.set_grad_enabled(trains):
        found = run(call._replace(**leaves))
        outputs = [x for x in (found if isinstance(found, tuple) else (found,)) if x is not None]
        if not trains:
            return outputs, []
        generator = torch.Generator().manual_seed(1)
        loss = sum(
            (x.double() * torch.randn(x.shape, generator=generator).to(x.device)).sum()
            for x in outputs
        )
        return outputs, list(torch.autograd.grad(loss, list(leaves.values())))


def _worst(given: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    errors = []
    for one, other in zip(given, wanted, strict=True):
        right = other.detach().double()
        errors.append(float((one.detach().double() - right).norm() / right.norm()))
    return max(errors, key=lambda error: (error != error, error))  # noqa: PLR0124 - NaN is the worst


TASKS: dict[str, Callable[[Job], Choice | Proof]] = {
    "choose": choose,
    "refuse": refuse,
    "prove": prove,
}


def serve() -> None:
    """Answers jobs, a line of JSON each, until the input ends: what a child of kernel_workers.py runs."""
    answers = os.fdopen(os.dup(1), "w")
    # Whatever libraries print is no answer.
    os.dup2(2, 1)
    lines: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    print("ready", file=answers, flush=True)
    while True:
        print(json.dumps(_answer(lines.get())), file=answers, flush=True)


def _answer(line: str) -> dict[str, Any]:
    """again: whether this process can be asked again. After a fault its GPU may answer nothing any more."""
    try:
        job = Job.read(line)
        found = TASKS[job.task](job)
    except Exception as error:  # a broken install raises anything
        fault = f"raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return {"result": None, "fault": fault, "again": False}
    again = not (isinstance(found, Proof) and found.wrong)
    return {"result": asdict(found), "fault": "", "again": again}


def _listen(lines: SimpleQueue[str]) -> None:
    """Hands on the lines of the input; at its end nobody waits any more for this process or what it started."""
    for line in sys.stdin:
        lines.put(line)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    serve()
