"""Calibration: memory from attention, choices of supernet.init, and a start that beats an uncalibrated one."""

from __future__ import annotations

import math

import pytest
import torch

from archsearch.config import GdnConfig, TwinInitConfig
from archsearch.models.supernet import Supernet
from archsearch.models.teacher import Teacher
from archsearch.training.attention_statistics import AttentionStatistics
from archsearch.training.calibrate import HALF_LIVES, WRITES, calibrate
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


@pytest.fixture
def statistics() -> AttentionStatistics:
    generator = torch.Generator().manual_seed(2)
    return AttentionStatistics(
        200 * torch.rand(7, generator=generator), torch.rand(7, generator=generator)
    )


def test_half_lives(statistics: AttentionStatistics) -> None:
    for name, half_life in HALF_LIVES.items():
        found_H = half_life(statistics, TwinInitConfig(half_life=name))
        assert found_H.shape == (7,)
        assert (found_H > 0).all(), name
    share = TwinInitConfig(half_life_share=0.25)
    wanted_H = 0.25 * statistics.distance_H.clamp(min=1)
    torch.testing.assert_close(HALF_LIVES["attention"](statistics, share), wanted_H)
    fixed = TwinInitConfig(half_life="fixed", half_life_tokens=30.0)
    torch.testing.assert_close(HALF_LIVES["fixed"](statistics, fixed), torch.full((7,), 30.0))
    spread = TwinInitConfig(half_life="spread", half_life_span=(2.0, 128.0))
    wanted_H = 2.0 ** torch.arange(1, 8)
    torch.testing.assert_close(HALF_LIVES["spread"](statistics, spread), wanted_H)


def test_write_strengths(statistics: AttentionStatistics) -> None:
    for name, write in WRITES.items():
        found_H = write(statistics, TwinInitConfig(write=name))
        assert found_H.shape == (7,)
        assert ((found_H > 0) & (found_H < 1)).all(), name
    order = WRITES["entropy"](statistics, TwinInitConfig()).argsort(descending=True)
    assert order.tolist() == statistics.entropy_H.argsort().tolist()
    constant = TwinInitConfig(write="constant", write_strength=0.9)
    torch.testing.assert_close(WRITES["constant"](statistics, constant), torch.full((7,), 0.9))


@pytest.mark.parametrize("half_life", [20.0, 0.005])
def test_memory_is_set_as_init_says(teacher: Teacher, half_life: float) -> None:
    supernet = Supernet.migrated(teacher, GdnConfig())
    init = TwinInitConfig(
        half_life="fixed", half_life_tokens=half_life, write="constant", write_strength=0.8
    )
    calibrate(teacher, supernet, random_tokens(4, 64), init)
    for twin in supernet.twins:
        rate_H = torch.nn.functional.softplus(twin.dt_bias)
        torch.testing.assert_close(rate_H, torch.full_like(rate_H, math.log(2) / half_life))
        torch.testing.assert_close(twin.b_proj.bias.sigmoid(), torch.full_like(rate_H, 0.8))


def test_random_projections_are_drawn_from_the_seed() -> None:
    teacher, tokens_NT = random_teacher("qwen2", num_layers=2), random_tokens(4, 64)
    init = TwinInitConfig(projections="random")
    found = []
    for seed in (0, 0, 1):
        supernet = Supernet.migrated(teacher, GdnConfig())
        calibrate(teacher, supernet, tokens_NT, init, seed=seed)
        found.append(supernet.twins[1].state_dict())
    migrated = Supernet.migrated(teacher, GdnConfig()).twins[1]
    for name in ("q_proj", "k_proj", "v_proj"):
        first, same, other = (state[f"{name}.weight"] for state in found)
        assert torch.equal(first, same)
        assert not torch.equal(first, other)
        assert not torch.equal(first, migrated.get_parameter(f"{name}.weight"))
        assert float(first.std()) == pytest.approx(teacher.model.config.initializer_range, rel=0.1)
        assert not found[0][f"{name}.bias"].any()


@pytest.mark.parametrize("kept", [True, False])
def test_norms_of_q_and_k_are_kept_or_not(teacher: Teacher, kept: bool) -> None:
    supernet = Supernet.migrated(teacher, GdnConfig())
    init = TwinInitConfig(qk_norm="teacher" if kept else "ones")
    calibrate(teacher, supernet, random_tokens(4, 64), init)
    for twin, layer in zip(supernet.twins, teacher.model.model.layers, strict=True):
        theirs = layer.self_attn.full.k_norm.weight
        assert torch.equal(twin.k_norm.weight, theirs if kept else torch.ones_like(theirs))


def test_bias_of_zero_is_not_fitted(teacher: Teacher) -> None:
    supernet = Supernet.migrated(teacher, GdnConfig())
    init = TwinInitConfig(bias="zero", scale="one")
    calibrate(teacher, supernet, random_tokens(4, 64), init)
    for twin in supernet.twins:
        assert not twin.bias.any()
        assert bool((twin.gamma == 1).all())
