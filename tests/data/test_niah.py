"""Alignment of clean and corrupt texts, training rows, stacking."""

from __future__ import annotations

import re
from itertools import islice
from random import Random

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from archsearch.data.lexicon import haystack_sentences
from archsearch.data.niah import Misaligned, Pair, Probe, align, retrieval_rows, stack
from archsearch.models.teacher import byte_tokenizer

from .tokenizers_for_tests import TOKENIZERS


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    return TOKENIZERS[request.param]()


def test_align_gives_the_texts_as_tokens() -> None:
    tokenizer = byte_tokenizer()
    probe = align(tokenizer, Pair("A is 12. A is", "A is 93. A is", " 12", " 93"), "user")
    assert tokenizer.decode(probe.prompt) == "A is 12. A is "
    assert tokenizer.decode(probe.corrupt_prompt) == "A is 93. A is "
    assert tokenizer.decode(probe.answer) == "12"
    assert tokenizer.decode(probe.distractor) == "93"
    assert (probe.kind, probe.context) == ("user", 16)


def test_align_cuts_the_longer_answer_where_that_is_asked_for() -> None:
    tokenizer = byte_tokenizer()
    pair = Pair("The man", "The men", " was", " were")
    with pytest.raises(Misaligned, match="distractor: 5 tokens, ' were'; answer has 4, ' was'"):
        align(tokenizer, pair, "user")
    for texts in (pair, Pair("The men", "The man", " were", " was")):
        probe = align(tokenizer, texts._replace(cut=True), "user")
        assert tokenizer.decode(probe.prompt).endswith(" w")
        assert {tokenizer.decode(probe.answer), tokenizer.decode(probe.distractor)} == {"as", "er"}


@pytest.mark.parametrize(
    ("pair", "field", "problem"),
    [
        (
            Pair("A 12 is", "A 123 is", " 1", " 2"),
            "corrupt",
            "10 tokens with the answer; clean has 9",
        ),
        (Pair("A 12 is", "A 13 is", " 1", " 1"), "distractor", "same tokens as the answer"),
        (Pair("A 12 is", "A 13 is", " 1", " 12"), "distractor", "3 tokens, ' 12'; answer has 2"),
        (Pair("A 12 is", "A 13 is", " 12", " 3"), "distractor", "2 tokens, ' 3'; answer has 3"),
        (Pair("A 12 is", "A 12 is", " 1", " 2"), "corrupt", "same tokens as clean"),
        (Pair("A 12 is", "AB 12is", " 1", " 2"), None, ""),
    ],
)
def test_align_says_what_does_not_line_up(pair: Pair, field: str | None, problem: str) -> None:
    tokenizer = byte_tokenizer()
    if field is None:
        assert align(tokenizer, pair, "user")
        return
    with pytest.raises(Misaligned, match=problem) as error:
        align(tokenizer, pair, "user")
    assert error.value.field == field


