"""The text of retrieval prompts: filler that hides sentences, and questions about them; and its tokens.

What is hidden and asked for each kind of probe lies in scenes.py; what a probe or a training row makes of
a prompt lies in niah.py and tasks.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import islice
from random import Random

from transformers import PreTrainedTokenizerBase

from ..errors import ConfigError
from .lexicon import SHORT_SENTENCES, filler_vocabulary, haystack_sentences, pieces

_KEYS = """
    badger beaver bison camel cheetah cobra coyote crane donkey eagle elephant falcon ferret finch
    flamingo gazelle gecko giraffe goose gorilla hamster hare hedgehog heron hippo hornet hyena ibis
    iguana jackal jaguar kangaroo koala lemur leopard lizard llama lobster lynx magpie marmot moose
    moth octopus orca ostrich otter owl panda panther parrot pelican penguin pigeon puffin puma
    python rabbit raccoon raven salmon scorpion seal shark sloth sparrow spider squid stork swan
    tiger toad trout turtle walrus weasel whale wolf wombat zebra
"""
KEYS: tuple[str, ...] = tuple(_KEYS.split())
"""What needles are about: words that occur nowhere in the filler."""

_DRAWS = 50
_SENTENCE_TOKENS = 12
_PASSAGE = re.compile(r".+?(?:[.!?][\"')\]]*\s+|\n+|$)", re.DOTALL)
"""A passage of text after which a needle may stand, with the whitespace behind it."""


@dataclass(frozen=True)
class Scene:
    """What a prompt hides in its filler and what it asks.

    groups are the hidden sentences; those of a group keep their order in the haystack. groups[asked][0]
    holds the value asked for, which is the answer; questions end with the word before it.
    """

    groups: tuple[tuple[str, ...], ...]
    asked: int
    depth: float
    """Where groups[asked][0] lies: 0 is the start and 1 the end of the haystack."""
    questions: str
    answer: str
    values: frozenset[str]
    """Every value in the prompt, which a distractor must not be."""

    @property
    def needle(self) -> str:
        """The sentence that holds the answer."""
        return self.groups[self.asked][0]


@dataclass(frozen=True)
class Filler:
    """What hides the needles of a prompt."""

    sentences: Callable[[Random], Iterator[str]] = haystack_sentences
    """Sentences without end, none of which holds a needle's words."""
    short: tuple[str, ...] = SHORT_SENTENCES
    """Close the gap that whole sentences leave."""


@dataclass(frozen=True)
class Style:
    """The words of retrieval prompts: texts around {key} and {value}, and where both come from."""

    keys: tuple[str, ...]
    needle: str
    question: str
    """Ends with the word before the value."""
    one_value: str
    """The needle of one of several values; the value follows as ` VALUE.`"""
    all_values: str
    """The question about several values; the answers follow after a space."""
    first_of_chain: str
    next_in_chain: str
    """Sets {key} to what {before} is."""
    chain_question: str
    num_values: Callable[[int], int]
    """How many values there are of that many digits."""
    values: Callable[[Random, int, int], list[str]]
    """Draws so many values of that many digits, no two alike."""
    distractor: Callable[[Random, str, Set[str]], str]
    """Draws a value like another, none of the taken."""
    filler: Filler = Filler()


@dataclass(frozen=True)
class Script:
    """The words of one prompt about keys but for its filler: each key's value, and the keys asked, the last one open."""

    values: dict[str, str]
    asked: tuple[str, ...]
    depth: float
    """Where the needle of the key asked last lies, as in Scene."""
    style: Style = field(default_factory=lambda: NUMBERS)

    def scene(self) -> Scene:
        """The script's needles, and its questions with all answers but the last."""
        *answered, open_key = self.asked
        style = self.style
        ask = {key: style.question.format(key=key) for key in self.asked}
        parts = [f"{ask[key]} {self.values[key]}." for key in answered]
        needles = (style.needle.format(key=k, value=v) for k, v in self.values.items())
        return Scene(
            groups=tuple((text,) for text in needles),
            asked=list(self.values).index(open_key),
            depth=self.depth,
            questions="\n\n".join([*parts, ask[open_key]]),
            answer=self.values[open_key],
            values=frozenset(self.values.values()),
        )


