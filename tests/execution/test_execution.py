"""The contract of every executor, and what only Ray's processes can suffer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from archsearch.config import ExecutionConfig
from archsearch.errors import ConfigError, EnvironmentFault
from archsearch.execution.base import Executor, Outcome, blame, describe
from archsearch.execution.choice import EXECUTORS, open_executor
from archsearch.execution.ray_executor import RayExecutor
from archsearch.execution.serial import SerialExecutor
from tests.execution.workers import Calculator

PAYLOAD = {"offset": 10}


@pytest.fixture(params=["serial", pytest.param("ray", marks=pytest.mark.ray)])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    if request.param == "ray":
        request.getfixturevalue("shared_ray")
        opened: Executor = RayExecutor(Calculator, PAYLOAD, workers=2, threads=1)
    else:
        opened = SerialExecutor(Calculator, PAYLOAD)
    yield opened
    opened.shutdown()


def test_every_task_comes_back_once(executor: Executor) -> None:
    results, waiting = {}, list(range(5))
    num_open = 0
    while waiting or num_open:
        while waiting and num_open < executor.capacity:
            task = waiting.pop()
            executor.submit(task, task)
            num_open += 1
        outcome = executor.next_done()
        assert outcome.error is None
        results[outcome.task_id] = outcome.result
        num_open -= 1
    assert results == {task: task + 10 for task in range(5)}


def test_an_exception_is_an_outcome_and_the_worker_lives_on(executor: Executor) -> None:
    executor.submit(1, "raise")
    assert executor.next_done().error == "ValueError: a bad spec"
    executor.submit(2, "memory")
    assert executor.next_done().error == "host out of memory"
    executor.submit(3, 1)
    assert executor.next_done().result == 11


def test_what_no_task_is_to_blame_for_is_told_apart(executor: Executor) -> None:
    executor.submit(1, "gone")
    gone = executor.next_done()
    assert gone.fault is EnvironmentFault
    assert "train.npy" in str(gone.error)
    executor.submit(2, "config")
    assert executor.next_done() == Outcome(2, None, "harness.tasks: no such task", ConfigError)
    for task, spec in ((3, "raise"), (4, "memory")):
        executor.submit(task, spec)
        assert executor.next_done().fault is None


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (OSError(28, "No space left on device"), EnvironmentFault),
        (
            RuntimeError("Error while serializing: I/O error: No space left on device"),
            EnvironmentFault,
        ),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), EnvironmentFault),
        (ModuleNotFoundError("No module named 'lm_eval'"), EnvironmentFault),
        (RuntimeError("CUDA error: out of memory"), None),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), None),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (ValueError("broken"), None),
    ],
)
def test_who_is_to_blame(error: Exception, fault: type[Exception] | None) -> None:
    assert blame(error) is fault
    if fault is None and "CUDA" in str(error):
        assert describe(error).startswith("out of memory: ")


def test_ray_replaces_a_worker_whose_gpu_is_of_no_more_use(shared_ray: None) -> None:
    executor = RayExecutor(Calculator, PAYLOAD, workers=1, threads=1)
    before = executor.pids()
    executor.submit(1, "device")
    outcome = executor.next_done()
    assert outcome.fault is None
    assert str(outcome.error).startswith("worker died: RuntimeError: CUDA error: an illegal")
    assert executor.pids() != before
    executor.shutdown()


def test_waiting_for_nothing_is_an_error(executor: Executor) -> None:
    with pytest.raises(RuntimeError, match="no task is open"):
        executor.next_done()


def test_shutdown_twice_is_quiet(executor: Executor) -> None:
    executor.submit(1, 1)
    executor.shutdown()
    executor.shutdown()


def test_ray_replaces_a_worker_that_was_killed(shared_ray: None) -> None:
    executor = RayExecutor(Calculator, PAYLOAD, workers=1, threads=1)
    before = executor.pids()
    executor.submit(7, "die")
    outcome = executor.next_done()
    assert (outcome.task_id, outcome.error) == (7, "worker died")
    assert executor.pids() != before
    # A worker may die between two tasks as well.
    os.kill(executor.pids()[0], signal.SIGKILL)
    executor.submit(8, 1)
    assert executor.next_done().error in (None, "worker died")
    executor.submit(9, "calls")
    assert executor.next_done().result == {"calls": 1, "threads": "1"}
    executor.shutdown()


def test_ray_names_the_reason_that_a_worker_cannot_start(shared_ray: None) -> None:
    with pytest.raises(EnvironmentFault, match="no such model"):
        RayExecutor(Calculator, {"broken": True}, threads=1)


def test_ray_refuses_gpus_that_do_not_exist(shared_ray: None) -> None:
    with pytest.raises(
        EnvironmentFault, match=r"3 workers with 40 GPUs each do not fit on \d+ GPU"
    ):
        RayExecutor(Calculator, PAYLOAD, workers=3, gpus_per_worker=40, threads=1)


def test_every_executor_of_the_config_can_be_opened() -> None:
    names = ExecutionConfig.model_fields["executor"].annotation.__args__  # type: ignore[union-attr]
    assert set(EXECUTORS) == set(names)
    serial = open_executor(ExecutionConfig(executor="serial"), Calculator, PAYLOAD)
    assert serial.capacity == 1
