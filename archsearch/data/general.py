"""Short prompts for abilities other than retrieval from a haystack, generated, each with its corrupt twin.

Every prompt shows some solved examples and ends within one more, so that a model that only continues text
can answer. They are sized so that a model of 135 M parameters answers most: 50 to 130 of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from random import Random

from .niah import Pair


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _phrases(*texts: str) -> Mapping[str, str]:
    """Each text's first word, and the rest."""
    return {text.partition(" ")[0]: text.partition(" ")[2] for text in texts}


THINGS = _words("""
    apple river chair tiger window garden pencil bottle doctor winter market silver forest bridge candle
    rabbit orange letter mirror basket hammer ticket island blanket button castle coffee cotton desert
    dinner engine farmer father finger flower guitar jacket kitchen ladder lemon lion mother mountain
    number ocean paper pepper picture planet pocket potato ribbon saddle salt school shadow
    sister spider spoon stone summer table temple train valley village water wheel yellow
""")
"""What copying copies."""

CLASSES: tuple[tuple[str, ...], ...] = (
    _words("""dog cat horse cow sheep pig lion tiger bear wolf fox rabbit mouse elephant monkey goat deer
        camel zebra duck"""),
    _words("""France Spain Italy China Japan India Egypt Brazil Canada Mexico Russia Poland Greece Turkey
        Kenya Peru Chile Cuba Norway Sweden"""),
    _words("""one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
        sixteen seventeen eighteen nineteen twenty"""),
    _words("""hand foot arm leg head nose ear eye mouth knee finger toe neck back chest shoulder elbow
        ankle wrist chin"""),
    _words("""shirt coat hat shoe sock dress skirt scarf belt jacket sweater boot vest cap robe suit
        blouse trousers gown apron"""),
    _words("""teacher doctor nurse pilot farmer baker painter singer driver lawyer soldier sailor judge
        writer actor dancer waiter tailor cook dentist"""),
)
"""Words of a kind, for labels."""
LABELS = (("left", "right"), ("A", "B"), ("north", "south"), ("east", "west"), ("up", "down"))

ANIMALS = _phrases(
    *("dog barks", "cat meows", "cow gives milk", "bird sings", "fish swims", "lion roars"),
    *("bee makes honey", "horse gallops", "sheep gives wool", "hen lays eggs", "frog croaks"),
    *("spider spins webs", "snake hisses", "monkey eats bananas", "pig oinks", "mouse eats cheese"),
    *("rabbit eats carrots", "owl hoots"),
)
PEOPLE = _phrases(
    *("baker bakes bread", "pilot flies planes", "farmer grows crops", "teacher teaches children"),
    *("doctor treats patients", "painter paints pictures", "singer sings songs"),
    *("writer writes books", "driver drives a car", "cook cooks meals", "sailor sails ships"),
    *("dentist fixes teeth", "soldier fights wars", "tailor sews clothes"),
    *("fisherman catches fish", "hunter hunts animals"),
)
DESCRIPTIONS = {name: f"animal that {does}" for name, does in ANIMALS.items()} | {
    name: f"person who {does}" for name, does in PEOPLE.items()
}
COLOURS = _words("red blue green white black brown yellow pink orange purple grey gold")

SUBJECTS: tuple[tuple[str, str], ...] = (
    *(
        (noun, f"{noun}s")
        for noun in _words("""teacher doctor boy girl student farmer painter singer driver nurse pilot
            friend player worker writer lawyer""")
    ),
    # Of the same length in any tokens, bytes included.
    *(
        (f"{stem}man", f"{stem}men")
        for stem in _words("fire police sales milk post wo craft gentle work sports fisher chair")
    ),
)
ATTRACTORS = _words(
    "car tree house table window door garden river chair lamp school bridge boat shop truck tower"
)
PREPOSITIONS = _words("near behind beside by")
QUALITIES = _words("old young tall small happy tired quiet late new big")
VERBS = (("is", "are"), ("was", "were"))


def copying(rng: Random) -> Pair:
    """Lists of three words and an arrow to one of them, the first in some prompts and the last in others.

    Corrupt: that word of the last list is another.
    """
    place = rng.choice((0, -1))

    def line(words: list[str]) -> str:
        return f"- {', '.join(words)} ->"

    lists = [rng.sample(THINGS, 3) for _ in range(8)]
    shown = "".join(f"{line(words)} {words[place]}\n" for words in lists)
    *words, distractor = rng.sample(THINGS, 4)
    changed = list(words)
    changed[place] = distractor
    return _pair(shown + line(words), shown + line(changed), words[place], distractor)