def needle(key: str, value: str) -> str:
    """The sentence that hides value under key."""
    return NUMBERS.needle.format(key=key, value=value)


def question(key: str) -> str:
    """The question about key, up to the word before its value; the answer follows as ` VALUE`."""
    return NUMBERS.question.format(key=key)


def vocabulary() -> list[str]:
    """Every piece (see lexicon.pieces) that filler, needles and questions of keys can hold, digits aside."""
    words = set(filler_vocabulary()) | set(KEYS)
    words |= set(pieces(needle(KEYS[0], "0"))) | set(pieces(question(KEYS[0])))
    return sorted(words - set("0123456789"))


def draw_script(
    rng: Random, num_keys: int, digits: int, depth: float, style: Style | None = None
) -> Script:
    """Draws keys and values, no two alike, and asks for the first key.

    Raises ConfigError where there are not as many keys, or values with one left over as a distractor.
    """
    style = style or NUMBERS  # Which stands further down.
    check_count(num_keys, len(style.keys), digits, style)
    keys = rng.sample(style.keys, num_keys)
    values = style.values(rng, num_keys, digits)
    return Script(dict(zip(keys, values, strict=True)), (keys[0],), depth, style)


def check_count(count: int, most: int, digits: int, style: Style) -> None:
    """Raises ConfigError where count is not between 1 and most, or leaves no value over as a distractor."""
    most = min(most, style.num_values(digits) - 1)
    if not 1 <= count <= most:
        raise ConfigError(f"probes.multi_keys: {count}; allowed: 1 to {most} at {digits} digits")


def draw_values(rng: Random, count: int, digits: int) -> list[str]:
    """Numbers of that many digits, no two alike and none with a leading zero."""
    values: list[str] = []
    while len(values) < count:
        value = _number(rng, digits)
        if value not in values:
            values.append(value)
    return values


def draw_distractor(rng: Random, value: str, taken: Set[str]) -> str:
    """A number as long as value that is not among the taken, of which value is one.

    Where it can, it has another digit than value at every place.
    """
    for _ in range(_DRAWS):
        digits = [rng.choice([d for d in "0123456789" if d != old]) for old in value]
        distractor = "".join(digits)
        if digits[0] != "0" and distractor not in taken:
            return distractor
    while (distractor := _number(rng, len(value))) in taken:
        pass
    return distractor


NUMBERS: Style = Style(
    keys=KEYS,
    needle="The special magic number for {key} is {value}.",
    question="Question: What is the special magic number for {key}?\n"
    "Answer: The special magic number for {key} is",
    one_value="One of the special magic numbers for {key} is",
    all_values="Question: What are all the special magic numbers for {key}?\nAnswer:",
    first_of_chain="VAR {key} = {value}.",
    next_in_chain="VAR {key} = VAR {before}.",
    chain_question="Question: What is the value of VAR {key}?\nAnswer: The value of VAR {key} is",
    num_values=lambda digits: 9 * 10 ** (digits - 1),
    values=draw_values,
    distractor=draw_distractor,
)
"""The words of training prompts and of the probes in probes.kinds."""


def compose(
    tokenizer: PreTrainedTokenizerBase,
    rng: Random,
    scene: Scene,
    max_tokens: int,
    source: Filler | None = None,
) -> str:
    """Writes the prompt, without its answer; with it, it takes max_tokens tokens or a few less.

    Raises ConfigError where the hidden sentences and questions alone take more.
    """
    filler = _draw_filler(
        tokenizer, rng, _room(tokenizer, scene, max_tokens), source or NUMBERS.filler
    )
    while True:
        text = f"{' '.join(_hide(rng, filler, scene))}\n\n{scene.questions}"
        if not filler or len(encode(tokenizer, f"{text} {scene.answer}")) <= max_tokens:
            return text
        # Lengths do not quite add up: a tokenizer may merge across sentences, or split the first word.
        filler.remove(min(filler, key=len))


