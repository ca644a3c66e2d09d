"""What it costs to write the trials of a search down."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..rundir import RunDir
from ..search.study import RungStudy
from .stand_in import Settings, search

WRITES = ("begin", "note", "note_violations", "end", "remember")
"""Methods of RungStudy through which a search writes."""


@contextmanager
def timed_writes() -> Iterator[list[float]]:
    """The seconds of every write of any study while it is entered, in their order."""
    seconds: list[float] = []
    real = {name: getattr(RungStudy, name) for name in WRITES}

    def timed(write: Any) -> Any:
        def wrapped(*given: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return write(*given, **options)
            finally:
                seconds.append(time.perf_counter() - began)

        return wrapped

    for name, write in real.items():
        setattr(RungStudy, name, timed(write))
    try:
        yield seconds
    finally:
        for name, write in real.items():
            setattr(RungStudy, name, write)


def storage_seconds(run_dir: RunDir, settings: Settings) -> list[float]:
    """Seconds of all writes of each trial of a search in this process, in the order in which trials end."""
    trials: list[float] = []
    with timed_writes() as seconds:

        def ended(done: int, total: int) -> None:
            trials.append(sum(seconds))
            seconds.clear()

        search(run_dir, settings, say=lambda line: None, progress=ended)
    return trials
