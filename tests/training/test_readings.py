"""Readings of one run: each is what a run of its length alone gives, and a killed run goes on to the same ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from archsearch.attention.modeling_hydrahead import HydraHeadForCausalLM
from archsearch.config import DistillConfig
from archsearch.errors import ConfigError
from archsearch.headmap import HeadMap, Operator
from archsearch.models.cut import cut
from archsearch.models.teacher import Teacher
from archsearch.training.distill import distill
from archsearch.training.loop import BatchSource
from archsearch.training.readings import Reading, distill_with_readings
from tests.random_models import random_supernet
from tests.training.conftest import random_batches

BATCH = 384
CONFIG = DistillConfig(learning_rate=2e-3, batch_tokens=BATCH, decay_share=0.34, warmup_steps=2)
LENGTHS = [0, 4 * BATCH, 7 * BATCH, 12 * BATCH]


class Killed(Exception):
    """Stands for a kill."""


class Notebook:
    """A measure that keeps the weights it is shown."""

    def __init__(self, *, kill_at: int | None = None) -> None:
        self.kill_at = kill_at
        self.weights: dict[int, dict[str, Tensor]] = {}

    def __call__(self, student: HydraHeadForCausalLM, tokens: int) -> dict[str, float]:
        assert not student.training
        if tokens == self.kill_at:
            raise Killed
        state = {name: value.clone() for name, value in student.state_dict().items()}
        self.weights[tokens] = state
        return {"norm": float(sum(value.float().norm() for value in state.values()))}


def student_of(teacher: Teacher) -> HydraHeadForCausalLM:
    head_map = HeadMap.uniform(teacher.shape, Operator.GDN).with_operator([(0, 1)], Operator.FULL)
    return cut(teacher, random_supernet(teacher), head_map, copy=True)


def read(
    teacher: Teacher, batches: BatchSource, notebook: Notebook, **options: Any
) -> list[Reading]:
    arguments = {"readings": LENGTHS, "config": CONFIG} | options
    student = arguments.pop("student", None) or student_of(teacher)
    return distill_with_readings(student, teacher, batches, measure=notebook, **arguments)


def without_seconds(readings: list[Reading]) -> list[Reading]:
    return [replace(reading, seconds=0.0) for reading in readings]


def killed_before(batches: BatchSource, step: int) -> BatchSource:
    def source(start: int) -> Iterator[Tensor]:
        yield from itertools.islice(batches(start), max(0, step - start))
        raise Killed

    return source


def test_each_reading_is_a_run_of_that_length(teacher: Teacher, batches: BatchSource) -> None:
    notebook = Notebook()
    found = read(teacher, batches, notebook)
    assert [reading.tokens for reading in found] == LENGTHS
    assert found[0].loss is None
    for tokens in LENGTHS[1:]:
        alone = student_of(teacher)
        result = distill(alone, teacher, batches, tokens=tokens, config=CONFIG)
        for name, value in alone.state_dict().items():
            assert torch.equal(notebook.weights[tokens][name], value), (tokens, name)
        reading = next(one for one in found if one.tokens == tokens)
        assert reading.loss == pytest.approx(result.last_loss, rel=1e-6)
    start = student_of(teacher).state_dict()
    for name, value in start.items():
        assert torch.equal(notebook.weights[0][name], value), name


@pytest.fixture(scope="module")
def whole(teacher: Teacher) -> tuple[Notebook, list[Reading]]:
    """What a run that is never killed shows and returns."""
    notebook = Notebook()
    return notebook, read(teacher, random_batches, notebook)


@pytest.mark.parametrize("in_measure", [None, 7 * BATCH])
@pytest.mark.parametrize("step", [1, 5, 6, 10])
def test_a_killed_run_goes_on_to_the_same_readings(
    teacher: Teacher,
    batches: BatchSource,
    whole: tuple[Notebook, list[Reading]],
    tmp_path: Path,
    step: int,
    in_measure: int | None,
) -> None:
    notebook, expected = whole
    options = {"checkpoint": tmp_path / "run.safetensors", "save_seconds": 0.0}
    with pytest.raises(Killed):
        read(teacher, killed_before(batches, step), Notebook(kill_at=in_measure), **options)
    rest = Notebook()
    found = read(teacher, batches, rest, **options)
    assert without_seconds(found) == without_seconds(expected)
    for tokens, state in rest.weights.items():
        for name, value in state.items():
            assert torch.equal(notebook.weights[tokens][name], value), (tokens, name)
    # A third time nothing is left to do.
    assert read(teacher, batches, idle := Notebook(), **options) == found
    assert not idle.weights


def test_longer_readings_may_be_added_and_passed_ones_may_not(
    teacher: Teacher,
    batches: BatchSource,
    whole: tuple[Notebook, list[Reading]],
    tmp_path: Path,
) -> None:
    options = {"checkpoint": tmp_path / "run.safetensors"}
    read(teacher, batches, Notebook(), readings=LENGTHS[:3], **options)
    added = Notebook()
    found = read(teacher, batches, added, **options)
    assert list(added.weights) == LENGTHS[3:]
    assert without_seconds(found) == without_seconds(whole[1])
    with pytest.raises(ConfigError, match="a reading at 1920 tokens leaves at 3"):
        read(teacher, batches, Notebook(), readings=[4 * BATCH, 5 * BATCH], **options)


@pytest.mark.parametrize(
    "change",
    [
        {"config": CONFIG.model_copy(update={"learning_rate": 1e-3})},
        {"config": CONFIG.model_copy(update={"decay_share": 0.2})},
        {"readings": [2 * BATCH, 12 * BATCH]},
        {"batches": lambda step: (batch + 1 for batch in random_batches(step))},
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(
    teacher: Teacher, batches: BatchSource, tmp_path: Path, change: dict[str, Any]
) -> None:
    options = {"checkpoint": tmp_path / "run.safetensors"}
    read(teacher, batches, Notebook(), **options)
    source = change.pop("batches", batches)
    with pytest.raises(ConfigError, match="other settings"):
        read(teacher, source, Notebook(), **(options | change))


def test_a_checkpoint_of_another_start_is_refused(
    teacher: Teacher, batches: BatchSource, tmp_path: Path
) -> None:
    options = {"checkpoint": tmp_path / "run.safetensors", "readings": [4 * BATCH]}
    read(teacher, batches, Notebook(), **options)
    other = student_of(teacher)
    with torch.no_grad():
        other.model.layers[1].self_attn.gdn.gamma += 1e-3
    with pytest.raises(ConfigError, match="other settings"):
        read(teacher, batches, Notebook(), student=other, **options)


def test_a_checkpoint_of_another_student_or_other_data_is_refused(
    teacher: Teacher, batches: BatchSource, tmp_path: Path
) -> None:
    path = tmp_path / "trunk.safetensors"
    read(teacher, batches, Notebook(), readings=LENGTHS[:2], checkpoint=path, about="one")
    with pytest.raises(ConfigError, match="other settings"):
        read(teacher, batches, Notebook(), checkpoint=path, about="another")

    def later_differ(step: int) -> Iterator[Tensor]:
        return (ids.flip(0) if step + n else ids for n, ids in enumerate(batches(step)))

    with pytest.raises(ConfigError, match="other settings"):
        read(teacher, later_differ, Notebook(), checkpoint=path, about="one")
    student = student_of(teacher)
    student.config.fa = {**student.config.fa, "log_scale": True}
    with pytest.raises(ConfigError, match="other settings"):
        distill_with_readings(
            student,
            teacher,
            batches,
            measure=Notebook(),
            readings=LENGTHS,
            config=CONFIG,
            checkpoint=path,
            about="one",
        )


def test_what_changes_with_the_steps_goes_back_with_the_trunk(
    teacher: Teacher, batches: BatchSource
) -> None:
    seen: list[tuple[int, int]] = []
    read(
        teacher,
        batches,
        Notebook(),
        readings=LENGTHS[:3],
        before_step=lambda step, steps: seen.append((step, steps)),
    )
    assert {steps for _, steps in seen} == {7}
    order = [step for step, _ in seen]
    # The first fork leaves after 3 of 4 steps, the second after 5 of 7.
    collapsed = [step for step, _ in itertools.groupby(order)]
    assert collapsed == [0, 1, 2, 3, 4, 3, 4, 5, 6, 7, 5]


def test_readings_must_ascend_and_leave_a_trunk(teacher: Teacher, batches: BatchSource) -> None:
    for readings in ([], [BATCH, BATCH], [2 * BATCH, BATCH], [-1]):
        with pytest.raises(ValueError, match="ascend"):
            read(teacher, batches, Notebook(), readings=readings)
    with pytest.raises(ValueError, match="decay_share"):
        read(teacher, batches, Notebook(), config=CONFIG.model_copy(update={"decay_share": 1.0}))
