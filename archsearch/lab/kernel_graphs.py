"""Times of a call twice: as Python makes it, and as a CUDA graph replays it, where the host's launches cost nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .kernel_book import Figures
from .kernel_timing import OutOfTime, median_ms, relative_errors

WARMUPS = 3
"""Calls before the capture, in which kernels are compiled, tables made and libraries set up: all that a graph cannot hold."""
LARGEST_DIFFERENCE = 1e-2
"""Between a replay and the call itself; backward passes with atomic additions are not the same twice."""

Call = Callable[[], object]


class WrongReplay(Exception):
    """A graph's replay gives other results than the call."""


def capture(make: Callable[[], Call]) -> torch.cuda.CUDAGraph:
    """A graph of the call that make returns, its inputs, gradients and memory fixed.

    make runs on the stream of the capture, since a backward pass runs where its forward pass ran. Raises WrongReplay, and
    whatever torch raises for a call that waits for the device.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call = make()
        for _ in range(WARMUPS):
            expected = call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = call()
    for x in _tensors(found):
        if 0 not in x.stride():  # else one number stands for many, and cannot be written
            x.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    differences = relative_errors(_by_number(found), _by_number(expected))
    worst = max(differences.values(), default=float("inf"))
    if not worst <= LARGEST_DIFFERENCE:
        raise WrongReplay(f"a replay differs from the call by {worst}")
    return graph


def graph_facts(make: Callable[[], Call]) -> dict[str, Any]:
    """graph_ms, the median of replays, or no_graph, why there is none."""
    try:
        graph = capture(make)
        ms = median_ms(graph.replay)
    except OutOfTime:
        raise
    except Exception as error:  # the time without a graph is worth having
        return {"no_graph": f"{type(error).__name__}: {error}"[:300]}
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    return {"graph_ms": ms}


def add_times(
    figures: Figures,
    metric: str,
    make: Callable[[], Call],
    floor_ms: float | None = None,
    **facts: Any,
) -> None:
    """Records both medians of the call that make returns, with a remark where there is no graph.

    floor_ms: the least that is possible, of which the shorter time has a share.
    """
    ms = median_ms(make())
    timed = graph_facts(make)
    compared = None
    if floor_ms is not None:
        compared = f"floor {floor_ms:.3f} ms"
        timed["share_of_floor"] = floor_ms / timed.get("graph_ms", ms)
    figures.add(metric, ms, "ms", compared, **facts, **timed)
    if "no_graph" in timed:
        figures.remark(f"{metric}: {timed['no_graph']}; its time is that of eager calls")


def _tensors(result: object) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result.detach()
    elif isinstance(result, (tuple, list)):
        for x in result:
            yield from _tensors(x)


def _by_number(result: object) -> dict[str, Tensor]:
    return {str(number): x for number, x in enumerate(_tensors(result))}
