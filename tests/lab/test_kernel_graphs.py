"""Times with and without CUDA graphs, torch's own replaced by ones that record a call on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from archsearch.lab import kernel_graphs
from archsearch.lab.kernel_book import Figures
from archsearch.lab.kernel_graphs import WARMUPS, WrongReplay, add_times, capture
from archsearch.lab.kernel_timing import OutOfTime


class FakeGraph:
    replay: Callable[[], None]


class FakeStream:
    def wait_stream(self, other: object) -> None:
        pass


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the fake device remembers: `capturing`, and `replay`, which tests set."""
    state: dict[str, Any] = {"capturing": False, "replay": lambda: None}

    @contextmanager
    def graph(made: FakeGraph, stream: FakeStream) -> Iterator[None]:
        state["capturing"] = True
        yield
        state["capturing"] = False
        made.replay = state["replay"]

    fakes = {
        "Stream": FakeStream,
        "CUDAGraph": FakeGraph,
        "graph": graph,
        "stream": lambda stream: nullcontext(),
        "current_stream": FakeStream,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
    }
    for name, value in fakes.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return state


def doubled(cuda: dict[str, Any]) -> tuple[Callable[[], Any], list[torch.Tensor], list[bool]]:
    x, made, when = torch.tensor([1.0, 2.0]), list[torch.Tensor](), list[bool]()

    def call() -> tuple[torch.Tensor, None]:
        made.append(2 * x)
        when.append(cuda["capturing"])
        return made[-1], None

    return call, made, when


def test_a_graph_is_warmed_up_captured_and_replayed(cuda: dict[str, Any]) -> None:
    call, made, when = doubled(cuda)
    cuda["replay"] = lambda: made[-1].copy_(made[0])
    capture(lambda: call).replay()
    assert when == [False] * WARMUPS + [True]
    assert made[-1].tolist() == [2, 4]


def test_a_replay_that_does_nothing_is_found_out(cuda: dict[str, Any]) -> None:
    call, _, _ = doubled(cuda)
    with pytest.raises(WrongReplay, match="inf"):
        capture(lambda: call)


def test_a_replay_with_other_results_is_found_out(cuda: dict[str, Any]) -> None:
    call, made, _ = doubled(cuda)
    cuda["replay"] = lambda: made[-1].fill_(2.0)
    with pytest.raises(WrongReplay):
        capture(lambda: call)


@pytest.fixture
def figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Figures:
    monkeypatch.setattr(kernel_graphs, "median_ms", lambda call: 4.0 if call is print else 2.0)
    return Figures(tmp_path / "figures.json", [])


def test_both_times_and_the_shorter_one_s_share(cuda: dict[str, Any], figures: Figures) -> None:
    call, made, _ = doubled(cuda)
    cuda["replay"] = lambda: made[-1].copy_(made[0])
    add_times(figures, "ours", lambda: call, 1.0, batch=1)
    (row,) = figures.rows
    assert (row["graph_ms"], row["share_of_floor"]) == (2.0, 0.5)


def test_a_call_that_cannot_be_captured_has_its_eager_time(
    cuda: dict[str, Any], figures: Figures
) -> None:
    def make() -> Callable[[], object]:
        if cuda["made"]:
            raise RuntimeError("operation not permitted when stream is capturing")
        cuda["made"] = True
        return print

    cuda["made"] = False
    add_times(figures, "theirs", make, 1.0)
    row, remark = figures.rows
    assert (row["value"], row["share_of_floor"]) == (4.0, 0.25)
    assert "graph_ms" not in row
    assert "not permitted" in remark["text"]


def test_the_end_of_time_is_not_taken_for_a_failure(cuda: dict[str, Any], figures: Figures) -> None:
    def make() -> Callable[[], object]:
        if figures.section:
            raise OutOfTime
        figures.section = "core"
        return print

    with pytest.raises(OutOfTime):
        add_times(figures, "ours", make)
