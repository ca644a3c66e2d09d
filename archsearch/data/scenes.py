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

from .prompts import KEYS, Scene, check_count, draw_script, draw_values

QUERIES = 4
"""Most questions of a multiquery prompt."""
CHAIN = 3
"""Variables of a chain: one is set to a number, each other one to the one before it."""


def single(rng: Random, keys: int, digits: int, depth: float) -> Scene:
    """One needle, whatever keys says."""
    return draw_script(rng, 1, digits, depth).scene()


def multikey(rng: Random, keys: int, digits: int, depth: float) -> Scene:
    """Needles of that many keys, of which one is asked for."""
    return draw_script(rng, keys, digits, depth).scene()


def multivalue(rng: Random, keys: int, digits: int, depth: float) -> Scene:
    """As many values of one key, all but the last answered."""
    check_count(keys, len(KEYS), digits)
    key = rng.choice(KEYS)
    values = draw_values(rng, keys, digits)
    *said, answer = values
    start = f"One of the special magic numbers for {key} is"
    return Scene(
        groups=tuple((f"{start} {value}.",) for value in values),
        asked=keys - 1,
        depth=depth,
        questions="\n".join(
            [
                f"Question: What are all the special magic numbers for {key}?",
                "Answer: " + " ".join([*(f"{start} {value}." for value in said), start]),
            ]
        ),
        answer=answer,
        values=frozenset(values),
    )


def multiquery(rng: Random, keys: int, digits: int, depth: float) -> Scene:
    """Needles of that many keys, of which up to QUERIES are asked for, all but the last answered."""
    script = draw_script(rng, keys, digits, depth)
    first, *others = script.values
    return replace(script, asked=(*others[: QUERIES - 1], first)).scene()


def tracking(rng: Random, keys: int, digits: int, depth: float) -> Scene:
    """That many chains of CHAIN variables: asked for is the value of one's last variable.

    With several chains another one's value is asked for and answered before, which shows what is meant.
    """
    check_count(keys, len(KEYS) // CHAIN, digits)
    names = rng.sample(KEYS, keys * CHAIN)
    chains = [names[i : i + CHAIN] for i in range(0, len(names), CHAIN)]
    values = draw_values(rng, keys, digits)
    shown = [
        f"{_value_of(chain[-1])} {value}." for chain, value in zip(chains, values, strict=True)
    ]
    return Scene(
        groups=tuple(map(_assignments, chains, values)),
        asked=0,
        depth=depth,
        questions="\n\n".join([*shown[1:2], _value_of(chains[0][-1])]),
        answer=values[0],
        values=frozenset(values),
    )


def _assignments(chain: list[str], value: str) -> tuple[str, ...]:
    later = (f"VAR {name} = VAR {before}." for before, name in pairwise(chain))
    return (f"VAR {chain[0]} = {value}.", *later)


def _value_of(name: str) -> str:
    return f"Question: What is the value of VAR {name}?\nAnswer: The value of VAR {name} is"


SCENES: Mapping[str, Callable[[Random, int, int, float], Scene]] = {
    "single": single,
    "multikey": multikey,
    "multivalue": multivalue,
    "multiquery": multiquery,
    "tracking": tracking,
}
"""Draws a scene from random numbers, the number of keys, the digits of a value, and the depth of the asked needle."""
