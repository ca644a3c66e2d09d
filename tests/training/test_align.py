"""Alignment: it learns, it starts from a good place, it resumes exactly, it says when it breaks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from archsearch.config import GdnConfig, SupernetConfig
from archsearch.errors import ConfigError, EnvironmentFault
from archsearch.models.supernet import Supernet
from archsearch.models.teacher import Teacher
from archsearch.training.align import align
from archsearch.training.calibrate import calibrate
from archsearch.training.loop import BatchSource, NonFiniteLoss
from archsearch.training.twin_error import measure_twins
from tests.random_models import random_teacher, random_tokens

STEPS, BATCH_TOKENS = 12, 8 * 48


class Interrupted(Exception):
    """Stands for a kill in the middle of a run."""


def config_of(steps: int = STEPS, **settings: Any) -> SupernetConfig:
    return SupernetConfig(
        tokens=steps * BATCH_TOKENS,
        batch_tokens=BATCH_TOKENS,
        learning_rate=3e-3,
        warmup_steps=2,
        checkpoint_minutes=1e-9,
        **settings,
    )


def stopping(batches: BatchSource, after: int) -> BatchSource:
    """The same batches, with an interruption in front of step `after`."""

    def source(step: int) -> Iterator[Tensor]:
        yield from itertools.islice(batches(step), after - step)
        raise Interrupted

    return source


def test_error_falls_and_is_reported(
    teacher: Teacher, batches: BatchSource, tmp_path: Path
) -> None:
    supernet = Supernet.migrated(teacher, GdnConfig())
    heldout_NT = random_tokens(8, 48, seed=99)
    calibrate(teacher, supernet, next(batches(0)))
    calibrated = float(measure_twins(teacher, supernet, heldout_NT).relative_LH.mean())
    supernet = Supernet.migrated(teacher, GdnConfig())
    calls: list[tuple[int, int]] = []
    lines: list[str] = []
    align(
        teacher,
        supernet,
        batches,
        config_of(120),
        checkpoint=tmp_path / "align.safetensors",
        heldout_NT=heldout_NT,
        seed=3,
        progress=lambda done, total: calls.append((done, total)),
        say=lines.append,
    )
    metrics = supernet.meta["metrics"]
    losses = [loss for _, loss in metrics["losses"]]
    assert sum(losses[-10:]) < 0.95 * sum(losses[:10])
    assert metrics["error_mean"] < 0.9 * calibrated
    assert calls[0] == (0, 120)
    assert calls[-1] == (120, 120)
    assert supernet.meta["tokens"] == 120 * BATCH_TOKENS
    assert supernet.meta["seed"] == 3
    relative_LH = measure_twins(teacher, supernet, heldout_NT).relative_LH
    torch.testing.assert_close(torch.tensor(metrics["error_by_head"]), relative_LH)
    assert metrics["error_median"] == pytest.approx(float(relative_LH.median()))
    assert len(metrics["error_by_layer"]) == teacher.shape.num_layers
    assert not any(parameter.requires_grad for parameter in supernet.parameters())
    history = metrics["history"]
    assert history["tokens"][-1] == 120 * BATCH_TOKENS
    first, last = (torch.tensor(history["error_by_head"][row]) for row in (0, -1))
    assert first.shape == relative_LH.shape
    assert last.mean() < first.mean()
    assert len(lines) == len(history["tokens"]) // 4
    assert lines[-1].startswith(f"alignment at {120 * BATCH_TOKENS:,} tokens: median error ")


def counting(supernet: Supernet) -> list[int]:
    """How often each layer's twins run with gradients, counted from now on."""
    calls = [0] * len(supernet.twins)

    def count(layer: int) -> None:
        calls[layer] += torch.is_grad_enabled()

    for layer, twin in enumerate(supernet.twins):
        twin.register_forward_hook(lambda *_, layer=layer: count(layer))
    return calls


