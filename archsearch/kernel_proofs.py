"""Every backend of every operator against the fp32 reference on this machine, forward and backward.

kernel_cases.py draws the inputs. An error is the norm of the difference over the norm of the reference, the worst of outputs or of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .attention.backends import PURPOSES, STEP, TRAINING, Operator, Situation, race_text
from .attention.dispatch import OPERATORS
from .attention.full_backends import AttentionCall
from .kernel_cases import CASES, KINDS

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}
DIM = {"cpu": 64, "cuda": 128}
DTYPES = {"cpu": (torch.float32,), "cuda": (torch.bfloat16, torch.float32)}
RACE_TOKENS, RACE_HEADS = 4096, 16


@dataclass(frozen=True)
class Proof:
    """What a backend showed: errors by what was computed, or why it can't serve at all; faults are what it raised."""

    backend: str
    chosen_for: tuple[str, ...]
    errors: dict[str, float]
    wrong: tuple[str, ...]
    reasons: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """False where an error is too large, or the backend raised."""
        return not self.wrong

    @property
    def text(self) -> str:
        """One line for people."""
        chosen = f"chosen for {', '.join(self.chosen_for)}" if self.chosen_for else "not chosen"
        if not self.errors and not self.wrong:
            return f"{chosen}: {'; '.join(self.reasons)}"
        found = ", ".join(f"{name} {error:.1e}" for name, error in self.errors.items())
        verdict = (
            "agrees with the fp32 reference" if self.ok else "DIFFERS: " + "; ".join(self.wrong)
        )
        reasons = "".join(f"; {reason}" for reason in self.reasons)
        return f"{chosen}; {verdict} ({found}){reasons}"


def proofs(name: str) -> Iterator[Proof]:
    """A proof a backend of an operator, in the table's order, each when it is done: some compile for minutes."""
    operator, device = OPERATORS[name], _device()
    chosen: dict[str, str] = {}
    with suppress(RuntimeError):  # a vain wish, which summary tells of
        chosen = _chosen(operator, device)
    for backend in operator.backends:
        yield _prove(operator, backend.name, device, chosen)


def summary(name: str) -> str:
    """Who is chosen for what on this machine, and the times that decided it. Raises RuntimeError for a vain wish."""
    operator, device = OPERATORS[name], _device()
    chosen = _chosen(operator, device)
    said = "; ".join(f"{kind}: {backend}" for kind, backend in chosen.items())
    races = "".join(f"; {race_text(result)} ({key})" for key, result in operator.races.items())
    wish = "" if operator.wish == "auto" else f"{operator.variable}={operator.wish}: "
    return f"{wish}{said}{races}"


def _device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _chosen(operator: Operator, device: torch.device) -> dict[str, str]:
    """Kind of call -> name of the backend."""
    found = {}
    for dtype in DTYPES[device.type]:
        for purpose in PURPOSES:
            situation = Situation(device, dtype, DIM[device.type], purpose)
            call = None
            if operator.rivals and device.type == "cuda" and purpose != STEP:
                call = _race_call(device, dtype, purpose)
                situation = call.situation()
            found[f"{purpose} in {_short(dtype)}"] = operator.choose(situation, call).name
    return found


def _race_call(device: torch.device, dtype: torch.dtype, purpose: str) -> AttentionCall:
    shape = (1, RACE_HEADS, RACE_TOKENS, DIM["cuda"])
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    return AttentionCall(q.requires_grad_(purpose == TRAINING), k, v, None)


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


def _prove(operator: Operator, name: str, device: torch.device, chosen: dict[str, str]) -> Proof:
    errors: dict[str, float] = {}
    wrong, reasons = [], []
    for dtype in DTYPES[device.type]:
        for kind, purpose, masked in KINDS[operator.name]:
            situation = Situation(device, dtype, DIM[device.type], purpose, masked)
            reason = operator.refusal(name, situation)
            if reason is not None:
                if reason not in reasons:
                    reasons.append(reason)
                continue
            try:
                call, reference = CASES[operator.name](situation)
                found = _errors(operator.backend(name).run, call, reference, purpose == TRAINING)
            except Exception as error:  # whatever a broken kernel raises is the finding
                said = str(error).partition("\n")[0]
                wrong.append(f"{kind} in {_short(dtype)} raised {type(error).__name__}: {said}")
                continue
            for part, value in found.items():
                label = f"{_short(dtype)} {kind if part == 'forward' else part}"
                errors[label] = value
                # NaN is wrong too.
                if not value <= TOLERANCE[dtype]:
                    wrong.append(label)
    served = tuple(kind for kind, backend in chosen.items() if backend == name)
    return Proof(name, served, errors, tuple(wrong), tuple(reasons))


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
            (x.float() * torch.randn(x.shape, generator=generator).to(x.device)).sum()
            for x in outputs
        )
        return outputs, list(torch.autograd.grad(loss, list(leaves.values())))


def _worst(given: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    errors = []
    for one, other in zip(given, wanted, strict=True):
        right = other.detach().float()
        errors.append(float((one.detach().float() - right).norm() / right.norm()))
    return max(errors, key=lambda error: (error != error, error))  # noqa: PLR0124 - NaN is the worst
