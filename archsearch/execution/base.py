"""What every executor offers: tasks in, outcomes out, in any order. Knows nothing of search.

A worker is built once from a plain payload and then called with one plain spec a task. Workers live in
other processes where the executor says so, hence make_worker must be importable by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Worker = Callable[[Any], Any]
MakeWorker = Callable[[dict[str, Any]], Worker]
Payload = Mapping[str, Any]

WORKER_DIED = "worker died"
HOST_MEMORY = "host out of memory"
DEVICE_MEMORY = "out of memory"


@dataclass(frozen=True)
class Outcome:
    """What became of one task: the worker's result, or in error the reason that there is none."""

    task_id: int
    result: Any = None
    error: str | None = None


class Executor(Protocol):
    """Runs tasks on workers. One thread of the driver uses it."""

    @property
    def capacity(self) -> int:
        """Tasks that can run at the same time."""
        ...

    def submit(self, task_id: int, spec: Any) -> None:
        """Queues a task; the caller keeps at most `capacity` of them open."""
        ...

    def next_done(self) -> Outcome:
        """Waits for any open task. Raises RuntimeError where none is open.

        A worker's exception, or its death, is an Outcome with an error and never raised; the executor
        is as able to work afterwards as before.
        """
        ...

    def shutdown(self) -> None:
        """Ends all workers, with or without open tasks. Calling it again does nothing."""
        ...


def describe(error: BaseException) -> str:
    """One line for an exception: out-of-memory by its label, anything else by its type and message."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return f"{HOST_MEMORY}: {text}".removesuffix(": ")
    if type(error).__name__ == "OutOfMemoryError":
        return f"{DEVICE_MEMORY}: {text}".removesuffix(": ")
    return f"{type(error).__name__}: {text}".removesuffix(": ")
