"""A small generated English: filler sentences for haystacks, from a closed vocabulary.

The text is built to be partly learnable by a very small model: subject and verb agree, a pronoun
agrees with the name before it, `a` and `an` follow the next word, a topic lasts some sentences and
decides which people, things, verbs and places occur, and weekdays pass in their order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random

PIECE = re.compile(r"[A-Za-z]+|[0-9]|[^A-Za-z0-9\s]")
"""What counts as one piece: a word, one digit, or one punctuation mark; whitespace is none."""


@dataclass(frozen=True)
class Topic:
    """The words of one topic; verbs are (one does, many do, did)."""

    people: tuple[str, ...]
    things: tuple[str, ...]
    verbs: tuple[tuple[str, str, str], ...]
    places: tuple[str, ...]
    qualities: tuple[str, ...]


def _verbs(*triples: str) -> tuple[tuple[str, str, str], ...]:
    return tuple((one, many, did) for one, many, did in (triple.split() for triple in triples))


TOPICS: tuple[Topic, ...] = (
    Topic(
        ("sailor", "captain", "diver"),
        ("boat", "rope", "anchor", "sail"),
        _verbs("ties tie tied", "loads load loaded", "steers steer steered"),
        ("harbour", "pier"),
        ("wet", "rusty", "empty"),
    ),
    Topic(
        ("cook", "baker", "waiter"),
        ("pot", "oven", "cake", "plate"),
        _verbs("heats heat heated", "serves serve served", "fills fill filled"),
        ("kitchen", "cellar"),
        ("hot", "sweet", "clean"),
    ),
    Topic(
        ("teacher", "student", "writer"),
        ("book", "essay", "map", "pencil"),
        _verbs("reads read read", "copies copy copied", "opens open opened"),
        ("library", "school"),
        ("long", "easy", "blue"),
    ),
    Topic(
        ("farmer", "gardener", "shepherd"),
        ("seed", "fence", "basket", "apple"),
        _verbs("plants plant planted", "gathers gather gathered", "waters water watered"),
        ("garden", "barn"),
        ("green", "ripe", "old"),
    ),
    Topic(
        ("carpenter", "painter", "smith"),
        ("table", "ladder", "engine", "hammer"),
        _verbs("mends mend mended", "builds build built", "paints paint painted"),
        ("workshop", "yard"),
        ("heavy", "broken", "ugly"),
    ),
    Topic(
        ("doctor", "nurse", "patient"),
        ("bottle", "pill", "bandage", "injection"),
        _verbs("checks check checked", "brings bring brought", "orders order ordered"),
        ("hospital", "ward"),
        ("small", "urgent", "warm"),
    ),
)
SHE = ("Anna", "Clara", "Maria", "Ruth")
HE = ("Boris", "David", "Peter", "Simon")
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
TIMES = ("morning", "afternoon", "evening")
NUMBERS = ("two", "three", "four", "several")
REASONS = (
    "because it was late",
    "because the road was closed",
    "although nobody had asked",
    "before the guests arrived",
    "while the others slept",
    "as soon as the rain stopped",
)
OPENERS = ("Later", "Meanwhile", "Soon", "Then")
SHORT_SENTENCES = (
    "It rained.",
    "Nobody answered.",
    "The night was quiet.",
    "The wind was cold again.",
    "After that the house was still.",
    "It was late and the lamps were out.",
)
"""Sentences of 3 to 9 pieces, also used to fill a prompt up to its length."""

_STAY_ON_TOPIC = 0.85
_STAY_ON_DAY = 0.8


def pieces(text: str) -> list[str]:
    """Splits text into words, single digits and punctuation marks; whitespace vanishes."""
    return PIECE.findall(text)


def _article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _capitalised(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def _distinct_pieces(texts: Iterable[str]) -> list[str]:
    return sorted({piece for text in texts for piece in pieces(text)})


class _Story:
    """What carries over from one sentence to the next: topic, weekday, who was named last."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.topic = rng.choice(TOPICS)
        self.day = rng.randrange(len(WEEKDAYS))
        self.pronoun: str | None = None

    def sentence(self) -> str:
        """Draws the next sentence."""
        if self.rng.random() > _STAY_ON_TOPIC:
            self.topic = self.rng.choice(TOPICS)
        form = self.rng.choices(_FORMS, weights=_FORM_WEIGHTS)[0]
        return _capitalised(form(self))

    def thing(self) -> str:
        """A thing with article, number or quality: `an old fence`, `the fences`, `two ripe apples`."""
        noun = self.rng.choice(self.topic.things)
        quality = self.rng.choice(self.topic.qualities)
        return self.rng.choice(
            (
                f"the {noun}",
                f"the {quality} {noun}",
                _article(noun),
                _article(f"{quality} {noun}"),
                f"the {noun}s",
                f"{self.rng.choice(NUMBERS)} {quality} {noun}s",
            )
        )

    def where(self) -> str:
        """A place with its preposition."""
        return (
            f"{self.rng.choice(('in', 'near', 'behind'))} the {self.rng.choice(self.topic.places)}"
        )

    def subject(self) -> tuple[str, bool]:
        """Who acts, and whether they are many; remembers the pronoun that would follow."""
        rng = self.rng
        draw = rng.random()
        if draw < 0.35 and self.pronoun is not None:
            return self.pronoun, self.pronoun == "they"
        if draw < 0.6:
            names = rng.choice((SHE, HE))
            self.pronoun = "she" if names is SHE else "he"
            return rng.choice(names), False
        many = draw < 0.8
        self.pronoun = "they" if many else None
        return f"the {rng.choice(self.topic.people)}{'s' if many else ''}", many

    def next_day(self) -> str:
        """The weekday of the story, which moves on now and then."""
        if self.rng.random() > _STAY_ON_DAY:
            self.day = (self.day + 1) % len(WEEKDAYS)
        return WEEKDAYS[self.day]

    def verb(self) -> tuple[str, str, str]:
        """A verb of the topic."""
        return self.rng.choice(self.topic.verbs)


