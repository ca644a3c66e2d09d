"""A user's pairs: read as they are, and one clear line for each fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from archsearch.data.pairs_file import read_pairs
from archsearch.errors import ConfigError
from archsearch.models.teacher import byte_tokenizer

from .tokenizers_for_tests import word_tokenizer

GOOD = {
    "clean": "Anna has the book. It belongs to",
    "corrupt": "Ruth has the book. It belongs to",
    "answer": "Anna",
    "distractor": "Ruth",
}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(x if isinstance(x, str) else f"{json.dumps(x)}\n" for x in lines))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "pairs.jsonl"


def test_pairs_come_by_capability_and_probe(file: Path) -> None:
    lines = [
        GOOD,
        GOOD | {"capability": "logic"},
        "\n",
        GOOD | {"capability": "logic", "probe": "owners"},
        GOOD | {"probe": None, "clean": "Anna is", "corrupt": "Ruth is"},
    ]
    found = read_pairs(write(file, *lines), byte_tokenizer())
    counts = {name: {k: len(v) for k, v in probes.items()} for name, probes in found.items()}
    assert counts == {"user": {"pairs": 2}, "logic": {"pairs": 1, "owners": 1}}
    assert {p.kind for probes in found["logic"].values() for p in probes} == {"pairs", "owners"}


def test_a_pair_is_what_the_line_says(file: Path) -> None:
    tokenizer = byte_tokenizer()
    [probe] = read_pairs(write(file, GOOD), tokenizer)["user"]["pairs"]
    assert tokenizer.decode(probe.prompt) == GOOD["clean"] + " "
    assert tokenizer.decode(probe.corrupt_prompt) == GOOD["corrupt"] + " "
    assert tokenizer.decode(probe.answer) == "Anna"
    assert tokenizer.decode(probe.distractor) == "Ruth"
    assert probe.context == len(probe.prompt) + len(probe.answer)


@pytest.mark.parametrize("end", ["to ", "to\n", "to (", 'to "'])
def test_an_answer_follows_space_brackets_and_quotes_as_it_is(file: Path, end: str) -> None:
    line = GOOD | {name: GOOD[name].removesuffix("to") + end for name in ("clean", "corrupt")}
    tokenizer = byte_tokenizer()
    [probe] = read_pairs(write(file, line | {"answer": " Anna "}), tokenizer)["user"]["pairs"]
    assert tokenizer.decode(probe.prompt + probe.answer) == f"{line['clean']}Anna"


def test_unicode_counts_as_written(file: Path) -> None:
    line = GOOD | {"answer": "Zoë", "distractor": "Noé"}
    assert read_pairs(write(file, line), byte_tokenizer())


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{oops}\n", r"not JSON \(.*\); allowed: an object a line"),
        ("[1]\n", "a list; allowed: an object a line"),
        (
            {"clean": "a"},
            r"field corrupt is missing; allowed: clean, corrupt, answer, distractor, ",
        ),
        (GOOD | {"anwser": "x"}, "field anwser is unknown; allowed: clean, .*, capability, probe"),
        (GOOD | {"answer": 7}, "field answer is 7; allowed: a string that is not blank"),
        (GOOD | {"answer": None}, "field answer is missing; allowed: clean, "),
        (GOOD | {"probe": [1]}, r"field probe is \[1\]; allowed: a string that is not blank"),
        (GOOD | {"clean": " "}, "field clean is ' '; allowed: a string that is not blank"),
        (GOOD | {"capability": ""}, "field capability is ''; allowed: a string that is"),
        (GOOD | {"corrupt": GOOD["clean"]}, "field corrupt equals clean; allowed: another text"),
        (GOOD | {"distractor": "Anna"}, "field distractor equals answer; allowed: another text"),
        (
            GOOD | {"corrupt": "Maria has the book. It belongs to"},
            "field corrupt has 38 tokens with the answer; clean has 37; allowed",
        ),
        (
            GOOD | {"distractor": "Maria"},
            "field distractor has 6 tokens, ' Maria'; answer has 5, ' Anna'; allowed",
        ),
    ],
)
def test_a_faulty_line_is_named(file: Path, line: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"pairs\.jsonl:3: {problem}") as error:
        read_pairs(write(file, GOOD, "\n", line, GOOD), byte_tokenizer())
    assert "\n" not in str(error.value)


def test_words_that_the_tokenizer_cannot_tell_apart_are_named(file: Path) -> None:
    line = GOOD | {"answer": "Xerxes", "distractor": "Darius"}
    with pytest.raises(ConfigError, match=r":1: field distractor has the same tokens"):
        read_pairs(write(file, line), word_tokenizer())
    line = GOOD | {"clean": "Xerxes is", "corrupt": "Darius is"}
    with pytest.raises(ConfigError, match=r":1: field corrupt has the same tokens as clean"):
        read_pairs(write(file, line), word_tokenizer())


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_file_without_pairs_is_refused(file: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"pairs\.jsonl: holds no pairs"):
        read_pairs(write(file, text), byte_tokenizer())


def test_a_file_that_cannot_be_read_is_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pairs\.jsonl: cannot be read \(No such file"):
        read_pairs(file, byte_tokenizer())
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory\)"):
        read_pairs(tmp_path, byte_tokenizer())
    file.write_bytes(b'{"clean": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"pairs\.jsonl: not UTF-8 text"):
        read_pairs(file, byte_tokenizer())
