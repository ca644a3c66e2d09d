"""How an operator finds who computes it: backends in order, what each cannot do, and a wish that may force one.

A wish comes from set_backend (the `kernels` section of a run's config) or from the environment, where an exported model
looks. Each choice is logged once; a slow backend on a GPU, with the reasons, as a warning.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

AUTO = "auto"
TRAINING, INFERENCE, STEP = "training", "inference", "step"
"""What a call is for: with a backward pass to come, without, and one token without."""
PURPOSES = (TRAINING, INFERENCE, STEP)
HALF = (torch.bfloat16, torch.float16)

RACE_ROUNDS = 3


class BackendRefusal(RuntimeError):
    """A backend that was asked for cannot serve a call; the message says who asked, and why not."""


@dataclass(frozen=True)
class Situation:
    """What the choice of a backend depends on.

    masked: some pairs of tokens are hidden beyond causality. shape: sizes of the call, rounded to powers of two; only
    who is fastest depends on it.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    purpose: str
    masked: bool = False
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.purpose} {self.place}"

    @property
    def place(self) -> str:
        """All but the purpose, in words."""
        mask = ", masked" if self.masked else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"on {self.device} in {dtype}, head_dim {self.head_dim}{mask}"

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability of the GPU; (0, 0) for another device."""
        return _capability(self.device) if self.device.type == "cuda" else (0, 0)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def never(situation: Situation) -> str | None:
    """Of what serves everything."""
    return None


@dataclass(frozen=True)
class Backend:
    """One way to compute an operator. run takes the operator's call.

    cannot: why it can't serve here, or None. leaves: why calls of this kind go to others even where it is forced (a
    single token, a mask, fp32), or None. is_slow: to be warned of where a GPU is served by it.
    """

    name: str
    run: Callable[[Any], Any]
    cannot: Callable[[Situation], str | None]
    leaves: Callable[[Situation], str | None] = never
    is_slow: bool = False


@dataclass
class Operator:
    """An operator and its backends in order of preference; the last one serves everything.

    rivals: backends of which the fastest on the call itself is taken, where more than one can serve on a GPU.
    """

    name: str
    title: str
    variable: str
    backends: tuple[Backend, ...]
    rivals: tuple[str, ...] = ()
    races: dict[Situation, dict[str, float | str]] = field(default_factory=dict)
    """Seconds, or why there are none, of the rivals in each situation that they were timed in."""
    _wish: str | None = None
    _asked_by: str = ""
    _chosen: dict[Situation, Backend] = field(default_factory=dict)
    _logged: set[tuple[object, ...]] = field(default_factory=set)

    @property
    def allowed(self) -> tuple[str, ...]:
        """Every wish there may be."""
        return (AUTO, *(backend.name for backend in self.backends))

    @property
    def wish(self) -> str:
        """The backend that is forced, or auto."""
        if self._wish is None:
            self._wish, self._asked_by = wish_of_environment(self.variable, self.allowed)
        return self._wish

    def force(self, name: str, asked_by: str) -> None:
        """Forces a backend; auto goes back to what the environment asks for. Raises ValueError for another name."""
        if name not in self.allowed:
            raise ValueError(f"{self.name} backend {name!r}; allowed: {', '.join(self.allowed)}")
        self._wish, self._asked_by = (None, "") if name == AUTO else (name, asked_by)
        self._chosen.clear()
        self._logged.clear()

    def holds(self, name: str, asked_by: str) -> bool:
        """Whether force with the same arguments would change nothing."""
        wanted = (name, asked_by)
        if name == AUTO:
            wanted = wish_of_environment(self.variable, self.allowed)
        return (self.wish, self._asked_by) == wanted

    def backend(self, name: str) -> Backend:
        """The backend of that name."""
        return next(backend for backend in self.backends if backend.name == name)

    def refusal(self, name: str, situation: Situation) -> str | None:
        """Why this backend does not serve in this situation, or None where it can."""
        backend = self.backend(name)
        return backend.cannot(situation) or backend.leaves(situation)

    def denied(self, name: str, situation: Situation, reason: str) -> str:
        """What a backend cannot serve for that reason, in words: of one purpose only where another would not be refused."""
        others = (replace(situation, purpose=purpose) for purpose in (TRAINING, INFERENCE))
        alike = all(self.refusal(name, other) == reason for other in others)
        return situation.place if alike else str(situation)

    def choose(self, situation: Situation, call: Any = None) -> Backend:
        """The backend for a situation, the same at every call; rivals are timed on `call` where it is given.

        Raises BackendRefusal where the forced one can't serve.
        """
        chosen = self._chosen.get(situation)
        if chosen is None:
            chosen, reasons = self._find(situation, call)
            self._chosen[situation] = chosen
            self._log(chosen, situation, reasons)
        return chosen

    def _find(self, situation: Situation, call: Any) -> tuple[Backend, dict[str, str]]:
        if self.wish != AUTO:
            forced = self.backend(self.wish)
            reason = forced.cannot(situation)
            if reason is not None:
                what = self.denied(forced.name, situation, reason)
                raise BackendRefusal(
                    f"{self._asked_by}: {forced.name} was asked for, but cannot serve {what}: {reason}"
                )
            if forced.leaves(situation) is None:
                return forced, {"others": f"{self._asked_by} asks for {forced.name}"}
        reasons: dict[str, str] = {}
        for place, backend in enumerate(self.backends):
            reason = self.refusal(backend.name, situation)
            if reason is None:
                if backend.name in self.rivals and call is not None:
                    rest = self.backends[place + 1 :]
                    backend = self._fastest([backend, *rest], situation, call)  # noqa: PLW2901
                return backend, reasons
            reasons[backend.name] = reason
        raise RuntimeError(f"no {self.name} backend serves {situation}: {reasons}")

    def _fastest(self, backends: Sequence[Backend], situation: Situation, call: Any) -> Backend:
        able = [
            backend
            for backend in backends
            if backend.name in self.rivals and self.refusal(backend.name, situation) is None
        ]
        if len(able) < 2 or torch.cuda.is_current_stream_capturing():
            return able[0]
        results = self.races[situation] = {b.name: _race(b, situation, call) for b in able}
        times = {name: result for name, result in results.items() if isinstance(result, float)}
        logger.info("%s raced for %s: %s", self.name, situation, race_text(results))
        return self.backend(min(times, key=times.__getitem__)) if times else able[0]

    def _log(self, chosen: Backend, situation: Situation, reasons: dict[str, str]) -> None:
        place = (situation.device, situation.dtype, situation.head_dim)
        key = (chosen.name, *place, situation.purpose)
        if key in self._logged:
            return
        self._logged.add(key)
        others = "".join(f"; {name}: {reason}" for name, reason in reasons.items())
        slow = chosen.is_slow and situation.device.type == "cuda" and self.wish == AUTO
        level = logging.WARNING if slow and situation.purpose != STEP else logging.INFO
        said = f"{chosen.name}, which is slow," if level == logging.WARNING else chosen.name
        logger.log(level, "%s: %s serves %s%s", self.name, said, situation, others)


def wish_of_environment(variable: str, allowed: Sequence[str]) -> tuple[str, str]:
    """The wish that an environment variable holds, and who asked; a name that is not allowed is warned of, once."""
    # An empty variable is one that is not set.
    name = os.environ.get(variable) or AUTO
    if name not in allowed:
        _warn_of(variable, name, tuple(allowed))
        name = AUTO
    return name, variable


@cache
def _warn_of(variable: str, name: str, allowed: tuple[str, ...]) -> None:
    logger.warning("%s: %r is ignored; allowed: %s", variable, name, ", ".join(allowed))


def race_text(results: dict[str, float | str]) -> str:
    """The rivals' times in words."""
    return ", ".join(
        f"{name} {1e3 * found:.3f} ms" if isinstance(found, float) else f"{name} failed ({found})"
        for name, found in results.items()
    )