@pytest.mark.parametrize("all_rest", [True, False])
def test_a_layer_that_has_converged_costs_nothing(
    teacher: Teacher, batches: BatchSource, tmp_path: Path, all_rest: bool
) -> None:
    probe = Supernet.migrated(teacher, GdnConfig())
    calibrate(teacher, probe, next(batches(0)))
    start_L = measure_twins(teacher, probe, next(batches(0))).relative_LH.mean(1)
    supernet = Supernet.migrated(teacher, GdnConfig())
    calls = counting(supernet)
    aligned = align(
        teacher,
        supernet,
        batches,
        # Between what both layers start from, one of them is done at once.
        config_of(40, stop_below=9.0 if all_rest else float(start_L.mean())),
        checkpoint=tmp_path / "align.safetensors",
        heldout_NT=random_tokens(2, 48),
    )
    stopped = aligned.meta["metrics"]["history"]["stopped_tokens"]
    steps = [stopped.get(str(layer), 40 * BATCH_TOKENS) // BATCH_TOKENS for layer in range(2)]
    assert calls == steps
    if all_rest:
        assert steps == [2, 2]
    else:
        assert steps[int(start_L.argmin())] < min(40, steps[int(start_L.argmax())])


@pytest.mark.parametrize("stop_below", [None, 0.87])
def test_resumed_equals_uninterrupted(
    teacher: Teacher, batches: BatchSource, tmp_path: Path, stop_below: float | None
) -> None:
    results = []
    config = config_of(stop_below=stop_below)
    for name, stop in (("whole", None), ("early", 1), ("late", 7)):
        checkpoint = tmp_path / f"{name}.safetensors"
        arguments = {"checkpoint": checkpoint, "heldout_NT": random_tokens(2, 48)}
        if stop is not None:
            with pytest.raises(Interrupted):
                align(
                    teacher,
                    Supernet.migrated(teacher, GdnConfig()),
                    stopping(batches, stop),
                    config,
                    **arguments,
                )
            assert checkpoint.exists()
        supernet = Supernet.migrated(teacher, GdnConfig())
        results.append(align(teacher, supernet, batches, config, **arguments))
    whole, metrics = results[0].state_dict(), results[0].meta["metrics"]
    assert bool(metrics["history"]["stopped_tokens"]) == (stop_below is not None), metrics[
        "history"
    ]
    for resumed in results[1:]:
        for name, value in resumed.state_dict().items():
            assert torch.equal(value, whole[name]), name
        for name in ("error_by_head", "history"):
            assert resumed.meta["metrics"][name] == metrics[name]


def test_checkpoint_of_other_settings_is_refused(
    teacher: Teacher, batches: BatchSource, tmp_path: Path
) -> None:
    arguments = {"checkpoint": tmp_path / "align.safetensors", "heldout_NT": random_tokens(2, 48)}
    align(teacher, Supernet.migrated(teacher, GdnConfig()), batches, config_of(2), **arguments)
    with pytest.raises(ConfigError, match="other settings") as error:
        align(teacher, Supernet.migrated(teacher, GdnConfig()), batches, config_of(3), **arguments)
    assert str(error.value) == (
        f"checkpoint {arguments['checkpoint']}: was written with other settings (tokens {2 * BATCH_TOKENS}, "
        f"now {3 * BATCH_TOKENS}); delete it to start this stage anew"
    )


def test_a_checkpoint_of_an_earlier_version_is_refused_in_one_line(
    teacher: Teacher, batches: BatchSource, tmp_path: Path
) -> None:
    path = tmp_path / "align.safetensors"
    arguments = {"checkpoint": path, "heldout_NT": random_tokens(2, 48)}
    align(teacher, Supernet.migrated(teacher, GdnConfig()), batches, config_of(2), **arguments)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    identity = json.loads(metadata["identity"])
    # That version lacked two of today's settings, and had one that is no more.
    del identity["init"]["bias"], identity["stop_below"]
    identity |= {"threads": 4, "teacher": "x" * 99}
    save_file(load_file(path), path, {**metadata, "identity": json.dumps(identity)})
    with pytest.raises(ConfigError) as error:
        align(teacher, Supernet.migrated(teacher, GdnConfig()), batches, config_of(2), **arguments)
    bias = config_of(2).init.bias
    assert str(error.value) == (
        f'checkpoint {path}: was written with other settings (init.bias absent, now "{bias}"; '
        "stop_below absent, now null; other teacher; threads 4, now absent); delete it to start this stage anew"
    )


def test_damaged_checkpoint_is_named(
    teacher: Teacher, batches: BatchSource, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "align.safetensors"
    checkpoint.write_bytes(b"no such thing")
    with pytest.raises(EnvironmentFault, match=r"align\.safetensors"):
        align(
            teacher,
            Supernet.migrated(teacher, GdnConfig()),
            batches,
            config_of(2),
            checkpoint=checkpoint,
            heldout_NT=random_tokens(2, 48),
        )


def test_nan_is_an_error_and_never_saved(
    teacher: Teacher, batches: BatchSource, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "align.safetensors"
    config = config_of().model_copy(update={"learning_rate": 1e30})
    with pytest.raises(NonFiniteLoss, match="not finite"):
        align(
            teacher,
            Supernet.migrated(teacher, GdnConfig()),
            batches,
            config,
            checkpoint=checkpoint,
            heldout_NT=random_tokens(2, 48),
        )


def test_bf16_teacher_trains_fp32_twins(batches: BatchSource, tmp_path: Path) -> None:
    half = random_teacher("qwen3", num_layers=2)
    half = replace(half, model=half.model.to(torch.bfloat16))
    supernet = align(
        half,
        Supernet.migrated(half, GdnConfig()),
        batches,
        config_of(4),
        checkpoint=tmp_path / "align.safetensors",
        heldout_NT=random_tokens(2, 48),
    )
    assert all(parameter.dtype == torch.float32 for parameter in supernet.parameters())
    assert supernet.meta["metrics"]["error_median"] < 2
