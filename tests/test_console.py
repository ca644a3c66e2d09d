"""The lines of a run."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from archsearch import console
from archsearch.console import Printer
from archsearch.memory import MemoryWatch, tree_bytes


def printer() -> tuple[Printer, io.StringIO]:
    text = io.StringIO()
    return Printer(Console(file=text, width=200)), text


def test_stage_closes_with_name_summary_and_seconds() -> None:
    out, text = printer()
    with out.stage("data") as progress:
        progress(1, 2)
        progress.summary = "12 [rows]"
    (line,) = text.getvalue().splitlines()
    assert line.startswith("data")
    assert "12 [rows]" in line
    assert line.endswith(" s")


def test_further_lines_of_a_summary_follow_the_closing_line() -> None:
    out, text = printer()
    with out.stage("search") as progress:
        progress.summary = "front: 2 points\nuntrained: all 5 head maps"
    first, second = text.getvalue().splitlines()
    assert first.startswith("search    front: 2 points ")
    assert first.endswith(" s")
    assert second == "          untrained: all 5 head maps"


def test_stage_that_raises_says_that_it_stopped() -> None:
    out, text = printer()
    with pytest.raises(ValueError, match="no"), out.stage("data"):
        raise ValueError("no")
    assert "stopped" in text.getvalue()


def test_plain_progress_is_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "PLAIN_SECONDS", 0.05)
    out, text = printer()
    with out.stage("data") as progress:
        for i in range(5):
            progress(i, 10)
        time.sleep(0.06)
        progress(5, 10)
    assert [row for row in text.getvalue().splitlines() if "of 10" in row] == [
        "  data: 5 of 10 (50%)"
    ]


def test_steps_that_are_counted_have_a_rate_and_a_time_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[-1])
    out, text = printer()
    with out.stage("distil") as progress:
        progress.count("tokens", 512)
        # Steps of an earlier call are none of this one's rate.
        for done, second in ((30, 107.0), (30, 130.0), (50, 137.0), (90, 187.0)):
            clock.append(second)
            progress(done, 100)
        progress.count("rows")
        for done, second in ((0, 200.0), (1, 260.0)):
            clock.append(second)
            progress(done, 4)
    assert [row for row in text.getvalue().splitlines() if " of " in row] == [
        "  distil: 15,360 of 51,200 tokens (30%)",
        "  distil: 46,080 of 51,200 tokens (90%), 384 tokens/s, 13 s left",
        "  distil: 1 of 4 rows (25%), 0 rows/s, 3.0 min left",
    ]


def test_terminal_shows_a_bar_and_the_closing_line() -> None:
    text = io.StringIO()
    out = Printer(Console(file=text, width=200, force_terminal=True))
    with out.stage("data") as progress:
        progress.count("tokens", 9)
        progress(0, 2)
        progress(1, 2)
        progress.line("a word")
        progress.summary = "done"
    assert "a word" in text.getvalue()
    assert " tokens/s " in text.getvalue()
    assert "done" in text.getvalue()


def test_memory_watch_sees_this_process() -> None:
    with MemoryWatch(interval_seconds=0.01) as watch:
        peak = watch.take_peak()
    assert peak >= 0.5 * tree_bytes() > 2**20


def test_progress_names_the_part_of_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "PLAIN_SECONDS", 0.0)
    out, text = printer()
    with out.stage("scores") as progress:
        progress.begin("causal")
        progress(12, 40)
        progress.begin("restoration")
        progress(1, 2)
    lines = [line.strip() for line in text.getvalue().splitlines()]
    assert lines[:2] == ["scores: causal 12 of 40 (30%)", "scores: restoration 1 of 2 (50%)"]


def test_a_search_says_what_it_has_come_to_and_the_time_left_within_its_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[-1])
    out, text = printer()
    asked: list[float] = []

    def said() -> str:
        asked.append(clock[-1])
        return "hypervolume 0.5"

    with out.stage("search") as progress:
        progress.begin("proxy 1 of 2, untrained:")
        progress.tell(said, ends=400.0)
        # 40 come from an earlier call.
        for done, second in ((40, 101.0), (41, 121.0), (45, 122.0), (60, 301.0)):
            clock.append(second)
            progress(done, 100)
        progress.begin("final stage:")
        for done, second in ((0, 500.0), (1, 530.0)):
            clock.append(second)
            progress(done, 2)
    assert [row for row in text.getvalue().splitlines() if " of " in row] == [
        "  search: proxy 1 of 2, untrained: 41 of 100 (41%), hypervolume 0.5, 4.7 min left",
        "  search: proxy 1 of 2, untrained: 60 of 100 (60%), hypervolume 0.5, 1.6 min left",
        "  search: final stage: 0 of 2 (0%)",
        "  search: final stage: 1 of 2 (50%)",
    ]
    assert asked == [121.0, 301.0]


@pytest.mark.parametrize("width", [80, 200])
def test_a_bar_shows_it_too(width: int) -> None:
    text = io.StringIO()
    out = Printer(Console(file=text, width=width, force_terminal=True))
    with out.stage("search") as progress:
        progress.begin("proxy 1 of 1, untrained:")
        progress.tell(lambda: "kl 0.25 at best", ends=console.time.monotonic() + 3725.5)
        progress(1, 2)
    assert "search proxy 1 of 1, untrained:" in text.getvalue()
    assert "kl 0.25 at best" in text.getvalue()
    assert "1:02:05" in text.getvalue()


def test_what_is_waited_for_is_said_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    out, text = printer()
    with out.waiting() as waiting:
        waiting("nothing yet")
        monkeypatch.setattr(console, "WAITING_SECONDS", 0.0)
        waiting("fla [bf16]")
    assert text.getvalue() == "      waiting for fla [bf16]\n"


def test_on_a_terminal_lines_stay_and_what_is_waited_for_goes() -> None:
    text = io.StringIO()
    out = Printer(Console(file=text, width=200, force_terminal=True))
    with out.waiting() as waiting:
        waiting("fla [bf16]")
        out.line("done")
    assert "done\n" in text.getvalue()
    assert "fla [bf16]" in text.getvalue()
