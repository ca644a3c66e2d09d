"""Probes of every kind, for tokenizers of every habit, against solvers that read the prompts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import get_args

import pytest
from transformers import PreTrainedTokenizerBase

from archsearch.config import GeneralKind, Metric, ProbeKind, RetrievalKind
from archsearch.data.general import CLASSES, GENERAL
from archsearch.data.niah import Probe
from archsearch.data.scenes import CHAIN, QUERIES, SCENES
from archsearch.data.tasks import GENERAL_KINDS, RETRIEVAL_KINDS, make_probes, metric_name
from archsearch.errors import ConfigError
from archsearch.models.teacher import byte_tokenizer

from .tokenizers_for_tests import TOKENIZERS, unary_tokenizer, word_tokenizer

KINDS: tuple[ProbeKind, ...] = (*RETRIEVAL_KINDS, *GENERAL_KINDS)
CONTEXT = 1500


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    return TOKENIZERS[request.param]()


def draw(
    tokenizer: PreTrainedTokenizerBase, kind: ProbeKind, count: int = 6, **options: int
) -> list[Probe]:
    options = {"context": CONTEXT, "keys": 3, "digits": 5, "seed": 0} | options
    context = options.pop("context")
    return make_probes(tokenizer, kind, count, context, **options)


def texts(probe: Probe) -> tuple[str, str, str, str]:
    """Clean and corrupt prompt, answer and distractor, of byte tokens; the answer is whole."""
    tokenizer = byte_tokenizer()
    clean, corrupt = tokenizer.decode(probe.prompt), tokenizer.decode(probe.corrupt_prompt)
    # What answer and distractor have in common has gone to the prompt.
    shared = re.search(r"\w*$", clean)
    assert shared is not None
    answer, distractor = (
        shared[0] + tokenizer.decode(ids) for ids in (probe.answer, probe.distractor)
    )
    size = len(clean) - len(shared[0])
    return clean[:size].rstrip(), corrupt[:size].rstrip(), answer.strip(), distractor.strip()


def differences(probe: Probe) -> list[int]:
    pairs = zip(probe.prompt, probe.corrupt_prompt, strict=True)
    return [i for i, (a, b) in enumerate(pairs) if a != b]


# What each kind asks, answered from the text of a prompt alone.


def needle_value(prompt: str) -> str:
    key = re.search(r"magic number for (\w+) is$", prompt)
    assert key is not None
    haystack = prompt.partition("Question:")[0]
    [value] = re.findall(rf"The special magic number for {key[1]} is (\d+)\.", haystack)
    return str(value)


def value_not_said(prompt: str) -> str:
    haystack, _, answer = prompt.partition("Question:")
    hidden, said = (re.findall(r"numbers for \w+ is (\d+)\.", part) for part in (haystack, answer))
    [left] = set(hidden) - set(said)
    assert len(set(hidden)) == len(hidden) == len(said) + 1
    return str(left)


def traced_value(prompt: str) -> str:
    known: dict[str, str] = {}
    # In their order: a variable that is not set yet would be a fault.
    for name, value in re.findall(
        r"VAR (\w+) = (?:VAR )?(\w+)\.", prompt.partition("Question:")[0]
    ):
        known[name] = value if value.isdigit() else known[value]
    asked = re.search(r"The value of VAR (\w+) is$", prompt)
    assert asked is not None
    return known[asked[1]]


def copied_word(prompt: str) -> str:
    *shown, last = ([*re.findall(r"\w+", line)] for line in prompt.split("\n"))
    rules: dict[str, Callable[[list[str]], str]] = {"first": lambda w: w[0], "last": lambda w: w[2]}
    [rule] = [rule for rule in rules.values() if all(rule(w) == w[3] for w in shown)]
    assert len(last) == 3
    return rule(last)


def label(prompt: str) -> str:
    *lines, last = prompt.split("\n")
    shown = dict(line.split(": ") for line in lines)
    # Some words are of two classes: the right one is that of half the examples.
    classes = [words for words in CLASSES if last.removesuffix(":") in words]
    [own] = [words for words in classes if len(set(words) & set(shown)) == len(shown) // 2]
    [found] = {name for word, name in shown.items() if word in own}
    [other] = {name for word, name in shown.items() if word not in own}
    assert found != other
    return found


def total(prompt: str) -> str:
    sums = re.findall(r"(\d+) \+ (\d+) = (\d+)", prompt)
    assert all(int(a) + int(b) == int(c) for a, b, c in sums)
    last = re.search(r"= (\d+), (\d+) \+ (\d+) =$", prompt)
    assert last is not None
    assert last[1] == last[2]
    return str(int(last[2]) + int(last[3]))


def house(prompt: str) -> str:
    facts, *lines = prompt.split("\n")
    said = re.findall(r"The (\w+) (?:that|who) (.*?) lives in the (\w+) house\.", facts)
    houses = {does: colour for _, does, colour in said}
    asked = [line.split(" ", 3)[3].split(" lives in the") for line in lines]
    assert len(houses) == len(asked) == 4
    for does, rest in asked[:-1]:
        assert rest == f" {houses[does]} house."
    return str(houses[asked[-1][0]])


def verb(prompt: str) -> str:
    many: dict[bool, set[str]] = {False: set(), True: set()}
    for line in prompt.split("\n"):
        match = re.fullmatch(r"The (\w+) \w+ the (\w+?)(s?)(?: (\w+) \w+\.)?", line)
        assert match is not None
        plural = match[1].endswith(("s", "men"))
        if match[4]:
            assert plural != bool(match[3])
            many[plural].add(match[4])
    verbs = {False: {"is", "was"}, True: {"are", "were"}}
    past = bool((many[False] | many[True]) & {"was", "were"})
    assert all(many[k] <= verbs[k] for k in many)
    return (("is", "are"), ("was", "were"))[past][plural]


SOLVERS: dict[ProbeKind, Callable[[str], str]] = {
    "single": needle_value,
    "multikey": needle_value,
    "multivalue": value_not_said,
    "multiquery": needle_value,
    "tracking": traced_value,
    "copying": copied_word,
    "labels": label,
    "arithmetic": total,
    "lookup": house,
    "agreement": verb,
}


def test_tables_hold_the_kinds_of_the_config() -> None:
    assert tuple(SCENES) == RETRIEVAL_KINDS == get_args(RetrievalKind)
    assert tuple(GENERAL) == GENERAL_KINDS == get_args(GeneralKind)
    names = {f"{metric_name(kind)}_{figure}" for kind in KINDS for figure in ("nll", "match")}
    names |= {"general_nll", "general_match"}
    others = {"kl", "top1_agreement", "fa_share", "cache_bytes"}
    assert names | others == set(get_args(Metric))


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_line_up_in_any_tokens(tokenizer: PreTrainedTokenizerBase, kind: ProbeKind) -> None:
    probes = draw(tokenizer, kind)
    assert len(probes) == 6
    for probe in probes:
        length = len(probe.prompt) + len(probe.answer)
        assert probe.kind == kind
        assert len(probe.prompt) == len(probe.corrupt_prompt)
        assert len(probe.answer) == len(probe.distractor) > 0
        assert probe.answer[0] != probe.distractor[0]
        changed = differences(probe)
        assert changed
        if kind in RETRIEVAL_KINDS:
            assert probe.context == CONTEXT
            assert CONTEXT - 16 <= length <= CONTEXT
        else:
            assert probe.context == length
        if kind not in ("labels", "agreement"):
            # One value's tokens, give or take one that holds a neighbouring character too.
            assert changed[-1] - changed[0] + 1 <= len(probe.answer) + 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keys", [2, 5])
def test_prompts_call_for_answer_and_distractor(kind: ProbeKind, keys: int) -> None:
    for probe in draw(byte_tokenizer(), kind, 20, keys=keys, context=2600):
        clean, corrupt, answer, distractor = texts(probe)
        if kind == "agreement":
            # Cut to the shorter verb.
            assert SOLVERS[kind](clean).startswith(answer)
            assert SOLVERS[kind](corrupt).startswith(distractor)
        else:
            assert SOLVERS[kind](clean) == answer
            assert SOLVERS[kind](corrupt) == distractor


@pytest.mark.parametrize("kind", RETRIEVAL_KINDS)
def test_a_distractor_is_new_to_its_prompt(kind: ProbeKind) -> None:
    for probe in draw(byte_tokenizer(), kind, 20, digits=1, keys=4):
        clean, corrupt, answer, distractor = texts(probe)
        assert distractor not in re.findall(r"\d", clean)
        assert answer not in re.findall(r"\d", corrupt)


@pytest.mark.parametrize("kind", KINDS)
def test_hundreds_of_probes_are_distinct(kind: ProbeKind) -> None:
    probes = draw(word_tokenizer(general_words=True), kind, 150, context=300, keys=2)
    assert len({probe.prompt for probe in probes}) == 150
    assert len({(probe.answer, probe.distractor) for probe in probes}) >= 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_probe_depends_on_neither_count_nor_start(kind: ProbeKind) -> None:
    tokenizer = word_tokenizer(general_words=True)
    probes = draw(tokenizer, kind, 6, context=400)
    assert draw(tokenizer, kind, 3, context=400, start=2) == probes[2:5]
    assert draw(tokenizer, kind, 0, context=400) == []
    others = draw(tokenizer, kind, 6, context=400, seed=1)
    assert not {probe.prompt for probe in others} & {probe.prompt for probe in probes}


@pytest.mark.parametrize("kind", GENERAL_KINDS)
def test_general_probes_ignore_what_shapes_haystacks(kind: ProbeKind) -> None:
    tokenizer = word_tokenizer(general_words=True)
    assert draw(tokenizer, kind) == draw(tokenizer, kind, context=9, keys=7, digits=1)
    sizes = [probe.context for probe in draw(tokenizer, kind, 20)]
    assert min(sizes) >= 50
    assert max(sizes) <= 400


@pytest.mark.parametrize("kind", RETRIEVAL_KINDS)
@pytest.mark.parametrize("start", [0, 13])
def test_depths_are_spread(kind: ProbeKind, start: int) -> None:
    probes = draw(word_tokenizer(general_words=True), kind, 8, context=1200, start=start)
    eighths = sorted(int(8 * differences(probe)[0] / len(probe.prompt)) for probe in probes)
    assert len(set(eighths)) >= 6
    assert eighths[0] <= 1
    assert eighths[-1] >= 6


def test_needle_probes_stay_the_same() -> None:
    """Pinned so that later figures compare: a change here makes them incomparable."""
    ids = [
        (probe.prompt, probe.answer, probe.corrupt_prompt, probe.distractor)
        for kind in ("single", "multikey")
        for probe in draw(byte_tokenizer(), kind, 3, seed=5)
    ]
    assert hashlib.sha256(repr(ids).encode()).hexdigest()[:16] == "8ce58b44d00725f3"


def test_a_lone_space_stays_in_the_prompt() -> None:
    [probe] = draw(byte_tokenizer(), "single", 1, digits=4)
    assert byte_tokenizer().decode(probe.prompt).endswith(" is ")
    assert len(probe.answer) == 4


@pytest.mark.parametrize("keys", [2, 3, 7])
def test_keys_count_what_is_hidden(keys: int) -> None:
    def haystack(kind: ProbeKind) -> tuple[str, str]:
        [probe] = draw(byte_tokenizer(), kind, 1, keys=keys, context=4000)
        hidden, _, questions = texts(probe)[0].partition("Question:")
        return hidden, questions

    assert haystack("single")[0].count("magic number") == 1
    assert haystack("multikey")[0].count("magic number") == keys
    assert haystack("multivalue")[0].count("magic numbers") == keys
    hidden, questions = haystack("multiquery")
    assert hidden.count("magic number") == keys
    assert questions.count("Answer:") == min(keys, QUERIES)
    hidden, questions = haystack("tracking")
    assert len(re.findall(r"VAR \w+ = \d", hidden)) == keys
    assert len(re.findall(r"VAR \w+ = VAR", hidden)) == keys * (CHAIN - 1)
    assert questions.count("Answer:") == 2


def test_answered_questions_are_answered_rightly() -> None:
    for kind in ("multiquery", "tracking"):
        for probe in draw(byte_tokenizer(), kind, 8, keys=4, context=3000):
            clean, _, answer, _ = texts(probe)
            haystack, questions = re.split(r"(?=Question:)", clean, maxsplit=1)
            parts = re.findall(r"(Question:.*?\nAnswer: .*? is) (\d+)\.", questions)
            assert len(parts) == (3 if kind == "multiquery" else 1)
            assert all(SOLVERS[kind](haystack + asked) == value for asked, value in parts)
            assert answer not in [value for _, value in parts]


@pytest.mark.parametrize("kind", RETRIEVAL_KINDS)
def test_a_short_context_is_refused(kind: ProbeKind) -> None:
    with pytest.raises(ConfigError, match=r"too short for .*allowed: \d+ or more") as error:
        draw(word_tokenizer(general_words=True), kind, 1, context=24)
    least = int(str(error.value).split("allowed: ")[1].split()[0])
    assert draw(word_tokenizer(general_words=True), kind, 1, context=least)


@pytest.mark.parametrize("kind", ["multikey", "multivalue", "multiquery", "tracking"])
def test_more_keys_than_there_are_words_or_numbers_are_refused(kind: ProbeKind) -> None:
    for keys, digits in ((99, 5), (9, 1)):
        with pytest.raises(ConfigError, match=rf"probes\.multi_keys: {keys}; allowed: 1 to \d+"):
            draw(word_tokenizer(general_words=True), kind, 1, keys=keys, digits=digits)


@pytest.mark.parametrize("kind", RETRIEVAL_KINDS)
def test_a_tokenizer_that_splits_answers_unevenly_is_refused(kind: ProbeKind) -> None:
    with pytest.raises(ConfigError) as error:
        draw(unary_tokenizer(), kind, 1, digits=1, context=400)
    message = str(error.value)
    assert message.startswith(f"probes.digits: {kind} probes: with this tokenizer 50 draws")
    assert re.search(r"distractor has \d tokens, ' \d'; answer has \d, ' \d'$", message)
    assert "\n" not in message


def test_a_general_kind_with_uneven_answers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^arithmetic probes: .* 50 draws .* has \d+ tokens"):
        draw(unary_tokenizer(), "arithmetic", 1)
    assert draw(unary_tokenizer(), "labels", 1)


@pytest.mark.parametrize("kind", KINDS)
def test_words_that_the_tokenizer_lacks_are_refused(kind: ProbeKind) -> None:
    if kind in ("single", "multikey", "multiquery"):
        assert draw(word_tokenizer(), kind, 1)
        with pytest.raises(ConfigError, match=rf"^probes\.digits: {kind} probes: "):
            draw(word_tokenizer(numbers=False), kind, 1, context=400)
        return
    with pytest.raises(
        ConfigError, match=f"{kind} probes: .*(no token for some of their words|same tokens)"
    ):
        draw(word_tokenizer(), kind, 1, context=400)


def test_an_unknown_kind_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="'double' is none of single, multikey"):
        draw(word_tokenizer(general_words=True), "double", 1)  # type: ignore[arg-type]
