"""A study's maps are trained once each, by turns, whatever fails or ends early."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from archsearch.errors import EnvironmentFault
from archsearch.execution.serial import SerialExecutor
from archsearch.fidelity.driver import CHECKPOINT_SECONDS, Driver, Task, tasks_of
from archsearch.fidelity.records import LongSpec, Run, Study
from archsearch.headmap import HeadMap

from .studies import made_run, made_study

Faults = dict[str, list[str]]
"""Errors of the first tries, by a map's digest."""


class Worker:
    """Makes up runs, and fails as it is told."""

    def __init__(self, faults: Faults | None = None, seconds: float = 12.0) -> None:
        self.calls: list[LongSpec] = []
        self._faults, self._seconds = faults or {}, seconds

    def __call__(self, spec: LongSpec) -> Run:
        self.calls.append(spec)
        head_map = HeadMap.from_json(spec.head_map)
        left = self._faults.get(head_map.digest, [])
        if left:
            raise RuntimeError(left.pop(0))
        if spec.checkpoint is not None:
            Path(spec.checkpoint).write_text("kept")
        return replace(made_run(head_map, 1.0, Random(0)), seconds=self._seconds)

    def names(self) -> list[tuple[str, int]]:
        return [(HeadMap.from_json(spec.head_map).digest, spec.seed) for spec in self.calls]


@pytest.fixture
def study() -> Study:
    return replace(made_study(good=6, mixed=3), runs={})


def driver(study: Study, worker: Worker, folder: Path, **options: Any) -> Driver:
    arguments: dict[str, Any] = {"save": lambda _: None, "say": lambda _: None, "seconds": 5.0}
    executor = SerialExecutor(lambda _: worker, {})
    return Driver(study, executor, folder / "kept", **(arguments | options))


def test_both_groups_come_by_turns_and_repeats_last(study: Study) -> None:
    tasks = tasks_of(study.subjects, 4)
    maps = [s.head_map for s in study.subjects]
    assert [task.head_map for task in tasks[:9]] == [
        maps[place] for place in (0, 1, 6, 2, 3, 7, 4, 5, 8)
    ]
    assert [task.seed for task in tasks] == [0] * 9 + [1] * 4
    assert [task.head_map for task in tasks[9:]] == [task.head_map for task in tasks[:4]]
    good = [s for s in study.subjects if s.group == "good"]
    assert [task.head_map for task in tasks_of(good, 0)] == maps[:6]
    assert [task.head_map for task in tasks_of(study.subjects[6:], 0)] == maps[6:]


def test_every_map_is_trained_once_and_saved_at_once(study: Study, tmp_path: Path) -> None:
    worker, saved = Worker(), list[int]()
    tasks = tasks_of(study.subjects, 2)
    made = driver(study, worker, tmp_path, save=lambda found: saved.append(len(found.runs)))
    after = made.train(tasks)
    assert Counter(worker.names()) == Counter((t.head_map.digest, t.seed) for t in tasks)
    assert saved == list(range(1, 12))
    assert set(after.runs) == {task.key for task in tasks}
    assert not driver(after, idle := Worker(), tmp_path).train(tasks).failures
    assert not idle.calls


def test_a_killed_call_goes_on_without_its_finished_maps(study: Study, tmp_path: Path) -> None:
    tasks = tasks_of(study.subjects, 1)
    kept: list[Study] = []

    def save(found: Study) -> None:
        kept.append(found)
        if len(kept) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        driver(study, first := Worker(), tmp_path, save=save).train(tasks)
    rest = Worker()
    driver(kept[-1], rest, tmp_path).train(tasks)
    assert sorted(first.names() + rest.names()) == sorted(
        (t.head_map.digest, t.seed) for t in tasks
    )


def failing(study: Study, errors: list[str]) -> Faults:
    return {study.subjects[1].head_map.digest: errors}


