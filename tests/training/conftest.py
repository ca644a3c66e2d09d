"""A random teacher whose attention has structure, and endless batches of random tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from archsearch.models.teacher import Teacher
from archsearch.training.loop import BatchSource
from tests.random_models import VOCABULARY, random_teacher


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return random_teacher("qwen3", num_layers=2)


@pytest.fixture
def batches() -> BatchSource:
    return random_batches


def random_batches(step: int, *, sequences: int = 8, length: int = 48) -> Iterator[Tensor]:
    """Batch i depends on i alone."""
    while True:
        generator = torch.Generator().manual_seed(step)
        yield torch.randint(VOCABULARY, (sequences, length), generator=generator)
        step += 1
