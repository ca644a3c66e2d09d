"""Probes: aligned clean and corrupt pairs for tokenizers of every habit, rows, stacking."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from archsearch.data.niah import KINDS, Probe, make_probes, retrieval_rows, stack
from archsearch.errors import ConfigError
from archsearch.models.teacher import byte_tokenizer

from .tokenizers_for_tests import merging_tokenizer, word_tokenizer

TOKENIZERS = {
    "word": word_tokenizer,
    "word without bos": lambda: word_tokenizer(bos=False),
    "digits by threes": lambda: word_tokenizer(3),
    "merging": merging_tokenizer,
    "bytes": byte_tokenizer,
}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    return TOKENIZERS[request.param]()


def _differences(probe: Probe) -> list[int]:
    pairs = zip(probe.prompt, probe.corrupt_prompt, strict=True)
    return [i for i, (a, b) in enumerate(pairs) if a != b]


@pytest.mark.parametrize("kind", KINDS)
def test_make_probes_gives_pairs_that_differ_in_one_value(
    tokenizer: PreTrainedTokenizerBase, kind: str
) -> None:
    probes = make_probes(tokenizer, kind, 6, 900, keys=3, digits=7, seed=0)
    assert len(probes) == 6
    for probe in probes:
        assert (probe.kind, probe.context) == (kind, 900)
        assert 900 - 16 <= len(probe.prompt) + len(probe.answer) <= 900
        assert len(probe.answer) == len(probe.distractor)
        assert probe.answer[0] != probe.distractor[0]
        changed = _differences(probe)
        # One value's tokens, give or take one that holds a neighbouring character too.
        assert 1 <= changed[-1] - changed[0] + 1 <= len(probe.answer) + 2
        assert probe.answer not in {probe.distractor}


@pytest.mark.parametrize("kind", KINDS)
def test_make_probes_asks_for_a_value_in_the_haystack(kind: str) -> None:
    tokenizer = byte_tokenizer()
    for probe in make_probes(tokenizer, kind, 8, 1200, keys=4, digits=5, seed=3):
        clean, corrupt = tokenizer.decode(probe.prompt), tokenizer.decode(probe.corrupt_prompt)
        key = re.search(r"magic number for (\w+) is ?$", clean)
        assert key is not None
        said = dict(re.findall(r"magic number for (\w+) is (\d{5})\.", clean))
        said_corrupt = dict(re.findall(r"magic number for (\w+) is (\d{5})\.", corrupt))
        assert len(said) == (1 if kind == "single" else 4)
        assert tokenizer.decode(probe.answer).strip() == said[key[1]]
        assert tokenizer.decode(probe.distractor).strip() == said_corrupt[key[1]]
        others = {k: v for k, v in said.items() if k != key[1]}
        assert others == {k: v for k, v in said_corrupt.items() if k != key[1]}
        assert said_corrupt[key[1]] not in said.values()


def test_make_probes_keeps_a_lone_space_in_the_prompt() -> None:
    probe = make_probes(byte_tokenizer(), "single", 1, 400, keys=1, digits=4, seed=0)[0]
    assert byte_tokenizer().decode(probe.prompt).endswith(" is ")
    assert len(probe.answer) == 4


def test_make_probes_repeats_itself_and_does_not_depend_on_count() -> None:
    tokenizer = word_tokenizer()
    probes = make_probes(tokenizer, "multikey", 5, 256, keys=4, digits=4, seed=1)
    assert probes[:2] == make_probes(tokenizer, "multikey", 2, 256, keys=4, digits=4, seed=1)
    assert probes != make_probes(tokenizer, "multikey", 5, 256, keys=4, digits=4, seed=2)
    assert len({probe.prompt for probe in probes}) == 5


def test_make_probes_spreads_the_depths() -> None:
    probes = make_probes(word_tokenizer(), "multikey", 8, 600, keys=4, digits=4, seed=0)
    eighths = sorted(int(8 * _differences(probe)[0] / len(probe.prompt)) for probe in probes)
    assert len(set(eighths)) >= 6
    assert eighths[0] <= 1
    assert eighths[-1] >= 6


def test_make_probes_refuses_a_short_context() -> None:
    with pytest.raises(ConfigError, match="too short"):
        make_probes(word_tokenizer(), "multikey", 1, 64, keys=4, digits=7, seed=0)


def test_make_probes_refuses_a_tokenizer_without_numbers() -> None:
    with pytest.raises(ConfigError, match=r"probes\.digits"):
        make_probes(word_tokenizer(numbers=False), "single", 1, 64, keys=1, digits=7, seed=0)


def test_make_probes_refuses_an_unknown_kind() -> None:
    with pytest.raises(ValueError, match="single, multi"):
        make_probes(word_tokenizer(), "double", 1, 64, keys=1, digits=7, seed=0)


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