def test_a_map_that_fails_is_tried_once_more_after_the_others(study: Study, tmp_path: Path) -> None:
    worker, said = Worker(failing(study, ["worker died"])), list[str]()
    after = driver(study, worker, tmp_path, say=said.append).train(tasks_of(study.subjects, 0))
    assert len(after.runs) == 9
    assert worker.names().count((study.subjects[1].head_map.digest, 0)) == 2
    assert worker.names()[-1] == (study.subjects[1].head_map.digest, 0)
    assert any("it is tried again" in line for line in said)


@pytest.mark.parametrize(("error", "tries"), [("broken", 2), ("NonFiniteLoss: step 3", 1)])
def test_a_map_that_keeps_failing_is_written_down(
    study: Study, tmp_path: Path, error: str, tries: int
) -> None:
    worker = Worker(failing(study, [error] * 2))
    after = driver(study, worker, tmp_path).train(tasks_of(study.subjects, 0))
    key = (study.subjects[1].head_map.layers, 0)
    assert set(after.failures) == {key}
    assert error in after.failures[key]
    assert len(worker.calls) == 8 + tries
    again = Worker()
    mended = driver(after, again, tmp_path).train(tasks_of(study.subjects, 0))
    assert not mended.failures
    assert len(again.calls) == 1


def test_a_file_that_is_gone_is_no_maps_fault(study: Study, tmp_path: Path) -> None:
    class Losing(Worker):
        def __call__(self, spec: LongSpec) -> Run:
            raise FileNotFoundError(2, "No such file or directory", "train.npy")

    lost = driver(study, Losing(), tmp_path)
    with pytest.raises(EnvironmentFault, match=r"train\.npy.*; the same command goes on from here"):
        lost.train(tasks_of(study.subjects, 0))
    assert not lost.study.failures


def test_no_map_is_begun_that_would_not_end_in_time(study: Study, tmp_path: Path) -> None:
    worker = Worker(seconds=1e6)
    made = driver(study, worker, tmp_path, deadline=time.monotonic() + 1000)
    made.train(tasks_of(study.subjects, 0))
    assert (len(worker.calls), made.left) == (1, 8)
    late = driver(made.study, idle := Worker(), tmp_path, deadline=time.monotonic() + 1)
    late.train(tasks_of(study.subjects, 0))
    assert (len(idle.calls), late.left) == (0, 8)


@pytest.mark.parametrize("seconds", [CHECKPOINT_SECONDS / 2, CHECKPOINT_SECONDS * 2])
def test_only_long_training_is_kept_on_the_way(
    study: Study, tmp_path: Path, seconds: float
) -> None:
    worker = Worker(seconds=seconds)
    task = Task(study.subjects[0].head_map)
    made = driver(study, worker, tmp_path, seconds=seconds)
    made.train([task])
    (call,) = worker.calls
    assert (call.checkpoint is not None) == (seconds > CHECKPOINT_SECONDS)
    assert not list((tmp_path / "kept").iterdir()), "what is written down needs no checkpoint"


def test_a_checkpoint_that_is_there_is_gone_on_from(study: Study, tmp_path: Path) -> None:
    task = Task(study.subjects[0].head_map)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / f"{task.name}.safetensors").write_text("half way")
    driver(study, worker := Worker(), tmp_path).train([task])
    assert worker.calls[0].checkpoint is not None


def test_lines_tell_the_rate_and_the_time_left(study: Study, tmp_path: Path) -> None:
    said: list[str] = []
    counted: list[tuple[int, int]] = []
    count: Callable[[int, int], None] = lambda done, total: counted.append((done, total))  # noqa: E731
    driver(study, Worker(), tmp_path, say=said.append, progress=count).train(
        tasks_of(study.subjects, 1)
    )
    assert len(said) == 10
    assert said[0].startswith("  map 1 of 10: kl 1.0000 after 1,000 tokens, 12 s; ")
    assert "tokens/s" in said[0]
    assert "min left" in said[0]
    assert said[-1] == "  map 10 of 10 again: kl 1.0000 after 1,000 tokens, 12 s"
    assert counted == [(number, 10) for number in range(1, 11)]
