"""Statistics of attention that is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from archsearch.attention.rotary import PositionEmbeddings
from archsearch.training.attention_statistics import attention_statistics
from archsearch.training.taps import visit_layers
from tests.random_models import random_teacher, random_tokens


def test_even_attention_has_the_distance_and_entropy_of_counting() -> None:
    teacher = random_teacher("llama", num_layers=1)
    full = teacher.model.model.layers[0].self_attn.full
    with torch.no_grad():
        full.q_proj.weight.zero_()
    seen = []

    def visit(_: int, x_BTC: Tensor, rope: PositionEmbeddings, __: Tensor) -> None:
        seen.append(attention_statistics(full, x_BTC, rope))

    with torch.no_grad():
        visit_layers(teacher.model, random_tokens(2, 40), visit)
    ((distance_H, entropy_H),) = seen
    # A query at t looks evenly at the keys 0 .. t; key 0 does not count.
    weights = [(t - key, 1 / (t + 1)) for t in range(2, 40) for key in range(1, t + 1)]
    mean_log = sum(p * math.log1p(back) for back, p in weights) / sum(p for _, p in weights)
    torch.testing.assert_close(distance_H, torch.full((4,), math.expm1(mean_log)))
    torch.testing.assert_close(entropy_H, torch.ones(4))


def test_too_few_tokens_are_refused() -> None:
    teacher = random_teacher("llama", num_layers=1)
    full = teacher.model.model.layers[0].self_attn.full
    with pytest.raises(ValueError, match="2 tokens"):
        attention_statistics(full, torch.zeros(1, 2, 32), (torch.ones(1), torch.ones(1)))
