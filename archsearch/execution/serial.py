"""Runs tasks one after the other in this process: for debugging, and where one worker is enough."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from .base import MakeWorker, Outcome, Payload, blame, describe

_log = logging.getLogger(__name__)


class SerialExecutor:
    """One worker in the driver's own process. A task runs when its outcome is asked for."""

    def __init__(self, make_worker: MakeWorker, payload: Payload) -> None:
        self._worker = make_worker(dict(payload))
        self._tasks: deque[tuple[int, Any]] = deque()

    @property
    def capacity(self) -> int:
        """Always one."""
        return 1

    def submit(self, task_id: int, spec: Any) -> None:
        """Queues a task."""
        self._tasks.append((task_id, spec))

    def next_done(self) -> Outcome:
        """Runs the oldest task. Raises RuntimeError where none is open."""
        if not self._tasks:
            raise RuntimeError("no task is open")
        task_id, spec = self._tasks.popleft()
        try:
            return Outcome(task_id, self._worker(spec))
        except Exception as error:
            _log.debug("task %d failed", task_id, exc_info=True)
            return Outcome(task_id, error=describe(error), fault=blame(error))

    def shutdown(self) -> None:
        """Drops the open tasks."""
        self._tasks.clear()
