"""What every executor offers: tasks in, outcomes out, in any order. Knows nothing of search.

A worker is built once from a plain payload and then called with one plain spec a task. Workers live in
other processes where the executor says so, hence make_worker must be importable by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import ArchsearchError, ConfigError, EnvironmentFault

Worker = Callable[[Any], Any]
MakeWorker = Callable[[dict[str, Any]], Worker]
Payload = Mapping[str, Any]

WORKER_DIED = "worker died"
HOST_MEMORY = "host out of memory"
DEVICE_MEMORY = "out of memory"

_NO_DEVICE_MEMORY = ("CUDA error: out of memory", "_ALLOC_FAILED")
_BROKEN_DEVICE = ("illegal memory access", "device-side assert", "misaligned address")
"""Errors after which a process can use its GPU no more, though what came before may have caused them."""
_OUTSIDE = (
    "CUDA error",
    "CUDA driver error",
    "No space left on device",
    "StorageFull",
    "Disk quota",
)
"""Within messages of a RuntimeError or a package's own: what no task is to blame for."""


@dataclass(frozen=True)
class Outcome:
    """What became of one task: the worker's result, or in error the reason that there is none."""

    task_id: int
    result: Any = None
    error: str | None = None
    fault: type[ArchsearchError] | None = None
    """Where the task is not to blame for the error, and any other would have failed too: how the run has to end."""


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
    """One line for an exception: out-of-memory by its label, a fault that is known by its message, anything else by its
    type and message."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return f"{HOST_MEMORY}: {text}".removesuffix(": ")
    if type(error).__name__ == "OutOfMemoryError" or _names(error, _NO_DEVICE_MEMORY):
        return f"{DEVICE_MEMORY}: {text}".removesuffix(": ")
    if isinstance(error, ArchsearchError):
        return text
    return f"{type(error).__name__}: {text}".removesuffix(": ")


def blame(error: BaseException) -> type[ArchsearchError] | None:
    """What the run ends with where an exception is no fault of its task: the config's, or the machine's.

    A file that is not there, a full disk, a package or a GPU that is gone; too little memory is the task's own.
    """
    if isinstance(error, ConfigError):
        return ConfigError
    if isinstance(error, EnvironmentFault | OSError | ImportError):
        return EnvironmentFault
    if _names(error, _OUTSIDE) and not _names(error, _NO_DEVICE_MEMORY):
        return EnvironmentFault
    return None


def breaks_device(error: BaseException) -> bool:
    """Whether no other task can use the GPU in this process; another process can."""
    return _names(error, _BROKEN_DEVICE)


def _names(error: BaseException, causes: tuple[str, ...]) -> bool:
    return any(cause in str(error) for cause in causes)
