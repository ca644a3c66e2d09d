"""Step rates: FLOPs against a count by hand, and the whole measurement on a tiny model."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from archsearch.attention.dispatch import set_backend
from archsearch.config import GdnConfig, RunConfig
from archsearch.configfile import load_config
from archsearch.headmap import HeadMap, Operator
from archsearch.lab import step_rate
from archsearch.lab.candidate_prices import LENGTHS, PRICED, evaluations
from archsearch.lab.records import LabBook
from archsearch.lab.step_bench import Bench, Clock, attempt, random_batches
from archsearch.lab.step_flops import alignment_flops, core_flops, distillation_flops, products
from archsearch.lab.step_rate import CASES, measure
from archsearch.models.cut import cut
from archsearch.models.supernet import Supernet
from tests.random_models import random_supernet, random_teacher

FULL_LAYER = 32 * 8 * (4 + 2 + 2 + 4) + 3 * 32 * 48
"""Weights of a teacher's layer: hidden size 32, 4 query and 2 KV heads of 8, intermediate size 48."""


@pytest.fixture(autouse=True)
def _backends() -> Iterator[None]:
    yield
    for operator in step_rate.SETUPS["torch"]:
        set_backend(operator, "auto")


def bench_of(config: RunConfig, folder: Path, *, seconds: float = 60.0) -> Bench:
    deadline = time.monotonic() + seconds
    return Bench(config, random_teacher(), LabBook(0), 1e12, 2, deadline, folder / "figures.json")


def small_config(run_config: Path) -> RunConfig:
    sizes = ["data.sequence_length=32", "supernet.batch_tokens=64", "distill.batch_tokens=64"]
    return load_config(run_config, [*sizes, "probes.contexts=[400]", "distill.top_k=9"])


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
    ours = 4 * (inside + head) + 2 * attention + 12 * (160 + 400)
    found = {
        form: distillation_flops(teacher, student, 10, form=form)
        for form in ("exact", "hidden", "mean_row", "topk")
    }
    assert found["exact"] == pytest.approx(ours + 2 * (inside + head) + 12 * 160)
    assert found["hidden"] == pytest.approx(ours + 2 * head)
    assert found["mean_row"] == found["topk"] == pytest.approx(ours)
    every = distillation_flops(teacher, student, 10, form="topk", trainable="all")
    assert every == pytest.approx(ours + 2 * (inside + head - attention))


def test_a_clock_leaves_out_the_first_steps() -> None:
    clock = Clock(torch.device("cpu"))
    clock.moments = {0: 0.0, 1: 9.0, 2: 14.0, 3: 16.0, 13: 21.0}
    assert clock.first_seconds == 9.0
    assert clock.step_seconds == 0.5
    clock = Clock(torch.device("cpu"))
    for step in range(10):
        clock(step, 9)
    assert list(clock.moments) == [0, 1, 2, 3, 9]


def test_batches_come_again() -> None:
    batches = random_batches(2, 5, 9, 3)
    stream = batches(0)
    drawn = [next(stream) for _ in range(6)]
    assert drawn[0].shape == (2, 5)
    assert not drawn[0].equal(drawn[1])
    assert all(drawn[i].equal(drawn[i + 3]) for i in range(3))
    assert next(batches(4)).equal(drawn[1])


def test_every_case_is_measured_and_candidates_are_priced(run_config: Path, tmp_path: Path) -> None:
    config = small_config(run_config)
    bench = bench_of(config, tmp_path)
    measure(bench, "torch", list(CASES), 60.0, first=True)
    rows = {row["metric"].removeprefix("check: "): row for row in bench.book.rows}
    assert not [name for name in rows if name.endswith("none")]
    for name in ("alignment", *(f"distillation, {case}" for case in CASES)):
        rate, share = rows[f"{name}, torch"], rows[f"{name}, torch, share of the matmul peak"]
        assert rate["value"] == pytest.approx(64 / rate["step_seconds"])
        assert 0 < share["value"] == pytest.approx(rate["value"] * rate["flops_a_token"] / 1e12)
    for case in PRICED:
        rate = rows[f"distillation, {case}, torch"]["value"]
        prices = [
            rows[f"seconds a candidate, {tokens:,} tokens, {case}"] for tokens in (0, 256, *LENGTHS)
        ]
        fixed = sum(prices[0]["parts"].values())
        assert [row["value"] for row in prices] == [
            pytest.approx(fixed + tokens / rate) for tokens in (0, 256, *LENGTHS)
        ]
        hours = rows[f"hours of a search of 200 candidates, {case}"]
        expected = 400 * fixed + hours["evaluations"][1] * (fixed + 256 / rate)
        assert hours["value"] == pytest.approx(expected / 3600)
    assert json.loads((tmp_path / "figures.json").read_text()) == bench.book.rows


def test_evaluations_follow_the_config(run_config: Path) -> None:
    config = load_config(run_config, ["search.max_promoted=4"])
    assert evaluations(config) == [400, 8 + 4]
    alone = load_config(run_config, ["search.random_control=false", "search.proxy_tokens=[0]"])
    assert evaluations(alone) == [200]


def test_time_that_is_spent_is_said_and_errors_do_not_end_the_rest(
    run_config: Path, tmp_path: Path
) -> None:
    config = small_config(run_config)
    bench = bench_of(config, tmp_path, seconds=0.0)
    attempt(bench, "late", 60.0, lambda: None)
    bench = bench_of(config, tmp_path)

    def fail() -> None:
        raise RuntimeError("a kernel failed")

    attempt(bench, "broken", 60.0, fail)
    attempt(bench, "endless", 3.0, lambda: time.sleep(30))
    texts = {row["metric"]: row["text"] for row in bench.book.rows}
    assert texts["check: broken: none"] == "RuntimeError: a kernel failed"
    assert texts["check: endless: none"].startswith("OutOfTime")


def test_the_command_runs_on_a_cpu(
    run_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = tmp_path / "step_rate.json"
    words = ["step_rate", str(run_config), "--steps", "1", "--cases", "exact", "hidden"]
    monkeypatch.setattr(sys, "argv", [*words, "--figures", str(figures)])
    step_rate.main()
    names = [row["metric"] for row in json.loads(figures.read_text())]
    assert not [name for name in names if name.endswith("none")]
    assert "check: hours of a search of 200 candidates, hidden" in names
    assert len({name for name in names if name.startswith("check: distillation")}) == 4
