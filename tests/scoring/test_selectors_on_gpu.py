"""The selectors that need no supernet on a CUDA device in bf16, against fp32 on the CPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from archsearch.models.teacher import Teacher
from archsearch.scoring.attribution import attribution_effects
from archsearch.scoring.duo_gates import learn_gates
from archsearch.scoring.retrieval_heads import copy_scores
from tests.random_models import random_probes, random_teacher
from tests.scoring.handmade import copying_probe, copying_teacher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(teacher: Teacher) -> Teacher:
    device = torch.device("cuda")
    nn.Module.to(teacher.model, device, torch.bfloat16)
    return replace(teacher, device=device)


def test_attribution() -> None:
    probes = random_probes(4, length=200)
    exact = attribution_effects(random_teacher(), probes, decay=0.9, min_gap=-math.inf)
    rough = attribution_effects(on_gpu(random_teacher()), probes, decay=0.9, min_gap=-math.inf)
    for exact_LH, rough_LH in zip(exact, rough, strict=True):
        assert torch.corrcoef(torch.stack([exact_LH.flatten(), rough_LH.flatten()]))[0, 1] > 0.9


def test_retrieval_heads() -> None:
    scores = copy_scores(on_gpu(copying_teacher()), copying_probe(length=120, at=40))
    assert scores.tolist() == [[1.0, 0.0, 0.5, 0.0]]


@pytest.mark.parametrize("memory_bytes", [1, 1 << 30])
def test_duo_gates(memory_bytes: int) -> None:
    probes = [copying_probe(length=509, at=at) for at in (40, 150, 300)]
    learned = learn_gates(on_gpu(copying_teacher()), probes, steps=100, memory_bytes=memory_bytes)
    [[copying, idle]] = learned.gates_LG.tolist()
    assert copying > 0.8
    assert idle < 0.1
