"""Rounds of breeding on the surrogate: many maps are made, the best become parents of more. Numpy only.

Shapes: P maps, U units, S draws of what each unit does.
"""

from __future__ import annotations

import numpy as np

from .moves import build, cross, mutate
from .pool import Pool
from .screening import Screen
from .units import Bits, Row, Units

BUILT, BRED, CROSSED = 96, 96, 48
"""Maps of the first round: from nothing, by mutation and by crossover."""
PARENTS, CHILDREN, ROUNDS = 16, 128, 3
"""Of each later round: the best so far and their children."""


def breed(
    units: Units, pool: Pool, screen: Screen, front_PU: Bits, rng: np.random.Generator
) -> Bits | None:
    """The new map that is expected to gain most, [U]; None where no new one came up. front_PU are the first parents."""
    effects_SU = screen.effects()

    def effects(count: int) -> Row:
        drawn: Row = effects_SU[rng.integers(len(effects_SU), size=count)]
        return drawn

    def parents(maps: Bits, count: int) -> Bits:
        drawn: Bits = maps[rng.integers(len(maps), size=count)]
        return drawn

    first = [
        build(units, effects(BUILT), rng),
        mutate(units, parents(front_PU, BRED), effects(BRED), rng),
        cross(units, parents(front_PU, CROSSED), parents(front_PU, CROSSED), rng),
    ]
    maps = pool.new(np.concatenate(first))
    if not len(maps):
        return None
    gains = screen.gains(maps)
    for _ in range(ROUNDS):
        best = np.argsort(-gains, kind="stable")[:PARENTS]
        maps, gains = maps[best], gains[best]
        children = pool.new(mutate(units, parents(maps, CHILDREN), effects(CHILDREN), rng))
        if len(children):
            maps = np.concatenate([maps, children])
            gains = np.concatenate([gains, screen.gains(children)])
    chosen: Bits = maps[int(gains.argmax())]
    return chosen
