"""The `kernels` section of a config: who computes the operators in this process, and whether this machine can."""

from __future__ import annotations

import torch

from ..attention.backends import AUTO, INFERENCE, TRAINING, Situation
from ..attention.dispatch import OPERATORS, set_backend
from ..config import KernelsConfig
from ..errors import EnvironmentFault

TRAINING_DTYPE = {"cpu": None, "cuda": torch.bfloat16}
"""What heads compute in while they are trained (training.loop.mixed_precision); None is the teacher's own."""


def use_kernels(config: KernelsConfig) -> None:
    """Makes the section hold in this process."""
    for name in OPERATORS:
        set_backend(name, getattr(config, name), f"kernels.{name}")


def check_kernels(
    config: KernelsConfig, device: torch.device, dtype: str, head_dim: int, *, trains: bool
) -> None:
    """Raises EnvironmentFault where a backend that the section asks for can't serve a run's calls."""
    dtypes = {INFERENCE: getattr(torch, dtype)}
    if trains:
        dtypes[TRAINING] = TRAINING_DTYPE[device.type] or dtypes[INFERENCE]
    for name, operator in OPERATORS.items():
        wish = getattr(config, name)
        for purpose, found in dtypes.items():
            situation = Situation(device, found, head_dim, purpose)
            reason = None if wish == AUTO else operator.backend(wish).cannot(situation)
            if reason is not None:
                able = [b.name for b in operator.backends if b.cannot(situation) is None]
                raise EnvironmentFault(
                    f"kernels.{name}: {wish} cannot serve {situation}: {reason}; allowed here: "
                    f"{', '.join([AUTO, *able])}"
                )
