"""Checkpoints of a TrainingState: one safetensors file, replaced in one step, optimizer included."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import ConfigError, EnvironmentFault
from ..rundir import replacing
from .loop import TrainingState
from .masters import MOMENTS, Masters

SCHEMA = 1
SAMPLE = 64
"""Numbers of each parameter that tell one start from another."""
SHOWN = 40
"""Characters of a setting up to which an error shows it."""


@dataclass(frozen=True)
class Extra:
    """What a checkpoint carries besides the state: tensors, on the CPU once read, and plain JSON data."""

    tensors: dict[str, Tensor]
    notes: Any = None


def save_checkpoint(
    state: TrainingState,
    path: Path,
    *,
    identity: str,
    extra: dict[str, Tensor] | None = None,
    notes: Any = None,
) -> None:
    """Writes the state, extra tensors and notes (JSON); a crash at any moment leaves the file before or the new one.

    identity names all that the state depends on; read_checkpoint refuses another one.
    """
    tensors = {f"extra.{name}": tensor.contiguous() for name, tensor in (extra or {}).items()}
    names: dict[Tensor, str] = {p: name for name, p in state.parameters.items()}
    optimizer = state.optimizer
    for group in optimizer.groups:
        parts = {"parameter": group.values}
        parts |= {kind: group.views(flat) for kind, flat in optimizer.moments(group).items()}
        for kind, views in parts.items():
            for parameter, view in zip(group.parameters, views, strict=True):
                tensors[f"{kind}.{names[parameter]}"] = view.detach()
    metadata = {
        "schema": str(SCHEMA),
        "identity": identity,
        "step": str(state.step),
        "updates": json.dumps([optimizer.updates(group) for group in optimizer.groups]),
        "losses": json.dumps(state.losses),
        "notes": json.dumps(notes),
    }
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)


def read_checkpoint(state: TrainingState, path: Path, *, identity: str) -> Extra:
    """Fills state from a file written by save_checkpoint; returns what it carries besides.

    Raises ConfigError where the file belongs to other settings, EnvironmentFault where it is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            _check(metadata, path, identity)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        state.step = int(metadata["step"])
        state.losses = [(step, loss) for step, loss in json.loads(metadata["losses"])]
        groups = state.optimizer.groups
        # Files of earlier versions knew only groups that had been updated in every step.
        updates = json.loads(metadata.get("updates", "null")) or [state.step] * len(groups)
        for group, count in zip(groups, updates, strict=True):
            _restore(state, group, count, tensors)
        notes = json.loads(metadata.get("notes", "null"))
    except torch.OutOfMemoryError:
        raise
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise EnvironmentFault(
            f"checkpoint {path}: cannot be read ({error}); delete it to start this stage anew"
        ) from error
    prefix = "extra."
    extra = {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
    return Extra(extra, notes)


def start_digest(state: TrainingState, data: Iterable[Tensor]) -> str:
    """Tells one start from another: by batches of token ids on the CPU, and some numbers of each parameter."""
    digest = hashlib.blake2b(digest_size=8)
    for batch_BT in data:
        digest.update(batch_BT.numpy().tobytes())
    for parameter in state.parameters.values():
        flat = parameter.detach().flatten()
        picked = flat[:: max(1, len(flat) // SAMPLE)].to("cpu", torch.float32)
        digest.update(picked.numpy().tobytes())
    return digest.hexdigest()


def _restore(
    state: TrainingState, group: Masters, updates: int, tensors: dict[str, Tensor]
) -> None:
    names: dict[Tensor, str] = {p: name for name, p in state.parameters.items()}
    own = [names[parameter] for parameter in group.parameters]
    with torch.no_grad():
        for name, value in zip(own, group.values, strict=True):
            value.copy_(tensors[f"parameter.{name}"])
    group.give_values()
    moments = {}
    if f"{MOMENTS[0]}.{own[0]}" in tensors:
        for kind in MOMENTS:
            moments[kind] = torch.cat([tensors[f"{kind}.{name}"].flatten() for name in own])
    state.optimizer.restore(group, moments, updates)


def _check(metadata: dict[str, str], path: Path, identity: str) -> None:
    if metadata.get("schema") != str(SCHEMA):
        raise ConfigError(
            f"checkpoint {path}: schema {metadata.get('schema')} is not {SCHEMA}; "
            "delete it to start this stage anew"
        )
    if metadata.get("identity") != identity:
        raise ConfigError(
            f"checkpoint {path}: was written with other settings ({_changes(metadata.get('identity'), identity)}); "
            "delete it to start this stage anew"
        )


def _changes(old: str | None, new: str) -> str:
    """What differs between two identities, JSON objects or any text; of a file of an earlier version, fields may be absent."""
    was, now = _flat(old or ""), _flat(new)
    changes = []
    for name in dict.fromkeys([*now, *was]):
        values = was.get(name, "absent"), now.get(name, "absent")
        if values[0] != values[1]:
            is_short = max(map(len, values)) <= SHOWN
            changes.append(f"{name} {values[0]}, now {values[1]}" if is_short else f"other {name}")
    return "; ".join(changes)


def _flat(identity: str) -> dict[str, str]:
    """The fields of an identity by their dotted names."""
    try:
        data = json.loads(identity)
    except ValueError:
        data = identity
    if not isinstance(data, dict):
        return {"they were": str(data)}
    flat: dict[str, str] = {}
    for name, value in data.items():
        inner = value.items() if isinstance(value, dict) else ()
        flat |= {f"{name}.{key}": json.dumps(part) for key, part in inner}
        flat |= {} if inner else {name: json.dumps(value)}
    return flat
