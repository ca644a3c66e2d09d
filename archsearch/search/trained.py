"""The weights of a distilled candidate on disk: as they were measured, and as they were before the rate fell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..config import RunConfig
from ..errors import EnvironmentFault
from ..rundir import replacing
from ..training.loop import NonFiniteLoss
from ..training.student import trainable_parameters
from .records import TrialSpec

TRUNK = "trunk."
"""Before the names of weights that a longer proxy goes on from."""


class Trunk:
    """The weights at the moment when the rate had not fallen yet, in fp16, and the tokens behind them."""

    def __init__(self, student: HydraHeadForCausalLM, config: RunConfig, batch_tokens: int) -> None:
        self._student, self._trainable = student, config.distill.trainable
        self._batch_tokens = batch_tokens
        self.tokens = 0
        self.weights: dict[str, Tensor] = {}

    def keep(self, steps: int) -> None:
        """Copies the student's weights of this moment, which so many steps of distillation led to."""
        self.tokens = steps * self._batch_tokens
        self.weights = _halves(self._student, self._trainable)


def save_trained(
    student: HydraHeadForCausalLM,
    path: Path,
    config: RunConfig,
    spec: TrialSpec,
    tokens: int,
    trunk: Trunk | None = None,
) -> None:
    """Rounds the trained parameters to fp16 in place and stores them, and the trunk: what is measured is what is stored.

    Raises NonFiniteLoss where one is not finite, or too large for fp16.
    """
    halves = _halves(student, config.distill.trainable)
    parameters = dict(student.named_parameters())
    for name, half in halves.items():
        parameters[name].data.copy_(half)
    metadata = {"schema": "1", "tokens": str(tokens), "head_map": json.dumps(spec.head_map)}
    if trunk is not None and trunk.tokens:
        halves |= {TRUNK + name: half for name, half in trunk.weights.items()}
        metadata["trunk_tokens"] = str(trunk.tokens)
    with replacing(path) as temporary:
        save_file(halves, temporary, metadata=metadata)


def load_trained(student: HydraHeadForCausalLM, path: Path) -> int:
    """Puts weights stored by save_trained into a student cut (copy=True) from the same head map.

    Returns the distillation tokens behind them. Raises EnvironmentFault where the file is missing,
    damaged, or of another head map.
    """
    return _load(student, path, trunk=False)


def load_to_go_on(student: HydraHeadForCausalLM, path: Path) -> int:
    """As load_trained, but the weights from before the rate fell, where the file has them."""
    return _load(student, path, trunk=True)


def _load(student: HydraHeadForCausalLM, path: Path, *, trunk: bool) -> int:
    parameters = dict(student.named_parameters())
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            layers = json.loads(metadata["head_map"])["layers"]
            if layers != student.config.head_map:
                raise EnvironmentFault(f"{path}: the weights of another head map")
            prefix = TRUNK if trunk and "trunk_tokens" in metadata else ""
            with torch.no_grad():
                for name in file.keys():  # noqa: SIM118
                    if name.startswith(TRUNK) == bool(prefix):
                        parameters[name.removeprefix(prefix)].copy_(file.get_tensor(name))
            return int(metadata["trunk_tokens" if prefix else "tokens"])
    except EnvironmentFault:
        raise
    except Exception as error:  # safetensors raises many kinds, all of which mean a bad file
        raise EnvironmentFault(
            f"{path}: cannot be read ({error!r}); without it the candidate is trained from its beginning"
        ) from error


def _halves(student: HydraHeadForCausalLM, trainable: Any) -> dict[str, Tensor]:
    halves = {}
    for name, parameter in trainable_parameters(student, trainable).items():
        half = parameter.detach().half()
        if not bool(torch.isfinite(half).all()):
            raise NonFiniteLoss(f"{name} is not finite in fp16 after distillation")
        halves[name] = half.contiguous()
    return halves
