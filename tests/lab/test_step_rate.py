"""Step rates: FLOPs against a count by hand, and the whole measurement on a tiny model."""

from __future__ import annotations

import pytest
from torch import nn

from archsearch.attention.dispatch import set_backend
from archsearch.config import GdnConfig, RunConfig
from archsearch.headmap import HeadMap, Operator
from archsearch.lab import step_rate
from archsearch.lab.records import LabBook
from archsearch.lab.step_rate import (
    Clock,
    alignment_flops,
    core_flops,
    distillation_flops,
    measure,
    products,
    random_batches,
)
from archsearch.models.cut import cut
from archsearch.models.supernet import Supernet
from tests.random_models import random_supernet, random_teacher

FULL_LAYER = 32 * 8 * (4 + 2 + 2 + 4) + 3 * 32 * 48
"""Weights of a teacher's layer: hidden size 32, 4 query and 2 KV heads of 8, intermediate size 48."""


def test_products_are_those_of_linear_layers() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Embedding(9, 9), nn.Linear(4, 2, bias=False))
    assert products(module) == 20
    assert products(random_teacher().model.model.layers) == 3 * FULL_LAYER


def test_flops_of_operators() -> None:
    teacher = random_teacher()
    assert core_flops(teacher.model, 10) == (12 * 2 * 10 * 8, 12 * 5 * 10 * 8)
    everywhere = HeadMap.uniform(teacher.shape, Operator.GDN)
    student = cut(teacher, random_supernet(teacher), everywhere)
    assert core_flops(student, 10) == pytest.approx((12 * 167e3 / 256, 12 * 524e3 / 256))


def test_flops_of_steps() -> None:
    teacher = random_teacher()
    supernet = Supernet.migrated(teacher, GdnConfig())
    twin = 32 * 4 * (4 * 8 + 2)
    expected = 2 * 3 * FULL_LAYER + 12 * 160 + 4 * 3 * twin + 12 * (167e3 + 524e3) / 256
    assert alignment_flops(teacher, supernet, 10) == pytest.approx(expected + 12 * 4 * 64)
    student = cut(teacher, None, HeadMap.uniform(teacher.shape, Operator.FULL))
    head, attention = 300 * 32, 3 * (FULL_LAYER - 3 * 32 * 48)
    inside = 3 * FULL_LAYER
    expected = 6 * (inside + head) + 2 * attention + 12 * (160 + 160 + 400)
    assert distillation_flops(teacher, student, 10) == pytest.approx(expected)


def test_a_clock_leaves_out_the_first_steps() -> None:
    clock = Clock()
    clock.moments = [0.0, 9.0, 14.0, 16.0, 17.0, 18.5, 19.5]
    assert clock.first_seconds == 9.0
    assert clock.step_seconds == 1.0


def test_batches_do_not_depend_on_the_call() -> None:
    batches = random_batches(2, 5, 9)
    assert next(batches(3)).equal(next(batches(3)))
    assert next(batches(0)).shape == (2, 5)


@pytest.mark.parametrize("work", ["alignment", "distillation"])
def test_a_measurement_is_recorded(work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(step_rate.SETUPS, "torch", {"gdn": "torch", "full": "torch"})
    config = RunConfig.model_validate(
        {
            "schema": 1,
            "name": "small",
            "teacher": {"source": "none"},
            "data": {"sequence_length": 16},
            "supernet": {"batch_tokens": 32},
            "distill": {"batch_tokens": 32},
        }
    )
    book = LabBook(0)
    try:
        measure(random_teacher(), config, work, "torch", 1e12, book)
    finally:
        for operator in ("gdn", "full"):
            set_backend(operator, "auto")
    rate, share = book.rows
    assert rate["value"] == pytest.approx(32 / rate["step_seconds"])
    assert 0 < share["value"] == pytest.approx(rate["value"] * rate["flops_a_token"] / 1e12)