def _race(backend: Backend, situation: Situation, call: Any) -> float | str:
    """Seconds of a call, with its backward pass in training; the error's words where it raises."""
    try:
        return seconds_of(backend, situation, call)
    except Exception as error:  # a broken install, or too little memory for a second set of results
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def seconds_of(backend: Backend, situation: Situation, call: Any) -> float:
    """Least of RACE_ROUNDS times, on copies that are no part of the caller's graph."""
    trains = situation.purpose == TRAINING
    leaves = {
        name: value.detach().requires_grad_(trains)
        for name, value in call._asdict().items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    times = []
    with torch.set_grad_enabled(trains):
        for _ in range(RACE_ROUNDS + 1):
            torch.cuda.synchronize(situation.device)
            start = time.perf_counter()
            output = backend.run(call._replace(**leaves))
            if trains:
                torch.autograd.grad(output, list(leaves.values()), torch.ones_like(output))
            torch.cuda.synchronize(situation.device)
            times.append(time.perf_counter() - start)
    return min(times[1:])


def purpose_of(tensors: Sequence[Tensor | None], tokens: int) -> str:
    """What a call is for, from its inputs and its number of new tokens."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return TRAINING
    return STEP if tokens == 1 else INFERENCE


def dense(x: Tensor) -> Tensor:
    """x with the last stride 1, which is all that our kernels ask of strides."""
    # Not contiguous(), which leaves the strides of dimensions of one entry as they are.
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype that a fused kernel is to compute in: autocast's where it is on, since it reaches no foreign kernel."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