def labels(rng: Random) -> Pair:
    """Words of two kinds, each with its kind's label. Corrupt: the labels of all examples are swapped."""
    kinds = rng.sample(CLASSES, 2)
    own, other = rng.sample(rng.choice(LABELS), 2)
    asked, *first = rng.sample(kinds[0], 11)
    examples = [(word, 0) for word in first] + [(word, 1) for word in rng.sample(kinds[1], 10)]
    rng.shuffle(examples)

    def text(*names: str) -> str:
        return "".join(f"{word}: {names[kind]}\n" for word, kind in examples) + f"{asked}:"

    return _pair(text(own, other), text(other, own), own, other)


def arithmetic(rng: Random) -> Pair:
    """Chains of three sums of digits, each going on from the last. Corrupt: the last number added is another."""
    shown = "".join(f"{_chain(*_steps(rng))}\n" for _ in range(4))
    start, first, second, added = _steps(rng)
    so_far = start + first + second
    changed = rng.choice([n for n in range(1, 10 - so_far) if n != added])
    clean, corrupt = (f"{shown}{_chain(start, first, second, n)[:-2]}" for n in (added, changed))
    return _pair(clean, corrupt, str(so_far + added), str(so_far + changed))


def _steps(rng: Random) -> list[int]:
    """A digit and three to add, with a sum of at most 9, where the last may be at least 2."""
    while True:
        steps = [rng.randint(1, 4) for _ in range(4)]
        if sum(steps) <= 9 and sum(steps[:3]) <= 7:
            return steps


def _chain(*steps: int) -> str:
    """`3 + 1 = 4, 4 + 2 = 6`: every sum of a running total."""
    totals = list(accumulate(steps))
    return ", ".join(
        f"{a} + {n} = {b}" for a, n, b in zip(totals, steps[1:], totals[1:], strict=False)
    )


def lookup(rng: Random) -> Pair:
    """Who lives in which house, then the houses by description, `the animal that barks`.

    Corrupt: the one asked for last lives in another house.
    """
    names = rng.sample(list(DESCRIPTIONS), 4)
    order = rng.sample(range(4), 4)
    *houses, distractor = rng.sample(COLOURS, 5)

    def text(last: str) -> str:
        facts, asked = [], []
        for name, colour in zip(names, [*houses[:-1], last], strict=True):
            kind, _, does = DESCRIPTIONS[name].partition(" ")
            facts.append(f"The {name} {does} lives in the {colour} house.")
            asked.append(f"The {kind} {does} lives in the {colour} house.")
        asked[-1] = asked[-1].removesuffix(f" {last} house.")
        return "\n".join([" ".join(facts[i] for i in order), *asked])

    return _pair(text(houses[-1]), text(distractor), houses[-1], distractor)


def agreement(rng: Random) -> Pair:
    """Sentences whose verb agrees with the subject, not with the noun of the other number before it.

    Corrupt: the last subject's number is changed. The first token in which the verbs differ is the answer.
    """
    verbs = rng.choice(VERBS)
    subjects, others = rng.sample(SUBJECTS, 7), rng.sample(ATTRACTORS, 7)

    def start(index: int, many: int, other_many: int, where: str) -> str:
        other = others[index] + "s" * other_many
        return f"The {subjects[index][many]} {where} the {other}"

    shown = ""
    for index in range(6):
        many = rng.randrange(2)
        begun = start(index, many, 1 - many, rng.choice(PREPOSITIONS))
        shown += f"{begun} {verbs[many]} {rng.choice(QUALITIES)}.\n"
    many, where = rng.randrange(2), rng.choice(PREPOSITIONS)
    clean, corrupt = (shown + start(6, number, 1 - many, where) for number in (many, 1 - many))
    return _pair(clean, corrupt, verbs[many], verbs[1 - many])._replace(cut=True)


def _pair(clean: str, corrupt: str, answer: str, distractor: str) -> Pair:
    return Pair(clean, corrupt, f" {answer}", f" {distractor}")


GENERAL: Mapping[str, Callable[[Random], Pair]] = {
    "copying": copying,
    "labels": labels,
    "arithmetic": arithmetic,
    "lookup": lookup,
    "agreement": agreement,
}
"""Draws a pair of each kind from random numbers alone."""