def _habit(story: _Story) -> str:
    subject, many = story.subject()
    verb = story.verb()[1 if many else 0]
    return f"{subject} {verb} {story.thing()} {story.where()} every {story.rng.choice(TIMES)}."


def _event(story: _Story) -> str:
    subject, _ = story.subject()
    opening = f"on {story.next_day()} {story.rng.choice(TIMES)}"
    return f"{opening} {subject} {story.verb()[2]} {story.thing()} {story.where()}."


def _reasoned(story: _Story) -> str:
    subject, _ = story.subject()
    return f"{subject} {story.verb()[2]} {story.thing()} {story.rng.choice(REASONS)}."


def _sequel(story: _Story) -> str:
    subject, _ = story.subject()
    opening = story.rng.choice(OPENERS)
    return f"{opening} {subject} {story.verb()[2]} {story.thing()} and went home."


def _state(story: _Story) -> str:
    rng = story.rng
    noun, quality = rng.choice(story.topic.things), rng.choice(story.topic.qualities)
    if rng.random() < 0.5:
        return f"the {noun} {story.where()} was {quality}."
    return f"the {noun}s {story.where()} were {quality}."


def _short(story: _Story) -> str:
    return story.rng.choice(SHORT_SENTENCES)


_FORMS = (_habit, _event, _reasoned, _sequel, _state, _short)
_FORM_WEIGHTS = (20, 30, 20, 15, 10, 5)


def haystack_sentences(rng: Random) -> Iterator[str]:
    """Yields filler sentences without end, each with its full stop and no space around it."""
    story = _Story(rng)
    while True:
        yield story.sentence()


def filler_vocabulary() -> list[str]:
    """Every piece that haystack_sentences can emit, sorted."""
    texts: list[str] = ["The the a an in near behind every On . and went home was were"]
    texts += ["she he they She He They"]
    texts += [*SHE, *HE, *WEEKDAYS, *TIMES, *NUMBERS, *REASONS, *OPENERS, *SHORT_SENTENCES]
    for topic in TOPICS:
        for noun in topic.things + topic.people:
            texts += [noun, f"{noun}s"]
        texts += [form for verb in topic.verbs for form in verb]
        texts += [*topic.places, *topic.qualities]
    return _distinct_pieces(texts)
