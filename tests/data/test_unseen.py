"""The family of retrieval prompts for evaluation alone: it can be answered, and no training prompt has its words."""

from __future__ import annotations

import re
from itertools import islice
from random import Random

import pytest
from transformers import PreTrainedTokenizerBase

from archsearch.data.lexicon import haystack_sentences
from archsearch.data.niah import Probe, retrieval_rows
from archsearch.data.prompts import KEYS, NUMBERS
from archsearch.data.scenes import CHAIN, SCENES
from archsearch.data.tasks import RETRIEVAL_KINDS, UnknownWords, make_probes
from archsearch.data.unseen import (
    OWNERS,
    PASSWORDS,
    SHORT,
    draw_other_word,
    draw_words,
    notes,
    num_words,
)
from archsearch.errors import ConfigError
from archsearch.metrics import RetrievalKind
from archsearch.models.teacher import byte_tokenizer

from .tokenizers_for_tests import merging_tokenizer, word_tokenizer

WINDOW = 5
"""Words in a row that count as the same text."""


def draw(
    kind: RetrievalKind,
    count: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **options: int,
) -> list[Probe]:
    options = {"context": 2000, "keys": 3, "digits": 7, "seed": 0} | options
    context = options.pop("context")
    tokenizer = tokenizer or byte_tokenizer()
    return make_probes(tokenizer, kind, count, context, unseen=True, **options)


def asked_owner(prompt: str) -> str:
    return re.findall(r"[A-Z][a-z]+", prompt.splitlines()[-1])[-1]


def password(prompt: str) -> str:
    [found] = re.findall(
        rf"{asked_owner(prompt)} opens the vault with the password (\w+)\.", prompt
    )
    return str(found)


def word_not_said(prompt: str) -> str:
    owner = asked_owner(prompt)
    hidden, said = (
        re.findall(rf"{owner} locks one of the chests with the word (\w+)\.", part)
        for part in prompt.split("With which words")
    )
    [left] = set(hidden) - set(said)
    return str(left)


def traced_name(prompt: str) -> str:
    owner, haystack = asked_owner(prompt), prompt.partition("To which")[0]
    while before := re.findall(rf"{owner} answers to the same code name as (\w+)\.", haystack):
        [owner] = before
    [name] = re.findall(rf"{owner} answers to the code name (\w+)\.", haystack)
    return str(name)


SOLVERS = {
    "single": password,
    "multikey": password,
    "multivalue": word_not_said,
    "multiquery": password,
    "tracking": traced_name,
}


@pytest.mark.parametrize("kind", RETRIEVAL_KINDS)
@pytest.mark.parametrize("keys", [2, 4])
def test_prompts_call_for_answer_and_distractor(kind: RetrievalKind, keys: int) -> None:
    tokenizer = byte_tokenizer()
    for probe in draw(kind, 8, keys=keys):
        assert (probe.kind, probe.context) == (f"unseen_{kind}", 2000)
        assert 2000 - 16 <= len(probe.prompt) + len(probe.answer) <= 2000
        for ids, answer in (
            (probe.prompt, probe.answer),
            (probe.corrupt_prompt, probe.distractor),
        ):
            text = tokenizer.decode(ids)
            begun = text.rpartition(" ")[2]
            asked = text.removesuffix(begun).rstrip()
            if kind == "multiquery":  # Those asked before have their answers already.
                asked = asked.partition("Which password")[0] + "\n" + asked.splitlines()[-1]
            assert SOLVERS[kind](asked) == begun + tokenizer.decode(answer)


@pytest.mark.parametrize("kind", RETRIEVAL_KINDS)
def test_pairs_line_up_where_tokens_merge(kind: RetrievalKind) -> None:
    for probe in draw(kind, 4, merging_tokenizer(), context=700, keys=2):
        assert len(probe.prompt) == len(probe.corrupt_prompt)
        assert len(probe.answer) == len(probe.distractor) > 0
        assert probe.answer[0] != probe.distractor[0]


def test_a_probe_depends_on_neither_count_nor_start() -> None:
    probes = draw("multikey", 5)
    assert draw("multikey", 2, start=2) == probes[2:4]
    assert not {p.prompt for p in draw("multikey", 5, seed=1)} & {p.prompt for p in probes}


def test_a_tokenizer_without_the_words_is_named() -> None:
    with pytest.raises(UnknownWords, match="unseen_single probes: this tokenizer has no token"):
        draw("single", 1, word_tokenizer(general_words=True), context=400)


def test_more_keys_than_there_are_are_refused() -> None:
    with pytest.raises(ConfigError, match=f"allowed: 1 to {len(OWNERS)} at 7 digits"):
        draw("multikey", 1, keys=len(OWNERS) + 1, context=8000)
    assert len(OWNERS) >= 12 * CHAIN


@pytest.mark.parametrize("digits", [1, 4, 7])
def test_values_are_words_that_differ(digits: int) -> None:
    rng = Random(0)
    words = draw_words(rng, 40, digits)
    assert len(set(words)) == 40 < num_words(digits)
    for word in words:
        other = draw_other_word(rng, word, {*words})
        assert other not in words
        assert len(other) == len(word) >= 4
        assert all(a != b for a, b in zip(word, other, strict=True))


def word_windows(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"[a-z]+", text.lower())
    return {tuple(words[i : i + WINDOW]) for i in range(len(words) - WINDOW + 1)}


def test_training_rows_hold_nothing_of_it() -> None:
    tokenizer = byte_tokenizer()
    rows = retrieval_rows(tokenizer, 40, 1500, keys=4, digits=7, seed=0)
    trained = " ".join(tokenizer.decode(row.tolist()) for row in rows)
    # What training rows do not happen to hold, but could.
    rng = Random(1)
    trained += " ".join(islice(haystack_sentences(rng), 3000))
    known = word_windows(trained)
    for kind in RETRIEVAL_KINDS:
        texts = [tokenizer.decode(probe.prompt) for probe in draw(kind, 10, keys=4)]
        assert not set().union(*map(word_windows, texts)) & known
    own = [
        getattr(PASSWORDS, n) for n in ("needle", "one_value", "first_of_chain", "next_in_chain")
    ]
    for text in own:
        stem = text.replace("{key}", "").partition("{")[0].strip()
        assert stem not in trained
    assert not set(re.findall(r"[A-Z][a-z]+", trained)) & set(OWNERS)
    assert "password" not in trained


def test_nothing_is_shared_with_the_other_family() -> None:
    """Also what training does not use today: the keys, the needles and the short sentences of probes.kinds."""
    assert not set(OWNERS) & set(KEYS)
    assert not set(SHORT) & set(NUMBERS.filler.short)
    haystack = " ".join(islice(notes(Random(0)), 2000))
    assert not any(owner in haystack for owner in OWNERS)
    assert not re.search(r"\d", haystack)
    scenes = (SCENES[kind](Random(3), 4, 7, 0.5, NUMBERS) for kind in RETRIEVAL_KINDS)
    texts = [text for scene in scenes for text in (scene.questions, scene.needle)]
    own = (SCENES[kind](Random(3), 4, 7, 0.5, PASSWORDS) for kind in RETRIEVAL_KINDS)
    others = [text for scene in own for text in (scene.questions, scene.needle)]
    assert not set().union(*map(word_windows, texts)) & set().union(*map(word_windows, others))
