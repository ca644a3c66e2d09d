"""Checkpoints of a TrainingState: one safetensors file, replaced in one step, optimizer included."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import ConfigError, EnvironmentFault
from ..rundir import replacing
from .loop import TrainingState

SCHEMA = 1

_MOMENTS = ("exp_avg", "exp_avg_sq")


def save_checkpoint(
    state: TrainingState, path: Path, *, identity: str, extra: dict[str, Tensor] | None = None
) -> None:
    """Writes the state and extra tensors; a crash at any moment leaves the file before or the new one.

    identity names all that the state depends on; load_checkpoint refuses another one.
    """
    tensors = {f"extra.{name}": tensor.contiguous() for name, tensor in (extra or {}).items()}
    for name, parameter in state.parameters.items():
        tensors[f"parameter.{name}"] = parameter.detach()
        for moment in _MOMENTS:
            if parameter in state.optimizer.state:
                tensors[f"{moment}.{name}"] = state.optimizer.state[parameter][moment]
    metadata = {
        "schema": str(SCHEMA),
        "identity": identity,
        "step": str(state.step),
        "losses": json.dumps(state.losses),
    }
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)


def load_checkpoint(state: TrainingState, path: Path, *, identity: str) -> dict[str, Tensor]:
    """Fills state from a file written by save_checkpoint; returns its extra tensors, on the CPU.

    Raises ConfigError where the file belongs to other settings, EnvironmentFault where it is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            _check(metadata, path, identity)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        state.step = int(metadata["step"])
        state.losses = [(step, loss) for step, loss in json.loads(metadata["losses"])]
        for name, parameter in state.parameters.items():
            _restore(state, name, parameter, tensors)
    except (SafetensorError, OSError, KeyError, json.JSONDecodeError) as error:
        raise EnvironmentFault(
            f"checkpoint {path}: cannot be read ({error}); delete it to start this stage anew"
        ) from error
    prefix = "extra."
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


def _restore(
    state: TrainingState, name: str, parameter: torch.nn.Parameter, tensors: dict[str, Tensor]
) -> None:
    with torch.no_grad():
        parameter.copy_(tensors[f"parameter.{name}"])
    if f"exp_avg.{name}" not in tensors:
        return
    device = parameter.device
    # The fused optimizer counts on the device of the parameter.
    count = torch.tensor(float(state.step), dtype=torch.float32, device=device)
    moments = {moment: tensors[f"{moment}.{name}"].to(device) for moment in _MOMENTS}
    state.optimizer.state[parameter] = {"step": count, **moments}


def _check(metadata: dict[str, str], path: Path, identity: str) -> None:
    if metadata.get("schema") != str(SCHEMA):
        raise ConfigError(
            f"checkpoint {path}: schema {metadata.get('schema')} is not {SCHEMA}; "
            "delete it to start this stage anew"
        )
    if metadata.get("identity") != identity:
        raise ConfigError(
            f"checkpoint {path}: was written with other settings "
            f"({metadata.get('identity')}, now {identity}); delete it to start this stage anew"
        )
