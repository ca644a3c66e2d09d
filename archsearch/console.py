"""What a run prints: one line a stage, a bar while it works on a terminal, sparse plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

PLAIN_SECONDS = 20.0
"""Time between the progress lines of one stage where there is no terminal."""

WAITING_SECONDS = 10.0
"""The same where a command does nothing but wait."""


class StageProgress:
    """One running stage. It is a progress callback: call it with (done, total) as work goes on."""

    def __init__(self, name: str, console: Console, *, bar: Progress | None) -> None:
        self.name = name
        self.summary = ""
        """What the stage's closing line says; set by whoever runs the stage."""
        self.seconds = 0.0
        self._console = console
        self._bar = bar
        self._task = bar.add_task(name, total=None, rate="", ends=None) if bar is not None else None
        self._part = ""
        self._unit, self._each = "", 1
        self._tells: Callable[[], str] | None = None
        self._ends: float | None = None
        self._first: tuple[int, float] | None = None
        self._start = self._said = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Shows that `done` of `total` units are finished."""
        now = time.monotonic()
        if self._first is None:
            self._first = (done, now)
        if self._bar is not None and self._task is not None:
            notes = [note for note in (self._rate(done, now), self._told()) if note]
            self._bar.update(self._task, completed=done, total=total, rate=", ".join(notes))
            return
        if now - self._said >= PLAIN_SECONDS:
            self._said = now
            unit = f" {self._unit}" if self._unit else ""
            self.line(
                f"  {self.name}: {self._part}{done * self._each:,} of {total * self._each:,}{unit} "
                f"({done / max(total, 1):.0%}){self._pace(done, total, now)}"
            )

    def begin(self, part: str) -> None:
        """Says which part of the stage the next calls count, each part from zero."""
        self._part, self._first = f"{part} ", None
        self._tells = self._ends = None
        if self._bar is not None and self._task is not None:
            self._bar.reset(
                self._task, total=None, description=f"{self.name} {part}", rate="", ends=None
            )

    def tell(self, said: Callable[[], str], ends: float | None = None) -> None:
        """Has the part's lines say this too, asked for when one is shown, and the time left, no later than ends."""
        self._tells, self._ends = said, ends
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, ends=ends)

    def count(self, unit: str, each: int = 1) -> None:
        """Has the next calls count steps of so many of these: lines say so, how many a second, and the time left."""
        self._unit, self._each, self._first = unit, each, None

    def _rate(self, done: int, now: float) -> str:
        """`N tokens/s` since the part's first call; nothing without a unit or before there is anything to go by."""
        if not self._unit or self._first is None or done <= self._first[0]:
            return ""
        passed = max(now - self._first[1], 1e-9)
        return f"{(done - self._first[0]) * self._each / passed:,.0f} {self._unit}/s"

    def _told(self) -> str:
        return self._tells() if self._tells is not None else ""

    def _pace(self, done: int, total: int, now: float) -> str:
        """What a plain line ends in: the rate, what is told, the time left."""
        said = [note for note in (self._rate(done, now), self._told()) if note]
        left = []
        if self._ends is not None:
            left.append(max(0.0, self._ends - now))
        if (self._unit or self._tells) and self._first is not None and done > self._first[0]:
            left.append((now - self._first[1]) * (total - done) / (done - self._first[0]))
        if left:
            said.append(f"{_time(min(left))} left")
        return "".join(f", {part}" for part in said)

    def line(self, text: str) -> None:
        """Prints a line of its own, above the bar where there is one."""
        _print(self._console, text)

    def close(self) -> None:
        """Fixes the stage's seconds."""
        self.seconds = time.monotonic() - self._start


class Printer:
    """Prints the lines of a run to a console."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(soft_wrap=True, highlight=False)

    def line(self, text: str = "") -> None:
        """Prints one line as it is."""
        _print(self.console, text)

    @contextmanager
    def waiting(self) -> Iterator[Callable[[str], None]]:
        """Takes what is being waited for, as often as it likes: one line that changes on a terminal, few lines elsewhere."""
        if self.console.is_terminal:
            with self.console.status("") as status:
                yield lambda text: status.update(Text(text))
            return
        said = time.monotonic()

        def say(text: str) -> None:
            nonlocal said
            if time.monotonic() - said >= WAITING_SECONDS:
                said = time.monotonic()
                self.line(f"      waiting for {text}")

        yield say

    @contextmanager
    def stage(self, name: str) -> Iterator[StageProgress]:
        """Runs a stage; its closing line holds name, summary and seconds, also where it stops early. Further lines of the
        summary follow."""
        bar = _bar(self.console) if self.console.is_terminal else None
        if bar is not None:
            bar.start()
        progress = StageProgress(name, self.console, bar=bar)
        finished = False
        try:
            yield progress
            finished = True
        finally:
            progress.close()
            if bar is not None:
                bar.stop()
            summary, *more = (progress.summary if finished else "stopped").splitlines() or [""]
            self.line(f"{name:<9} {summary:<64} {progress.seconds:7.1f} s")
            for text in more:
                self.line(f"{'':<9} {text}")


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"


class _TimeLeft(ProgressColumn):
    """The time that the steps left will take, or what a limit leaves (field `ends`) if that is less."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        """H:MM:SS, dashes while nothing is known."""
        ends = task.fields["ends"]
        known = [task.time_remaining, None if ends is None else max(0.0, ends - time.monotonic())]
        seconds = min((value for value in known if value is not None), default=None)
        text = "-:--:--" if seconds is None else str(timedelta(seconds=int(seconds)))
        return Text(text, style="progress.remaining")


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<9}"),
        BarColumn(bar_width=32),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[rate]}"),
        # On a narrow terminal the bar gives way, not the time.
        _TimeLeft(table_column=Column(min_width=7, no_wrap=True)),
        console=console,
        transient=True,
    )
