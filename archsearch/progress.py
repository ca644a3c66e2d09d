"""How long work reports where it is: one callback type for the whole package, and what a search shows beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Progress(Protocol):
    """Called now and then with the units done so far and their total, done rising to total."""

    def __call__(self, done: int, total: int) -> None: ...


class Watch(Protocol):
    """Shows what the units of a Progress are, and what they have come to."""

    def begin(self, part: str) -> None:
        """The next units are those of this part, counted from zero."""
        ...

    def tell(self, said: Callable[[], str], ends: float | None = None) -> None:
        """Has the part's lines say this too, asked for when one is shown. ends: when a limit ends it, by time.monotonic."""
        ...


def ignore_progress(done: int, total: int) -> None:
    """The Progress of a caller that wants none."""


class Unwatched:
    """The Watch of a caller that wants none."""

    def begin(self, part: str) -> None:
        """Nothing."""

    def tell(self, said: Callable[[], str], ends: float | None = None) -> None:
        """Nothing."""
