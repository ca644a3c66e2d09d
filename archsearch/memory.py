"""Host memory of a run: this process and all that it started."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

import psutil


class MemoryWatch:
    """Samples tree_bytes in a thread while it is entered, and keeps the peak."""

    def __init__(self, interval_seconds: float = 1.0) -> None:
        self._interval = interval_seconds
        self._peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def take_peak(self) -> int:
        """The peak in bytes since the last call; the next period starts here."""
        peak, self._peak = max(self._peak, tree_bytes()), 0
        return peak

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            self._peak = max(self._peak, tree_bytes())


def tree_bytes() -> int:
    """Host memory in bytes of this process and its descendants now.

    Proportional set sizes where the system tells them, so that pages shared by workers count once;
    resident sizes elsewhere.
    """
    this = psutil.Process()
    return sum(_process_bytes(process) for process in [this, *this.children(recursive=True)])


def _process_bytes(process: psutil.Process) -> int:
    try:
        for row in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if row.startswith("Pss:"):
                return int(row.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
