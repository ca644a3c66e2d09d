"""Estimates of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from archsearch.config import RunConfig
from archsearch.configfile import load_config
from archsearch.headmap import ModelShape
from archsearch.models.teacher import TeacherInfo
from archsearch.plan import (
    STAGES,
    duration,
    evaluation_tokens,
    make_plan,
    matmul_rate,
    train_tokens,
    training_rows,
)

INFO = TeacherInfo(
    shape=ModelShape("qwen3", 28, 16, 8, 128),
    hidden_size=2048,
    num_parameters=1_700_000_000,
    vocab_size=151_936,
    max_context=40_960,
)

RATE = 1e11


def test_tokens_follow_the_config(run_config: Path) -> None:
    config = load_config(run_config, [])
    assert train_tokens(config) == 1024
    assert evaluation_tokens(config) == 2 * 96 + 2 * 2 * 96
    loaded = load_config(run_config, ["supernet.source=some.safetensors"])
    assert train_tokens(loaded) == 256
    assert (
        train_tokens(load_config(run_config, ["supernet.source=x", "search.proxy_tokens=[0]"])) == 0
    )


def test_plan_has_every_stage_and_leaves_out_the_finished(run_config: Path) -> None:
    config = load_config(run_config, [])
    whole = make_plan(config, INFO, rate_flops=RATE)
    rest = make_plan(config, INFO, ("teacher", "data", "supernet"), rate_flops=RATE)
    assert [stage.name for stage in whole.stages] == list(STAGES)
    assert rest.seconds < whole.seconds
    assert sum("done" in line for line in rest.lines()) == 3


def test_more_work_takes_longer_and_more_workers_more_memory(run_config: Path) -> None:
    few = make_plan(load_config(run_config, []), INFO, rate_flops=RATE)
    many = make_plan(load_config(run_config, ["search.trials=500"]), INFO, rate_flops=RATE)
    assert many.seconds > 10 * few.seconds
    workers = load_config(run_config, ["execution.executor=ray", "execution.workers=4"])
    assert make_plan(workers, INFO, rate_flops=RATE).memory_bytes > few.memory_bytes


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "moments"), (45, "45 s"), (600, "10 min"), (7200, "2.0 h")],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_matmul_rate_is_measured() -> None:
    assert matmul_rate(torch.device("cpu")) > 1e8


def test_text_that_is_held_out_too_is_not_trained_on() -> None:
    text = {"source": "file", "path": "a.txt"}
    sizes = {"sequence_length": 64, "heldout_sequences": 3, "niah_share": 0.25}
    found = []
    for train in (text, {**text, "temperature": 0.5}, {**text, "path": "b.txt"}):
        data = {**sizes, "train": train, "heldout": text}
        raw = {"schema": 1, "name": "a", "teacher": {"source": "x"}, "data": data}
        raw["supernet"] = {"tokens": 64 * 8}
        found.append(training_rows(RunConfig.model_validate_json(json.dumps(raw))))
    assert [rows.skip for rows in found] == [3, 3, 0]
    assert {(rows.text, rows.prompts) for rows in found} == {(6, 2)}
