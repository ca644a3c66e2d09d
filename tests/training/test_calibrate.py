"""Calibration: statistics of attention that is known, and a start that beats an uncalibrated one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from archsearch.attention.rotary import PositionEmbeddings
from archsearch.config import GdnConfig
from archsearch.models.supernet import Supernet
from archsearch.models.teacher import Teacher
from archsearch.training.calibrate import _AffineFit, attention_statistics, calibrate
from archsearch.training.taps import visit_layers
from archsearch.training.twin_error import measure_twins
from tests.random_models import random_teacher, random_tokens


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("bias", [True, False])
def test_calibrated_twins_start_closer(family: str, bias: bool) -> None:
    teacher = random_teacher(family, num_layers=2)
    tokens_NT, heldout_NT = random_tokens(32, 64), random_tokens(8, 64, seed=5)
    supernet = Supernet.migrated(teacher, GdnConfig(bias=bias))
    before_LH = measure_twins(teacher, supernet, heldout_NT).relative_LH
    calibrate(teacher, supernet, tokens_NT)
    after_LH = measure_twins(teacher, supernet, heldout_NT).relative_LH
    assert (after_LH < before_LH).all()
    if bias:
        # The best constant alone reaches 1.
        assert after_LH.max() < 1.2
        assert after_LH.median() < 0.95


def test_even_attention_has_the_distance_and_entropy_of_counting() -> None:
    teacher = random_teacher("llama", num_layers=1)
    full = teacher.model.model.layers[0].self_attn.full
    with torch.no_grad():
        full.q_proj.weight.zero_()
    seen = []

    def visit(_: int, x_BTC: Tensor, position_embeddings: PositionEmbeddings, __: Tensor) -> None:
        seen.append(attention_statistics(full, x_BTC, position_embeddings))

    with torch.no_grad():
        visit_layers(teacher.model, random_tokens(2, 40), visit)
    ((distance_H, entropy_H),) = seen
    # A query at t looks evenly at the keys 0 .. t; key 0 does not count.
    weights = [(t - key, 1 / (t + 1)) for t in range(2, 40) for key in range(1, t + 1)]
    mean_log = sum(p * math.log1p(back) for back, p in weights) / sum(p for _, p in weights)
    torch.testing.assert_close(distance_H, torch.full((4,), math.expm1(mean_log)))
    torch.testing.assert_close(entropy_H, torch.ones(4))


def test_decay_and_write_strength_follow_attention(teacher: Teacher) -> None:
    supernet = Supernet.migrated(teacher, GdnConfig())
    calibrate(teacher, supernet, random_tokens(4, 64))
    for twin in supernet.twins:
        half_life_H = math.log(2) / torch.nn.functional.softplus(twin.dt_bias)
        assert (half_life_H >= 0.499).all()
        assert (half_life_H < 32).all()
        strength_H = twin.b_proj.bias.sigmoid()
        assert (strength_H >= 0.3).all()
        assert (strength_H <= 0.7001).all()


@pytest.mark.parametrize("with_bias", [True, False])
def test_fit_finds_an_exact_solution(with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    n_BTHD = torch.randn(2, 200, 3, 4, generator=generator) + 0.5
    gamma_HD, bias_HD = torch.randn(2, 3, 4, generator=generator)
    bias_HD = bias_HD * with_bias
    root_HDD = torch.randn(3, 4, 4, generator=generator)
    fit = _AffineFit()
    for part in n_BTHD.split(1):
        fit.add(part, part * gamma_HD + bias_HD)
    found_gamma, found_bias = fit.solve(root_HDD, with_bias=with_bias)
    torch.testing.assert_close(found_gamma.float(), gamma_HD, atol=5e-3, rtol=5e-3)
    torch.testing.assert_close(found_bias.float(), bias_HD, atol=5e-3, rtol=5e-3)
