"""How long work reports where it is: one callback type for the whole package."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called now and then with the units done so far and their total, done rising to total."""

    def __call__(self, done: int, total: int) -> None: ...


def ignore_progress(done: int, total: int) -> None:
    """The Progress of a caller that wants none."""
