"""Where the seconds of a search go that are its own: proposals, and writing trials down."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..rundir import RunDir
from ..search.study import RungStudy
from .stand_in import Settings, search

WRITES = ("begin", "note", "note_violations", "end", "remember")
"""Methods of RungStudy through which a search writes."""


@contextmanager
def timed_calls(
    owner: type, names: Sequence[str], clock: Callable[[], float] = time.perf_counter
) -> Iterator[list[float]]:
    """The seconds by that clock of every call of these methods while it is entered, in their order."""
    seconds: list[float] = []
    real = {name: getattr(owner, name) for name in names}

    def timed(method: Any) -> Any:
        def wrapped(*given: Any, **options: Any) -> Any:
            began = clock()
            try:
                return method(*given, **options)
            finally:
                seconds.append(clock() - began)

        return wrapped

    for name, method in real.items():
        setattr(owner, name, timed(method))
    try:
        yield seconds
    finally:
        for name, method in real.items():
            setattr(owner, name, method)


def storage_seconds(run_dir: RunDir, settings: Settings) -> list[float]:
    """Seconds of all writes of each trial of a search in this process, in the order in which trials end."""
    trials: list[float] = []
    with timed_calls(RungStudy, WRITES) as seconds:

        def ended(done: int, total: int) -> None:
            trials.append(sum(seconds))
            seconds.clear()

        search(run_dir, settings, say=lambda line: None, progress=ended)
    return trials