def test_align_refuses_an_answer_that_merges_with_one_prompt_only() -> None:
    words = {word: i for i, word in enumerate(("?", "a", "b", "x", "y", "bx"))}
    merging = Tokenizer(WordLevel(words, unk_token="?"))
    merging.pre_tokenizer = Split(Regex("bx|."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=merging)
    # b and x are one token, a and x are two: the rows are equally long, but end in other tokens.
    with pytest.raises(Misaligned, match="other tokens for 'x' than clean"):
        align(tokenizer, Pair("aa", "aab", "x", "y"), "user")


def test_stack_pads_on_the_left_and_points_at_the_answer() -> None:
    probes = [
        Probe("single", 8, (5, 6, 7), (8, 9), (5, 1, 7), (3, 4)),
        Probe("single", 8, (5, 6, 7, 7, 7), (4,), (5, 2, 7, 7, 7), (3,)),
        Probe("single", 8, (5,), (8, 9), (6,), (3, 4)),
    ]
    batch = stack(probes)
    assert batch.input_ids.tolist() == [
        [0, 5, 6, 7, 8, 9],
        [5, 6, 7, 7, 7, 4],
        [0, 0, 0, 5, 8, 9],
    ]
    assert batch.mask.tolist() == [[0, 1, 1, 1, 1, 1], [1] * 6, [0, 0, 0, 1, 1, 1]]
    assert batch.positions.tolist() == [[3, 4], [4, -1], [3, 4]]
    for row, positions, probe in zip(batch.input_ids, batch.positions, probes, strict=True):
        assert tuple(row[positions[positions >= 0] + 1].tolist()) == probe.answer
    corrupt = stack(probes, corrupt=True)
    assert corrupt.input_ids[0].tolist() == [0, 5, 1, 7, 8, 9]
    assert torch.equal(corrupt.positions, batch.positions)
    right = stack(probes, right=True)
    assert right.input_ids[2].tolist() == [5, 8, 9, 0, 0, 0]
    assert right.mask[2].tolist() == [1, 1, 1, 0, 0, 0]
    assert right.positions.tolist() == [[2, 3], [4, -1], [0, 1]]


def test_stack_of_nothing_is_empty() -> None:
    assert stack([]).input_ids.shape == (0, 0)


def test_retrieval_rows_are_full_and_hold_the_answers(tokenizer: PreTrainedTokenizerBase) -> None:
    seen: list[tuple[int, int]] = []
    rows = retrieval_rows(
        tokenizer, 4, 1100, keys=2, digits=6, seed=0, progress=lambda *at: seen.append(at)
    )
    assert rows.shape == (4, 1100)
    assert rows.dtype == np.uint32
    assert rows.max() < len(tokenizer)
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    again = retrieval_rows(tokenizer, 4, 1100, keys=2, digits=6, seed=0)
    assert np.array_equal(rows, again)
    assert not np.array_equal(rows, retrieval_rows(tokenizer, 4, 1100, keys=2, digits=6, seed=1))


def test_retrieval_rows_answer_every_question_rightly() -> None:
    tokenizer = byte_tokenizer()
    for index, row in enumerate(retrieval_rows(tokenizer, 4, 1100, keys=3, digits=6, seed=5)):
        text = tokenizer.decode(row.tolist())
        haystack, _, questions = text.partition("Question:")
        said = dict(re.findall(r"magic number for (\w+) is (\d{6})", haystack))
        answers = re.findall(r"Answer: The special magic number for (\w+) is (\d{6})", questions)
        assert dict(answers) == said
        assert len(answers) == (3 if index % 2 else 1)


PASSAGES = [
    f"{verb} {noun}{end}"
    for verb in ("Seen", "Heard", "Kept")
    for noun in ("a ship of glass", "no door", "the 3.5 kg stone", "Größe")
    for end in (". ", "! ", "?\n", "\n\n", '." ')
]


def text_rows(tokenizer: PreTrainedTokenizerBase, count: int, length: int) -> np.ndarray:
    rng = Random(0)
    texts = ("".join(rng.choices(PASSAGES, k=length)) for _ in range(count))
    return np.array([tokenizer(t, add_special_tokens=False)["input_ids"][:length] for t in texts])


def test_needles_lie_between_the_passages_of_a_text() -> None:
    tokenizer = byte_tokenizer()
    text = text_rows(tokenizer, 3, 1100)
    rows = retrieval_rows(tokenizer, 6, 1100, keys=3, digits=6, seed=5, text_NT=text, text_share=1)
    known = [tokenizer.decode(row.tolist()) for row in text]
    for index, row in enumerate(rows):
        said = tokenizer.decode(row.tolist())
        haystack, _, questions = said.partition("Question:")
        needles = re.findall(r"The special magic number for (\w+) is (\d{6})\.\s", haystack)
        answers = re.findall(r"Answer: The special magic number for (\w+) is (\d{6})", questions)
        assert dict(answers) == dict(needles)
        assert len(needles) == (3 if index % 2 else 1)
        # Without its needles it is the beginning of one of the texts, to the character.
        bare = re.sub(r"The special magic number for \w+ is \d{6}\. ?", "", haystack)
        assert len(bare) > 500
        [source] = [t for t in known if t.strip().startswith(bare.strip().rstrip("\ufffd"))]
        # And each stands after the end of a passage.
        for before in re.split(r"The special magic number for \w+ is \d{6}\. ?", haystack)[:-1]:
            assert not before or before[-1].isspace()
        assert source


def test_text_takes_its_share_of_the_rows_and_leaves_the_others_as_they_were() -> None:
    tokenizer = byte_tokenizer()
    options = {"keys": 2, "digits": 4, "seed": 1}
    text = text_rows(tokenizer, 4, 600)
    plain = retrieval_rows(tokenizer, 40, 600, **options)
    mixed = retrieval_rows(tokenizer, 40, 600, **options, text_NT=text, text_share=0.4)
    changed = [not np.array_equal(a, b) for a, b in zip(plain, mixed, strict=True)]
    assert 8 <= sum(changed) <= 24
    assert any(changed[::2])
    assert any(changed[1::2])
    again = retrieval_rows(tokenizer, 40, 600, **options, text_NT=text, text_share=0.4)
    assert np.array_equal(mixed, again)
    for none in ({"text_NT": text}, {"text_NT": text[:0], "text_share": 1.0}):
        assert np.array_equal(plain, retrieval_rows(tokenizer, 40, 600, **options, **none))


def test_rows_of_text_are_full_in_any_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    # The words of templates: some tokenizers know no others.
    words = " ".join(islice(haystack_sentences(Random(0)), 400))
    ids = tokenizer(words, add_special_tokens=False)["input_ids"][:2400]
    text = np.array(ids).reshape(2, 1200)
    rows = retrieval_rows(tokenizer, 4, 1200, keys=2, digits=6, seed=0, text_NT=text, text_share=1)
    assert rows.shape == (4, 1200)
    for row in rows:
        assert tokenizer.decode(row.tolist()).count("magic number") >= 3
