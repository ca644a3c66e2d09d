"""Kept trainings: as distill and tune_long_context without a keeper, to the bit, and after a kill as if there had been none."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from archsearch.attention.modeling_hydrahead import HydraHeadForCausalLM
from archsearch.config import DistillConfig, LongContextConfig
from archsearch.errors import ConfigError
from archsearch.headmap import HeadMap
from archsearch.models.cut import cut
from archsearch.models.full_heads import FullBranch, rope_fader
from archsearch.models.teacher import Teacher
from archsearch.studentconfig import FullConfig
from archsearch.training.distill import distill
from archsearch.training.kept import Keeper, distill_kept
from archsearch.training.longcontext import tune_long_context
from archsearch.training.loop import BatchSource
from tests.random_models import random_supernet
from tests.training.conftest import random_batches

BATCH = 8 * 48
CONFIG = DistillConfig(learning_rate=3e-3, batch_tokens=BATCH)
LONG = LongContextConfig(
    tokens=6 * BATCH, sequence_length=48, batch_tokens=BATCH, learning_rate=3e-3, warmup_steps=2
)
FULL = FullConfig(rope=False, rope_fade_tokens=5 * BATCH, gate=True)


class Killed(Exception):
    """Stands for a kill."""


def student_of(teacher: Teacher) -> HydraHeadForCausalLM:
    head_map = HeadMap(teacher.shape, ("FGGF", "GFGG"))
    full = FullBranch(FULL)
    return cut(teacher, random_supernet(teacher), head_map, copy=True, full=full)


def killed_before(step: int) -> BatchSource:
    def source(start: int) -> Iterator[Tensor]:
        yield from itertools.islice(random_batches(start), max(0, step - start))
        raise Killed

    return source


def train(
    teacher: Teacher, keeper: Keeper, batches: BatchSource, config: DistillConfig = CONFIG
) -> HydraHeadForCausalLM:
    """Both trainings, one after the other, each with a file of its own."""
    student = student_of(teacher)
    fade = rope_fader(student, FULL, BATCH)
    distill_kept(
        student, teacher, batches, keeper, tokens=8 * BATCH, config=config, before_step=fade
    )
    own = replace(keeper, path=keeper.path.with_suffix(".long"))
    tune_long_context(student, teacher, batches, LONG, keeper=own)
    return student


def weights(student: HydraHeadForCausalLM) -> dict[str, Tensor]:
    assert not student.training
    return {name: value.clone() for name, value in student.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(value.equal(other[name]) for name, value in one.items())


@pytest.mark.parametrize("form", ["hidden", "mean_row", "topk"])
@pytest.mark.parametrize("decay_share", [1.0, 0.4])
def test_kept_is_as_distil(teacher: Teacher, tmp_path: Path, form: str, decay_share: float) -> None:
    options = {"teacher_logits": form, "decay_share": decay_share, "top_k": 9}
    config = DistillConfig.model_validate(CONFIG.model_dump() | options)
    plain, kept = student_of(teacher), student_of(teacher)
    first = distill(
        plain,
        teacher,
        random_batches,
        tokens=8 * BATCH,
        config=config,
        before_step=rope_fader(plain, FULL, BATCH),
    )
    second = distill_kept(
        kept,
        teacher,
        random_batches,
        Keeper(tmp_path / "kept", {}),
        tokens=8 * BATCH,
        config=config,
        before_step=rope_fader(kept, FULL, BATCH),
    )
    assert (second.tokens, second.steps) == (first.tokens, first.steps) == (8 * BATCH, 8)
    assert kept.config.fa == plain.config.fa
    for name, value in weights(kept).items():
        # What is kept as an expected row is rounded apart.
        close = torch.allclose(value, plain.state_dict()[name], rtol=0, atol=1e-5)
        assert close if form == "mean_row" else value.equal(plain.state_dict()[name]), name
    assert not same(weights(kept), weights(student_of(teacher).eval()))


def test_a_kill_at_any_step_changes_nothing(teacher: Teacher, tmp_path: Path) -> None:
    whole = weights(train(teacher, Keeper(tmp_path / "whole", {}), random_batches))
    for step in (1, 5, 7):
        keeper = Keeper(tmp_path / f"killed{step}", {}, seconds=0.0)
        with pytest.raises(Killed):
            train(teacher, keeper, killed_before(step))
        assert keeper.path.exists()
        # The second time while tuning, if the kill leaves the distillation its end.
        assert same(weights(train(teacher, keeper, random_batches)), whole), step
    keeper = Keeper(tmp_path / "tuned", {}, seconds=0.0)
    student = student_of(teacher)
    fade = rope_fader(student, FULL, BATCH)
    distill_kept(
        student, teacher, random_batches, keeper, tokens=8 * BATCH, config=CONFIG, before_step=fade
    )
    own = replace(keeper, path=keeper.path.with_suffix(".long"))
    with pytest.raises(Killed):
        tune_long_context(student, teacher, killed_before(3), LONG, keeper=own)
    assert same(weights(train(teacher, keeper, random_batches)), whole)


def test_what_is_over_is_not_trained_again(teacher: Teacher, tmp_path: Path) -> None:
    keeper = Keeper(tmp_path / "kept", {})
    whole = train(teacher, keeper, random_batches)
    times = [path.stat().st_mtime_ns for path in tmp_path.iterdir()]
    student = student_of(teacher)
    found = distill_kept(
        student,
        teacher,
        killed_before(1),
        keeper,
        tokens=8 * BATCH,
        config=CONFIG,
        before_step=rope_fader(student, FULL, BATCH),
    )
    assert found.steps == 8
    assert student.config.fa["rope_share"] == 0.0
    tuned = tune_long_context(
        student,
        teacher,
        killed_before(1),
        LONG,
        keeper=replace(keeper, path=keeper.path.with_suffix(".long")),
    )
    assert tuned.steps == 6
    assert same(weights(student), weights(whole))
    assert [path.stat().st_mtime_ns for path in tmp_path.iterdir()] == times


def test_other_settings_data_and_starts_are_refused(teacher: Teacher, tmp_path: Path) -> None:
    keeper = Keeper(tmp_path / "kept", {"rate": 1})

    def distil(keeper: Keeper, source: BatchSource, tokens: int, moved: float = 0.0) -> None:
        student = student_of(teacher)
        with torch.no_grad():
            student.model.layers[1].self_attn.o_proj.weight.add_(moved)
        distill_kept(student, teacher, source, keeper, tokens=tokens, config=CONFIG)

    distil(keeper, random_batches, BATCH)
    distil(keeper, random_batches, BATCH)
    with pytest.raises(ConfigError, match=r"other settings \(rate 1, now 2\)"):
        distil(replace(keeper, about={"rate": 2}), random_batches, BATCH)
    with pytest.raises(ConfigError, match=r"steps 1, now 2"):
        distil(keeper, random_batches, 2 * BATCH)
    with pytest.raises(ConfigError, match="start"):
        distil(keeper, lambda step: random_batches(step + 1), BATCH)
    with pytest.raises(ConfigError, match="start"):
        distil(keeper, random_batches, BATCH, moved=0.5)
