"""What a layer of mixed heads must keep to: memory, one compilation for every head map, finite numbers over long sequences."""

from __future__ import annotations

import random
from functools import partial

import torch

from archsearch_kernels.mixed import composition
from archsearch_kernels.mixed.bench import FULL, NUM_HEADS, SHAPES, draw_layer, gradients, plan_of

from .kernel_book import Figures
from .kernel_layer import RATIOS, VARIANTS, ours
from .kernel_timing import (
    counted_compilations,
    forget_compilations,
    peak_bytes,
    run_with_gradients,
)

NUM_MAPS, MAP_TOKENS = 100, 1024
LONG_TOKENS = 262_144


def measure_memory(figures: Figures, rivals: bool) -> None:
    """Peaks of forward plus backward beyond what was there before, ours and, with rivals, the composition's."""
    for ratio in RATIOS:
        for batch, tokens in SHAPES:
            arguments = draw_layer(batch, tokens, plan_of(FULL[ratio]))
            layers = {**VARIANTS, **({"composition": composition.mixed_heads} if rivals else {})}
            peaks = {}
            for name, layer in layers.items():
                both = partial(gradients, partial(layer, **arguments), arguments)
                both()
                peaks[name] = peak_bytes(both)
            for name, peak in peaks.items():
                share = {"share_of_composition": peak / peaks["composition"]} if rivals else {}
                figures.add(
                    f"layer {ratio}, {name}: peak memory of forward and backward",
                    peak / 2**20,
                    "MiB",
                    "composition" if rivals else None,
                    batch=batch,
                    tokens=tokens,
                    bytes_a_token=peak / batch / tokens,
                    **share,
                )


def random_maps(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Different sets of full-attention heads of every size, the first a mixed one."""
    rng, maps = random.Random(seed), [FULL["7:1"]]
    while len(maps) < count:
        drawn = tuple(sorted(rng.sample(range(NUM_HEADS), rng.randint(0, NUM_HEADS))))
        if drawn not in maps:
            maps.append(drawn)
    return maps


def count_compilations(figures: Figures) -> None:
    """Triton kernels compiled over many head maps of one model, forward and backward, after the first.

    Raises RuntimeError where none is seen at the first map: then nothing is counted.
    """
    compiled = []
    forget_compilations()
    for full in random_maps(NUM_MAPS):
        arguments = draw_layer(1, MAP_TOKENS, plan_of(full))
        with counted_compilations() as names:
            gradients(partial(ours, **arguments), arguments)
        compiled.append(list(names))
    torch.cuda.synchronize()
    if not compiled[0]:
        raise RuntimeError("no compilation was seen at the first head map")
    later = [name for names in compiled[1:] for name in names]
    figures.add(
        f"Triton kernels compiled over {NUM_MAPS} head maps after the first",
        len(later),
        "kernels",
        None,
        compiled_at_first=len(compiled[0]),
        compiled_later=sorted(set(later)),
    )


def run_long(figures: Figures) -> None:
    """Whether everything stays finite over a long sequence, of heads that forget nothing."""
    arguments = draw_layer(1, LONG_TOKENS, plan_of(FULL["7:1"]), half_life=65536.0)
    found = run_with_gradients(ours, arguments)
    broken = [name for name, x in found.items() if not bool(x.isfinite().all())]
    figures.add(
        "tensors that are not finite, output and gradients",
        len(broken),
        "tensors",
        None,
        batch=1,
        tokens=LONG_TOKENS,
        names=broken,
    )