def compose_in_text(
    tokenizer: PreTrainedTokenizerBase,
    rng: Random,
    scene: Scene,
    max_tokens: int,
    ids: Sequence[int],
) -> str:
    """As compose, with the needles between the passages of a text, given by its tokens, of which it keeps the first.

    Passages end with a sentence or a line. Raises ConfigError as compose does.
    """
    room = _room(tokenizer, scene, max_tokens)
    needles = {text for group in scene.groups for text in group}
    while True:
        # The cut may go through a character of several tokens.
        text = str(tokenizer.decode(list(ids[:room]), skip_special_tokens=True)).rstrip("\ufffd")
        parts = _hide(rng, _PASSAGE.findall(text.strip() + "\n"), scene)
        hidden = "".join(f"{part} " if part in needles else part for part in parts)
        prompt = f"{hidden.rstrip()}\n\n{scene.questions}"
        excess = len(encode(tokenizer, f"{prompt} {scene.answer}")) - max_tokens
        if excess <= 0 or not room:
            return prompt
        room = max(0, room - excess)


def _room(tokenizer: PreTrainedTokenizerBase, scene: Scene, max_tokens: int) -> int:
    """Tokens that are left for what hides the needles."""
    bare = _bare_tokens(tokenizer, scene)
    if bare > max_tokens:
        raise ConfigError(
            f"retrieval prompts: {max_tokens} tokens are too short for {sum(map(len, scene.groups))} "
            f"needles and their questions with this tokenizer; allowed: {bare} or more"
        )
    return max_tokens - bare


def fewer_questions(tokenizer: PreTrainedTokenizerBase, script: Script, max_tokens: int) -> Script:
    """The script with its first questions left out until the rest takes max_tokens, or one is left."""
    while len(script.asked) > 1 and _bare_tokens(tokenizer, script.scene()) > max_tokens:
        script = replace(script, asked=script.asked[1:])
    return script


def _bare_tokens(tokenizer: PreTrainedTokenizerBase, scene: Scene) -> int:
    """Tokens of a prompt without filler, its answer included."""
    hidden = " ".join(text for group in scene.groups for text in group)
    return len(encode(tokenizer, f"{hidden}\n\n{scene.questions} {scene.answer}"))


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of text after whatever the tokenizer starts a text with, and nothing at its end."""
    return start_tokens(tokenizer) + _encode_parts(tokenizer, [text])[0]


def start_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before a text: BOS, or nothing."""
    # The text's own first token tells where that ends.
    bare = _encode_parts(tokenizer, ["The"])[0]
    full = list(tokenizer("The")["input_ids"])
    return full[: full.index(bare[0])] if bare and bare[0] in full else []


def _number(rng: Random, digits: int) -> str:
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def _hide(rng: Random, filler: list[str], scene: Scene) -> list[str]:
    """Filler sentences with the needle asked for at its depth and the others anywhere, groups in order."""
    placed: list[tuple[float, str]] = []
    for index, group in enumerate(scene.groups):
        if index == scene.asked:
            later = (scene.depth + (1 - scene.depth) * rng.random() for _ in group[1:])
            places = [scene.depth, *sorted(later)]
        else:
            places = sorted(rng.random() for _ in group)
        placed += zip(places, group, strict=True)
    hidden = list(filler)
    # From the back, so that earlier places stay where they are.
    for place, text in sorted(placed, reverse=True):
        hidden.insert(round(place * len(filler)), text)
    return hidden


def _draw_filler(
    tokenizer: PreTrainedTokenizerBase, rng: Random, budget: int, source: Filler
) -> list[str]:
    """Filler sentences that take budget tokens together, or a few less."""
    stream = source.sentences(rng)
    chosen: list[str] = []
    full = False
    while not full:
        batch = list(islice(stream, 8 + budget // _SENTENCE_TOKENS))
        for text, size in _sizes(tokenizer, batch):
            full = full or size > budget
            if size <= budget:
                chosen.append(text)
                budget -= size
    # The gap that whole sentences leave is closed with short ones.
    short = _sizes(tokenizer, list(source.short))
    while fitting := [(text, size) for text, size in short if size <= budget]:
        text, size = rng.choice(fitting)
        chosen.insert(rng.randint(0, len(chosen)), text)
        budget -= size
    return chosen


def _sizes(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[tuple[str, int]]:
    """Each text with its number of tokens after a space."""
    parts = _encode_parts(tokenizer, [f" {text}" for text in texts])
    return [(text, max(1, len(ids))) for text, ids in zip(texts, parts, strict=True)]


def _encode_parts(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    return list(tokenizer(texts, add_special_tokens=False)["input_ids"])
