"""Scripts of needles and questions, distractors, and the length of composed prompts."""

from __future__ import annotations

from random import Random

import pytest

from archsearch.data.lexicon import filler_vocabulary, pieces
from archsearch.data.prompts import (
    KEYS,
    Scene,
    Script,
    compose,
    draw_distractor,
    draw_script,
    encode,
    needle,
    question,
    vocabulary,
)
from archsearch.errors import ConfigError
from archsearch.models.teacher import byte_tokenizer

from .tokenizers_for_tests import word_tokenizer


def test_vocabulary_is_closed_and_modest() -> None:
    words = vocabulary()
    assert len(words) == len(set(words)) <= 450
    assert set(pieces(needle("otter", "12") + question("otter"))) - set("12") <= set(words)


def test_keys_are_many_and_strange_to_the_filler() -> None:
    assert len(set(KEYS)) == len(KEYS) >= 64
    assert not set(KEYS) & set(filler_vocabulary())


def test_draw_script_gives_distinct_values_without_leading_zeros() -> None:
    script = draw_script(Random(0), 7, 1, 0.5)
    assert len(set(script.values.values())) == len(script.values) == 7
    assert "0" not in script.values.values()
    assert script.asked[0] in script.values


@pytest.mark.parametrize(("num_keys", "digits"), [(0, 7), (9, 1), (len(KEYS) + 1, 7)])
def test_draw_script_refuses_what_cannot_be_drawn(num_keys: int, digits: int) -> None:
    with pytest.raises(ConfigError, match="allowed: 1 to"):
        draw_script(Random(0), num_keys, digits, 0.5)


def test_draw_distractor_differs_at_every_place_and_from_every_value() -> None:
    for seed in range(50):
        values = frozenset(draw_script(Random(seed), 4, 7, 0.5).values.values())
        for value in values:
            distractor = draw_distractor(Random(seed), value, values)
            assert len(distractor) == len(value)
            assert all(a != b for a, b in zip(distractor, value, strict=True))
            assert distractor not in values


def test_draw_distractor_takes_the_last_number_left() -> None:
    assert draw_distractor(Random(0), "1", frozenset("12345678")) == "9"


@pytest.mark.parametrize("max_tokens", [100, 257, 512])
def test_compose_fills_up_to_its_length(max_tokens: int) -> None:
    tokenizer = word_tokenizer()
    for seed in range(10):
        script = draw_script(Random(seed), 3, 4, 0.5)
        text = compose(tokenizer, Random(seed), script.scene(), max_tokens)
        tokens = encode(tokenizer, f"{text} {script.values[script.asked[-1]]}")
        assert max_tokens - 3 <= len(tokens) <= max_tokens
        for key, value in script.values.items():
            assert text.count(needle(key, value)) == 1
        assert text.endswith(question(script.asked[-1]))


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.999])
def test_compose_puts_the_asked_needle_at_its_depth(depth: float) -> None:
    script = draw_script(Random(1), 1, 7, depth)
    text = compose(word_tokenizer(), Random(1), script.scene(), 2000)
    haystack = text[: text.index("\n\nQuestion")]
    key = script.asked[0]
    assert haystack.index(needle(key, script.values[key])) / len(haystack) == pytest.approx(
        depth, abs=0.06
    )


def test_compose_answers_all_but_the_last_question() -> None:
    script = draw_script(Random(2), 3, 7, 0.5)
    script = Script(script.values, tuple(script.values), 0.5)
    text = compose(byte_tokenizer(), Random(2), script.scene(), 1500)
    for key in script.asked[:-1]:
        assert f"{question(key)} {script.values[key]}." in text
    assert text.endswith(question(script.asked[-1]))


@pytest.mark.parametrize("depth", [0.0, 0.6, 0.999])
def test_compose_keeps_the_order_of_a_group(depth: float) -> None:
    groups = (("First.", "Second.", "Third."), ("One.", "Two.", "Three."))
    for asked in (0, 1):
        scene = Scene(groups, asked, depth, "Question: Which is", "1", frozenset("1"))
        for seed in range(10):
            text = compose(byte_tokenizer(), Random(seed), scene, 1500)
            for group in groups:
                places = [text.index(sentence) for sentence in group]
                assert places == sorted(places)
            haystack = text.partition("\n\n")[0]
            assert text.index(scene.needle) / len(haystack) == pytest.approx(depth, abs=0.08)


def test_compose_says_how_many_tokens_it_needs() -> None:
    tokenizer, script = word_tokenizer(), draw_script(Random(3), 4, 7, 0.5)
    with pytest.raises(
        ConfigError, match=r"40 tokens are too short for 4 needles.*(\d+) or more"
    ) as error:
        compose(tokenizer, Random(3), script.scene(), 40)
    least = int(str(error.value).split("allowed: ")[1].split()[0])
    text = compose(tokenizer, Random(3), script.scene(), least)
    assert len(encode(tokenizer, f"{text} {script.values[script.asked[0]]}")) == least


def test_encode_keeps_the_start_token_and_no_end_token() -> None:
    tokenizer = word_tokenizer()
    assert tokenizer("It rained.")["input_ids"][-1] == tokenizer.eos_token_id
    ids = encode(tokenizer, "It rained.")
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.eos_token_id not in ids
    assert len(encode(word_tokenizer(bos=False), "It rained.")) == 3
