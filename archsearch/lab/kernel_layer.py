"""Figures of a whole layer of mixed heads between projections, against the same layer of fla-core, cuDNN and torch ops.

    python -m archsearch.lab.kernel_layer --to FILE

times the first calls of an empty process; its caches are the caller's to choose.

Shapes: B batch, T tokens, D head_dim; 16 query heads over 8 KV heads.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from archsearch_kernels.mixed import composition, reference
from archsearch_kernels.mixed.bench import FULL, SHAPES, draw_layer, gradients, plan_of
from archsearch_kernels.timing import require_gpu

from .kernel_book import Figures
from .kernel_core import Inaccurate, too_large
from .kernel_graphs import add_times
from .kernel_rivals import Journal, forget_tuning
from .kernel_timing import (
    relative_errors,
    run_with_gradients,
    stages_ms,
    widened,
)

CHECKED = (2, 300)
BOUND = 2e-2
"""Each of three operators hands bf16 to the next."""
RATIOS = ("7:1", "3:1")
GOALS = {("7:1", 1): 1.7, ("3:1", 1): 1.4, ("7:1", 8): 2.0, ("3:1", 8): 1.9}
"""How many times faster than the composition, forward and backward, by ratio and B."""

Layer = Callable[..., Tensor]


def ours(**arguments: Any) -> Tensor:
    """Our layer as it is by default."""
    from archsearch_kernels.mixed.operator import mixed_heads

    return mixed_heads(**arguments)


def on_two_streams(**arguments: Any) -> Tensor:
    """Our layer with full attention on a stream of its own."""
    return ours(**arguments, side_stream=_side_stream())


def with_remade_heads(**arguments: Any) -> Tensor:
    """Our layer, making the prologue's q and k again in the backward pass."""
    return ours(**arguments, remake=True)


def with_least_memory(**arguments: Any) -> Tensor:
    """Our layer, making q and k again and going through the delta rule's backward pass in two parts."""
    return ours(**arguments, remake=True, backward_parts=2)


_streams: list[torch.cuda.Stream] = []


def _side_stream() -> torch.cuda.Stream:
    if not _streams:
        _streams.append(torch.cuda.Stream())
    return _streams[0]


VARIANTS: dict[str, Layer] = {
    "ours": ours,
    "ours, two streams": on_two_streams,
    "ours, q and k remade": with_remade_heads,
    "ours, least memory": with_least_memory,
}


def check_layer(figures: Figures) -> None:
    """Records errors in bf16 against the reference in fp64. Raises Inaccurate where one is too large."""
    wrong: dict[str, float] = {}
    for ratio in RATIOS:
        arguments = draw_layer(*CHECKED, plan_of(FULL[ratio]))
        expected = run_with_gradients(reference.mixed_heads, widened(arguments))
        for name, layer in VARIANTS.items():
            errors = relative_errors(run_with_gradients(layer, arguments), expected)
            figures.add(
                f"layer {ratio}, {name}: largest relative error of the output and every gradient",
                max(errors.values()),
                "",
                "fp64, token by token",
                batch=CHECKED[0],
                tokens=CHECKED[1],
                dtype="bfloat16",
                errors=errors,
            )
            found = too_large(errors, BOUND)
            wrong |= {f"{ratio} {name} {key}": error for key, error in found.items()}
    if wrong:
        raise Inaccurate(f"layer: {wrong}")


def time_layer(figures: Figures) -> None:
    """Forward, and forward with backward, of our layer in its variants."""
    for ratio in RATIOS:
        for batch, tokens in SHAPES:
            arguments = draw_layer(batch, tokens, plan_of(FULL[ratio]))
            for name, layer in VARIANTS.items():
                _time(figures, f"layer {ratio}", name, layer, arguments)
    batch, tokens = SHAPES[1]
    arguments = draw_layer(batch, tokens, plan_of(FULL["full"]))
    for name, layer in (
        ("cuDNN with torch ops", composition.mixed_heads),
        ("cuDNN with our prologue", ours),
    ):
        _time(figures, "all heads full attention", name, layer, arguments)
        slower = f"all heads full attention forward and backward, {name}"
        for ratio, variant in product(RATIOS, VARIANTS):
            faster = f"layer {ratio} forward and backward, {variant}"
            figures.ratio(slower, faster, batch, tokens, "more than once")


def time_composition(figures: Figures) -> None:
    """The composition's times, fla-core tuned anew at each shape, and how many times faster our layer is."""
    for ratio in RATIOS:
        for batch, tokens in SHAPES:
            arguments = draw_layer(batch, tokens, plan_of(FULL[ratio]))
            forget_tuning()
            gradients(partial(composition.mixed_heads, **arguments), arguments)
            _agree(figures, f"layer {ratio}", arguments)
            _time(figures, f"layer {ratio}", "composition", composition.mixed_heads, arguments)
            what = f"layer {ratio} forward and backward"
            goal = f"at least {GOALS[ratio, batch]} times"
            for name in VARIANTS:
                figures.ratio(f"{what}, composition", f"{what}, {name}", batch, tokens, goal)
            figures.write()


def _agree(figures: Figures, what: str, arguments: dict[str, Any]) -> None:
    with torch.no_grad():
        found, expected = ours(**arguments), composition.mixed_heads(**arguments)
    difference = relative_errors({"out": found}, {"out": expected})["out"]
    batch, tokens = found.shape[:2]
    facts = {"batch": batch, "tokens": tokens}
    figures.add(f"{what}: relative difference of outputs", difference, "", "composition", **facts)
    if not difference < 3e-2:
        raise Inaccurate(f"{what}: ours and the composition differ by {difference}")


def _time(figures: Figures, what: str, name: str, layer: Layer, arguments: dict[str, Any]) -> None:
    forward = partial(layer, **arguments)
    both = partial(gradients, forward, arguments)
    facts = {"batch": arguments["q_BTHD"].shape[0], "tokens": arguments["q_BTHD"].shape[1]}
    add_times(figures, f"{what} forward, {name}", lambda: forward, **facts)
    stages = stages_ms(both)
    metric = f"{what} forward and backward, {name}"
    add_times(figures, metric, lambda: both, **facts, stages_ms=stages)


def first_calls(journal: Journal) -> None:
    """Seconds since the process began, and of the first calls alone."""
    torch.ones(1, device="cuda").sum().item()
    for fact, ratio, shape in (
        ("first_map", "7:1", SHAPES[0]),
        ("second_map", "3:1", SHAPES[0]),
        ("second_shape", "7:1", SHAPES[1]),
    ):
        arguments = draw_layer(*shape, plan_of(FULL[ratio]))
        torch.cuda.synchronize()
        journal.note(f"{fact}_begins_s")
        gradients(partial(ours, **arguments), arguments)
        torch.cuda.synchronize()
        journal.note(f"{fact}_s")
    journal.note("finished", True)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=Path, required=True, metavar="FILE", help="the journal")
    options = parser.parse_args()
    require_gpu(parser)
    first_calls(Journal(options.to))


if __name__ == "__main__":
    main()
