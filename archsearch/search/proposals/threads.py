"""One thread for the linear algebra of a proposal.

Its matrices are small: a second thread gains little, and where workers need the cores, each product waits until both
threads have one (five times as long in all). Sums also round alike then on machines with any number of cores.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

NAMES = ("scipy_openblas_{}_num_threads64_", "scipy_openblas_{}_num_threads")
"""What the OpenBLAS of numpy's wheels calls its functions that "get" and "set" threads, with wide integers and without."""


@cache
def openblas() -> tuple[Callable[[], Any], Callable[[int], Any]] | None:
    """The functions that get and set the threads of numpy's own OpenBLAS; None where numpy uses another library."""
    wheel = Path(np.__file__).parents[1] / "numpy.libs"
    for path in sorted(wheel.glob("*openblas*")):
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        for name in NAMES:
            if hasattr(library, name.format("set")):
                return getattr(library, name.format("get")), getattr(library, name.format("set"))
    return None


@contextmanager
def one_thread() -> Iterator[None]:
    """While it is entered, numpy's OpenBLAS works in the thread that calls it; nothing else changes."""
    if (found := openblas()) is None:
        yield
        return
    get, set_threads = found
    before = get()
    set_threads(1)
    try:
        yield
    finally:
        set_threads(before)
