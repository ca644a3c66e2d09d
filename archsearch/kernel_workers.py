"""Child processes that answer jobs under a time limit: a hang, a crash or a poisoned GPU ends one of them and nothing else.

Jobs and answers are lines of JSON. Each child has a session of its own, so that what it started ends with it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

START_SECONDS = 120.0
"""Limit of a child's own start, which on a cold disk is mostly torch's import."""
LONGEST_WAIT_SECONDS = 3600.0
"""Of one look for an answer: a limit may be infinite, a look may not."""
KILL_SECONDS = 5.0
"""How long a killed child may take to be gone; one that a GPU driver holds is left behind."""


@dataclass(frozen=True)
class Answer:
    """What came of a job: a result, or else why there is none; late where the time was up."""

    result: dict[str, Any] | None = None
    fault: str = ""
    late: bool = False


class Workers:
    """A few threads with a child each. Work of a thread asks its child; both end with the context."""

    def __init__(self, command: Sequence[str], count: int) -> None:
        self._command = command
        self._executor = ThreadPoolExecutor(count, thread_name_prefix="worker")
        self._own = threading.local()
        self._lock = threading.Lock()
        self._children: set[_Child] = set()
        self._running: dict[object, tuple[str, float]] = {}
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._closed = True
            children = list(self._children)
        for child in children:
            child.signal()
        self._executor.shutdown(cancel_futures=True)
        for child in children:
            child.end()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Runs work on the next thread that is free."""
        return self._executor.submit(work)

    def ask(self, job: Mapping[str, Any], seconds: float, name: str) -> Answer:
        """Hands a job to the child of this thread, which must be one of submit's, and waits for the answer.

        seconds: limit of the job, its child's start apart. name: what `running` calls it.
        """
        mark = object()
        with self._lock:
            self._running[mark] = name, time.monotonic()
        try:
            child = self._child()
            answer, again = child.ask(job, seconds)
            if not again:
                self._drop(child)
            return answer
        finally:
            with self._lock:
                del self._running[mark]

    def running(self) -> list[tuple[str, float]]:
        """Each job that is being answered, and the seconds since it began."""
        now = time.monotonic()
        with self._lock:
            return [(name, now - start) for name, start in self._running.values()]

    def _child(self) -> _Child:
        child: _Child | None = getattr(self._own, "child", None)
        if child is None:
            with self._lock:
                if self._closed:
                    raise RuntimeError("no job after the end")
                child = self._own.child = _Child(self._command)
                self._children.add(child)
        return child

    def _drop(self, child: _Child) -> None:
        child.end()
        del self._own.child
        with self._lock:
            self._children.discard(child)


class _Child:
    def __init__(self, command: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end
        # What this process can import, in its order, the child can.
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            # Threads that spin while they wait would slow the other children down.
            env={"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | {"PYTHONPATH": path},
            start_new_session=True,
            bufsize=0,
        )
        self._unread = bytearray()
        self._is_ready = False

    def ask(self, job: Mapping[str, Any], seconds: float) -> tuple[Answer, bool]:
        """The answer, and whether the child can be asked again."""
        if not self._is_ready:
            if (fault := self._read(START_SECONDS)[1]) is not None:
                return fault, False
            self._is_ready = True
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # a child that died says so when it is read
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
        line, fault = self._read(seconds)
        if fault is not None:
            return fault, False
        found = json.loads(line)
        return Answer(found["result"], found["fault"]), found["again"]

    def _read(self, seconds: float) -> tuple[bytes, Answer | None]:
        """The next line, or what stands for it where none comes."""
        assert self._process.stdout is not None
        stream, end = self._process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self._unread:
            left = end - time.monotonic()
            if left <= 0:
                return b"", Answer(late=True)
            if not select.select([stream], [], [], min(left, LONGEST_WAIT_SECONDS))[0]:
                continue
            some = os.read(stream, 1 << 16)
            if not some:
                return b"", Answer(fault=self._last_words())
            self._unread += some
        line, _, rest = self._unread.partition(b"\n")
        self._unread = bytearray(rest)
        return bytes(line), None

    def _last_words(self) -> str:
        """How it died, and the last line that it wrote."""
        self.signal()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_SECONDS)
        status = self._process.returncode or 0
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return f"ended {how}{f': {said[-1]}' if said else ''}"

    def signal(self) -> None:
        """Kills it and what it started."""
        # Once it has been waited for, its number may be another's.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kills it, and waits until it is gone."""
        self.signal()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_SECONDS)
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()
