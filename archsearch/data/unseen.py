"""A second family of retrieval prompts, for evaluation alone: other needles, values, questions and haystacks.

Training prompts and the probes of probes.kinds hide numbers in stories of the lexicon; these hide made-up words in notes
of a traveller. Nothing here may ever be trained on: what a student makes of it is what it has learnt of retrieval, not
of the prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from random import Random

from .prompts import Filler, Style

_OWNERS = """
    Abbott Barlow Chandler Dalton Eastwood Fairfax Garland Hewitt Ingram Jarvis Kendall Langley Maddox
    Norwood Osborne Prescott Quincy Radcliffe Sheldon Thornton Underwood Vaughan Whitaker Yardley
    Ashcroft Bancroft Calloway Draycott Ellison Fletcher Goodwin Harwood Irving Jennings Kirkland Lockwood
"""
OWNERS: tuple[str, ...] = tuple(_OWNERS.split())
"""Who has a password; none of them occurs in the notes."""

_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"

_PLACES = [
    "valley",
    "glacier",
    "canyon",
    "lagoon",
    "desert",
    "plateau",
    "island",
    "volcano",
    "waterfall",
    "marsh",
    "cliff",
    "meadow",
    "delta",
    "reef",
    "monastery",
    "lighthouse",
    "aqueduct",
    "amphitheatre",
    "citadel",
    "observatory",
]
_COUNTRIES = [
    "Norway",
    "Peru",
    "Kenya",
    "Iceland",
    "Nepal",
    "Chile",
    "Morocco",
    "Scotland",
    "Mongolia",
    "Portugal",
]
_QUALITIES = [
    "vast",
    "remote",
    "silent",
    "fertile",
    "windswept",
    "sunlit",
    "ancient",
    "nameless",
    "salty",
    "misty",
]
_EVENTS = (
    "snow had buried the trail",
    "herons circle at dusk",
    "basalt turns to clay within a century",
    "merchants once traded amber for salt",
    "the tide withdraws twice a day",
    "comets were recorded with great care",
    "no surveyor has ever measured it",
    "wild thyme grows between the slabs",
)
_OPINIONS = (
    "I doubt it",
    "guides disagree about this",
    "our maps say otherwise",
    "few visitors ever learn of it",
)
SHORT = (
    "So we walked on.",
    "Fog came.",
    "I slept badly.",
    "Nothing moved up there.",
    "We had tea and bread.",
    "By noon it was far too hot to climb.",
)
"""Sentences of 2 to 10 words."""


def notes(rng: Random) -> Iterator[str]:
    """Yields sentences of a traveller's notes without end, each with its full stop and no space around it."""
    while True:
        yield rng.choice(_FORMS)(rng)


def _location(rng: Random) -> str:
    one, other = rng.sample(_PLACES, 2)
    side = rng.choice(("north", "south", "east", "west"))
    return f"Ten miles {side} of our {one} lies a {rng.choice(_QUALITIES)} {other} where {rng.choice(_EVENTS)}."


def _rumour(rng: Random) -> str:
    country, place = rng.choice(_COUNTRIES), rng.choice(_PLACES)
    return f"People in {country} claim that beyond every {place} {rng.choice(_EVENTS)}; {rng.choice(_OPINIONS)}."


def _comparison(rng: Random) -> str:
    (here, there), place = rng.sample(_COUNTRIES, 2), rng.choice(_PLACES)
    return f"Compared with {here}, {there} has a more {rng.choice(_QUALITIES)} {place}, yet {rng.choice(_EVENTS)}."


def _wish(rng: Random) -> str:
    quality, place = rng.choice(_QUALITIES), rng.choice(_PLACES)
    return f"How I would love to cross that {quality} {place} in {rng.choice(_COUNTRIES)} again!"


def _short(rng: Random) -> str:
    return rng.choice(SHORT)


_FORMS = (_location, _rumour, _comparison, _wish, _short)


def num_words(digits: int) -> int:
    """How many made-up words there are as long as a number of that many digits."""
    return int((len(_CONSONANTS) * len(_VOWELS)) ** _syllables(digits))


def draw_words(rng: Random, count: int, digits: int) -> list[str]:
    """Made-up words of about as many letters as a number has digits, at least four, no two alike."""
    words: list[str] = []
    while len(words) < count:
        word = "".join(_syllable(rng) for _ in range(_syllables(digits)))
        if word not in words:
            words.append(word)
    return words


def draw_other_word(rng: Random, word: str, taken: Set[str]) -> str:
    """A made-up word as long as word, with other letters throughout, that is not among the taken."""
    while True:
        other = "".join(rng.choice([x for x in _letters(old) if x != old]) for old in word)
        if other not in taken:
            return other


def _letters(old: str) -> str:
    return _VOWELS if old in _VOWELS else _CONSONANTS


def _syllables(digits: int) -> int:
    return max(2, digits // 2)


def _syllable(rng: Random) -> str:
    return rng.choice(_CONSONANTS) + rng.choice(_VOWELS)


PASSWORDS = Style(
    keys=OWNERS,
    needle="{key} opens the vault with the password {value}.",
    question="Which password opens the vault? {key} opens the vault with the password",
    one_value="{key} locks one of the chests with the word",
    all_values="With which words are the chests locked?",
    first_of_chain="{key} answers to the code name {value}.",
    next_in_chain="{key} answers to the same code name as {before}.",
    chain_question="To which code name does {key} answer? {key} answers to the code name",
    num_values=num_words,
    values=draw_words,
    distractor=draw_other_word,
    filler=Filler(notes, SHORT),
)
"""The words of the prompts in probes.unseen."""
