"""The `kernels` section of a config: who computes the operators in this process, and whether this machine can."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..attention.backends import (
    AUTO,
    INFERENCE,
    TRAINING,
    BackendRefusal,
    Situation,
    wish_of_environment,
)
from ..attention.dispatch import OPERATORS, set_backend
from ..config import KernelsConfig
from ..errors import ConfigError, EnvironmentFault, FieldFault

VARIABLES = r"HYDRAHEAD_\w+_BACKEND"
"""What environment variables that ask for backends are called."""
TRAINING_DTYPE = {"cpu": None, "cuda": torch.bfloat16}
"""What heads compute in while they are trained (training.loop.mixed_precision); None is the teacher's own."""


def use_kernels(config: KernelsConfig, *, once: bool = False) -> None:
    """Makes the section hold in this process. once: choices that were said are not said again where it holds already."""
    for name, operator in OPERATORS.items():
        wish = getattr(config, name), f"kernels.{name}"
        if not (once and operator.holds(*wish)):
            set_backend(name, *wish)


def check_environment() -> None:
    """Raises ConfigError where a variable of the environment asks for a backend that there is not.

    An exported model, which may be part of something else, warns of it; a command has nobody else to serve.
    """
    known = {operator.variable: operator.allowed for operator in OPERATORS.values()}
    for variable, allowed in known.items():
        name = os.environ.get(variable) or AUTO
        if name not in allowed:
            raise ConfigError(f"{variable}: {name!r} is not allowed; allowed: {', '.join(allowed)}")
    for variable in sorted(set(os.environ) - set(known)):
        if re.fullmatch(VARIABLES, variable):
            raise ConfigError(f"{variable}: no such variable; allowed: {', '.join(known)}")


@contextmanager
def kernel_faults() -> Iterator[None]:
    """Raises EnvironmentFault where a call within comes to a backend that was asked for and cannot serve it."""
    try:
        yield
    except BackendRefusal as error:
        raise EnvironmentFault(str(error)) from error


def check_kernels(
    config: KernelsConfig, device: torch.device, dtype: str, head_dim: int, *, trains: bool
) -> None:
    """Raises EnvironmentFault where a backend that the section, or else the environment, asks for can't serve a run: FieldFault
    where it was the section.

    It must serve the teacher's own dtype: to leave all of a run to others is no way to be asked for.
    """
    dtypes = {INFERENCE: getattr(torch, dtype)}
    if trains:
        dtypes[TRAINING] = TRAINING_DTYPE[device.type] or dtypes[INFERENCE]
    for name, operator in OPERATORS.items():
        wish, asked_by = getattr(config, name), f"kernels.{name}"
        if wish == AUTO:
            wish, asked_by = wish_of_environment(operator.variable, operator.allowed)
        for purpose, found in dtypes.items():
            situation = Situation(device, found, head_dim, purpose)
            reason = None if wish == AUTO else operator.refusal(wish, situation)
            if reason is not None:
                names = (backend.name for backend in operator.backends)
                able = [n for n in names if operator.refusal(n, situation) is None]
                fault = FieldFault if getattr(config, name) != AUTO else EnvironmentFault
                raise fault(
                    f"{asked_by}: {wish} cannot serve {operator.denied(wish, situation, reason)}: {reason}; "
                    f"allowed here: {', '.join([AUTO, *able])}"
                )
