"""A training that is killed and goes on against one that is never interrupted: all that a checkpoint holds is compared.

On a GPU two whole runs need not be equal, since sums change order: then a resumed one may be off as they are from each
other, and where they are equal it must be equal to the bit.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from archsearch.config import SupernetConfig
from archsearch.models.supernet import Supernet
from archsearch.models.teacher import Teacher
from archsearch.training.align import align
from archsearch.training.loop import BatchSource
from archsearch.training.masters import MOMENTS
from archsearch.training.readings import distill_with_readings
from tests.random_models import random_tokens
from tests.training.conftest import random_batches
from tests.training.test_readings import BATCH, CONFIG, LENGTHS, student_of

Train = Callable[[Path, BatchSource], dict[str, Tensor]]
"""Trains to the end, goes on from the checkpoint there and writes one after every step; returns what came of it."""

NOISE = 10.0
"""Times the distance of two whole runs that a resumed one may have. One without moments is off by far more."""


class Killed(Exception):
    """Stands for a kill."""


def check_resumed_equals_whole(train: Train, folder: Path, steps: Sequence[int]) -> None:
    """Kills a run before each of these steps, counted from 0, and compares it once resumed with a whole one."""
    whole, again = (
        _outcome(train, folder / f"{name}.safetensors", random_batches)
        for name in ("whole", "again")
    )
    noise = _distances(whole, again)
    for step in steps:
        path = folder / f"killed before {step}.safetensors"
        with pytest.raises(Killed):
            train(path, _killed_before(step))
        assert path.exists()
        resumed = _outcome(train, path, random_batches)
        for kind, distance in _distances(whole, resumed).items():
            assert distance <= NOISE * noise[kind], (step, kind, noise[kind])


def reads_student(teacher: Teacher) -> Train:
    """A distillation with readings: the student as it was measured at each, and as it ends."""

    def train(path: Path, batches: BatchSource) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}

        def measure(student: torch.nn.Module, tokens: int) -> dict[str, float]:
            state = student.state_dict().items()
            seen.update({f"{tokens} {name}": value.cpu().clone() for name, value in state})
            return {"norm": float(sum(value.double().norm() for _, value in state))}

        student = student_of(teacher)
        distill_with_readings(
            student,
            teacher,
            batches,
            readings=LENGTHS,
            measure=measure,
            config=CONFIG,
            checkpoint=path,
            save_seconds=0.0,
        )
        # A resumed run makes no reading again that it has.
        last = {name: value for name, value in seen.items() if name.startswith(f"{LENGTHS[-1]} ")}
        return last | {f"end {name}": x.cpu() for name, x in student.state_dict().items()}

    return train


def aligns(teacher: Teacher) -> Train:
    """An alignment: the twins, and their errors."""

    def train(path: Path, batches: BatchSource) -> dict[str, Tensor]:
        config = SupernetConfig(tokens=12 * BATCH, learning_rate=3e-3, warmup_steps=2)
        config = config.model_copy(update={"checkpoint_minutes": 1e-9})
        supernet = Supernet.migrated(teacher, config.gdn)
        align(teacher, supernet, batches, config, checkpoint=path, heldout_NT=random_tokens(2, 48))
        errors = torch.tensor(supernet.meta["metrics"]["error_by_head"])
        return {name: x.cpu() for name, x in supernet.state_dict().items()} | {"errors": errors}

    return train


def _killed_before(step: int) -> BatchSource:
    def source(start: int) -> Iterator[Tensor]:
        yield from itertools.islice(random_batches(start), max(0, step - start))
        raise Killed

    return source


def _outcome(train: Train, path: Path, batches: BatchSource) -> dict[str, dict[str, Tensor]]:
    """What came of a run and what its last checkpoint holds, by kind: weights, masters, each moment, counts."""
    found = {"result": train(path, batches)}
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    counts = [int(metadata["step"]), *json.loads(metadata["updates"])]
    assert min(counts) > 0
    found["counts"] = {"counts": torch.tensor(counts)}
    for kind in ("parameter", *MOMENTS):
        found[kind] = {name: x for name, x in tensors.items() if name.startswith(f"{kind}.")}
        assert found[kind], kind
    return found


def _distances(
    one: dict[str, dict[str, Tensor]], other: dict[str, dict[str, Tensor]]
) -> dict[str, float]:
    """By kind, the norm of the difference over the norm; 0 only where all are equal to the bit."""
    distances = {}
    for kind, tensors in one.items():
        assert tensors.keys() == other[kind].keys()
        pairs = [(x.double(), other[kind][name].double()) for name, x in tensors.items()]
        off = sum(float((a - b).square().sum()) for a, b in pairs)
        size = sum(float(a.square().sum()) for a, _ in pairs)
        assert size > 0
        distances[kind] = (off / size) ** 0.5
    return distances
