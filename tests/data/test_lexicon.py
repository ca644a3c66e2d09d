"""The filler text: closed vocabulary, agreement, determinism."""

from __future__ import annotations

import re
from itertools import islice
from random import Random

from archsearch.data.lexicon import HE, SHE, TOPICS, filler_vocabulary, haystack_sentences, pieces


def _sentences(count: int, seed: int = 0) -> list[str]:
    return list(islice(haystack_sentences(Random(seed)), count))


def test_filler_vocabulary_is_what_the_generator_emits() -> None:
    emitted = {piece for sentence in _sentences(30_000) for piece in pieces(sentence)}
    assert emitted == set(filler_vocabulary())


def test_haystack_sentences_depend_on_the_seed_alone() -> None:
    assert _sentences(50) == _sentences(50)
    assert _sentences(50) != _sentences(50, seed=1)


def test_haystack_sentences_are_single_sentences() -> None:
    for sentence in _sentences(500):
        assert sentence[0].isupper()
        assert sentence.endswith(".")
        assert sentence.count(".") == 1
        assert sentence == " ".join(sentence.split())


def test_articles_fit_the_next_word() -> None:
    for sentence in _sentences(2000):
        for article, initial in re.findall(r"\b(a|an) (\w)", sentence):
            assert (article == "an") == (initial in "aeiou"), sentence


def test_verbs_agree_with_their_subjects() -> None:
    one = {verb[0] for topic in TOPICS for verb in topic.verbs}
    many = {verb[1] for topic in TOPICS for verb in topic.verbs} - {"read"}
    checked = 0
    for sentence in _sentences(5000):
        match = re.match(r"(They|He|She|The \w+s|[A-Z]\w+) (\w+) ", sentence)
        if match is None or match[1].startswith("The ") != (
            match[1][-1] == "s" and " " in match[1]
        ):
            continue
        plural = match[1] == "They" or match[1].startswith("The ")
        checked += match[2] in one | many
        assert match[2] not in (one if plural else many), sentence
    assert checked > 100


def test_pronouns_agree_with_the_last_name() -> None:
    last = None
    for sentence in _sentences(5000):
        words = set(pieces(sentence))
        named = words & {*SHE, *HE}
        if named:
            last = "she" if named <= set(SHE) else "he"
        elif words & {"she", "She"}:
            assert last == "she", sentence
        elif words & {"he", "He"}:
            assert last == "he", sentence


def test_pieces_splits_words_digits_and_marks() -> None:
    assert pieces("It is 407.\n\nNow: so?") == [
        *("It", "is", "4", "0", "7", "."),
        *("Now", ":", "so", "?"),
    ]
