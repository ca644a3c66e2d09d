"""Every backend of every operator against the fp32 reference on this machine, forward and backward.

Inputs are random and small, of lengths that are no multiple of a chunk, with grouped heads, a state and masked tokens.
An error is the norm of the difference over the norm of the reference, the worst of outputs or of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from archsearch_kernels.gdn.reference import gdn_forward

from .attention.backends import INFERENCE, PURPOSES, STEP, TRAINING, Operator, Situation, race_text
from .attention.dispatch import OPERATORS
from .attention.full_backends import AttentionCall
from .attention.gdn_backends import GatedDeltaCall

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}
DIM = {"cpu": 64, "cuda": 128}
DTYPES = {"cpu": (torch.float32,), "cuda": (torch.bfloat16, torch.float32)}
TOKENS, PADDING = 130, 5
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


def _draw(situation: Situation) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = situation.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(situation.device, dtype)

    return draw


def _gdn_case(situation: Situation) -> tuple[GatedDeltaCall, Callable[[Any], Any]]:
    """Three of four query heads over two KV heads, with a state; the second sequence begins with padding."""
    draw, dim, wide = _draw(situation), situation.head_dim, torch.float32
    tokens = 1 if situation.purpose == STEP else TOKENS
    a, b = draw(2, tokens, 4), draw(2, tokens, 4)
    if tokens > 1:
        a[1, :PADDING] = b[1, :PADDING] = float("-inf")

    def index(*heads: int) -> Tensor:
        return torch.tensor(heads, dtype=torch.int32, device=situation.device)

    call = GatedDeltaCall(
        draw(2, tokens, 4, dim),
        draw(2, tokens, 2, dim),
        draw(2, tokens, 2, dim),
        a,
        b,
        0.5 * draw(4, dtype=wide),
        # Half-lives of some ten tokens.
        draw(4, dtype=wide) - 3,
        index(3, 0, 2),
        index(1, 0, 1),
        initial_state=draw(2, 3, dim, dim, dtype=wide) / dim**0.5,
        cu_seqlens=None,
        output_final_state=True,
    )
    return call, _gdn_reference


def _gdn_reference(call: GatedDeltaCall) -> tuple[Tensor, Tensor | None]:
    wide: dict[str, Any] = {
        name: value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in call._asdict().items()
    }
    return gdn_forward(**wide)


def _full_case(situation: Situation) -> tuple[AttentionCall, Callable[[Any], Any]]:
    """Four query heads over two KV heads; masked: with padding before the second sequence, a query always sees itself."""
    draw, dim = _draw(situation), situation.head_dim
    tokens = 1 if situation.purpose == STEP else TOKENS
    pairs = None
    if situation.masked:
        causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=situation.device).tril()
        pairs = causal.expand(2, 1, TOKENS, TOKENS).clone()
        pairs[1, :, :, :PADDING] = False
        pairs |= torch.eye(TOKENS, dtype=torch.bool, device=situation.device)
    # As the model has them: heads behind tokens in memory.
    q = draw(2, tokens, 4, dim).transpose(1, 2)
    k, v = (draw(2, TOKENS, 2, dim).transpose(1, 2) for _ in range(2))
    return AttentionCall(q, k, v, pairs), _full_reference


def _full_reference(call: AttentionCall) -> Tensor:
    q = call.q_BnTD.float()
    readers = q.shape[1] // call.k_BmSD.shape[1]
    k, v = (x.float().repeat_interleave(readers, 1) for x in (call.k_BmSD, call.v_BmSD))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    pairs = call.pairs_B1TS
    if pairs is None and call.causal:
        pairs = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if pairs is not None:
        scores = scores.masked_fill(~pairs, float("-inf"))
    output: Tensor = scores.softmax(-1) @ v
    return output


CASES: dict[str, Callable[[Situation], tuple[Any, Callable[[Any], Any]]]] = {
    "gdn": _gdn_case,
    "full": _full_case,
}
KINDS: dict[str, tuple[tuple[str, str, bool], ...]] = {
    "gdn": (
        ("forward", TRAINING, False),
        ("without gradients", INFERENCE, False),
        ("step", STEP, False),
    ),
    "full": (("forward", TRAINING, False), ("masked", INFERENCE, True), ("step", STEP, False)),
}
"""What is computed of each operator: a word for it, the purpose, and whether pairs are masked."""
