"""What a retrieval prompt of each kind hides and asks for, after RULER (arXiv 2404.06654).

single and multikey hide one needle a key and ask for one; multivalue hides several values of one key and
multiquery asks for several keys, all but the last answered; tracking hides variables that are set to each
other and asks for the value at the end of a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from random import Random

from .prompts import NUMBERS, Scene, Style, check_count, draw_script

QUERIES = 4
"""Most questions of a multiquery prompt."""
CHAIN = 3
"""Variables of a chain: one is set to a number, each other one to the one before it."""


def single(rng: Random, keys: int, digits: int, depth: float, style: Style = NUMBERS) -> Scene:
    """One needle, whatever keys says."""
    return draw_script(rng, 1, digits, depth, style).scene()


def multikey(rng: Random, keys: int, digits: int, depth: float, style: Style = NUMBERS) -> Scene:
    """Needles of that many keys, of which one is asked for."""
    return draw_script(rng, keys, digits, depth, style).scene()


def multivalue(rng: Random, keys: int, digits: int, depth: float, style: Style = NUMBERS) -> Scene:
    """As many values of one key, all but the last answered."""
    check_count(keys, len(style.keys), digits, style)
    key = rng.choice(style.keys)
    values = style.values(rng, keys, digits)
    *said, answer = values
    start = style.one_value.format(key=key)
    return Scene(
        groups=tuple((f"{start} {value}.",) for value in values),
        asked=keys - 1,
        depth=depth,
        questions=" ".join(
            [style.all_values.format(key=key), *(f"{start} {value}." for value in said), start]
        ),
        answer=answer,
        values=frozenset(values),
    )


def multiquery(rng: Random, keys: int, digits: int, depth: float, style: Style = NUMBERS) -> Scene:
    """Needles of that many keys, of which up to QUERIES are asked for, all but the last answered."""
    script = draw_script(rng, keys, digits, depth, style)
    first, *others = script.values
    return replace(script, asked=(*others[: QUERIES - 1], first)).scene()


def tracking(rng: Random, keys: int, digits: int, depth: float, style: Style = NUMBERS) -> Scene:
    """That many chains of CHAIN variables: asked for is the value of one's last variable.

    With several chains another one's value is asked for and answered before, which shows what is meant.
    """
    check_count(keys, len(style.keys) // CHAIN, digits, style)
    names = rng.sample(style.keys, keys * CHAIN)
    chains = [names[i : i + CHAIN] for i in range(0, len(names), CHAIN)]
    values = style.values(rng, keys, digits)
    asks = [style.chain_question.format(key=chain[-1]) for chain in chains]
    shown = [f"{ask} {value}." for ask, value in zip(asks, values, strict=True)]
    return Scene(
        groups=tuple(
            _assignments(chain, value, style) for chain, value in zip(chains, values, strict=True)
        ),
        asked=0,
        depth=depth,
        questions="\n\n".join([*shown[1:2], asks[0]]),
        answer=values[0],
        values=frozenset(values),
    )


def _assignments(chain: list[str], value: str, style: Style) -> tuple[str, ...]:
    later = (style.next_in_chain.format(key=k, before=before) for before, k in pairwise(chain))
    return (style.first_of_chain.format(key=chain[0], value=value), *later)


SCENES: Mapping[str, Callable[[Random, int, int, float, Style], Scene]] = {
    "single": single,
    "multikey": multikey,
    "multivalue": multivalue,
    "multiquery": multiquery,
    "tracking": tracking,
}
"""Draws a scene from random numbers, the number of keys, the digits of a value, the depth of the asked needle, and a
style of words."""
