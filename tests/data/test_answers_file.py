"""Prompts with answers from a file: their tokens, their groups, and what is wrong with a line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from archsearch.data.answers_file import read_answers
from archsearch.errors import ConfigError
from archsearch.models.sources import resolve_path
from archsearch.models.teacher import byte_tokenizer

LINE = {"prompt": "The code is 7. The code is", "answer": " 7"}


def write(path: Path, *lines: Any) -> Path:
    text = "".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_prompt_and_answer_become_tokens(tmp_path: Path, name: str) -> None:
    long = LINE | {"prompt": "x" * 40 + " is", "kind": "multikey", "keys": 4, "tokens": 9}
    tokenizer = byte_tokenizer()
    plain = LINE | {"kind": None, "keys": None}
    one, two = read_answers(write(tmp_path / name, plain, "", long), tokenizer, "codes")
    assert tokenizer.decode(one.prompt) == LINE["prompt"]
    assert tokenizer.decode(one.answer) == " 7"
    assert (one.kind, one.group, one.context) == ("codes", "", 32)
    assert (two.kind, two.group, two.context) == ("codes", "multikey4", 64)
    assert len(two.prompt) + len(two.answer) == 45


@pytest.mark.parametrize(("size", "context"), [(63, 64), (64, 64), (65, 128)])
def test_a_context_is_the_power_of_two_that_holds_the_tokens(
    tmp_path: Path, size: int, context: int
) -> None:
    line = {"prompt": "p" * (size - 2), "answer": " 7"}
    [probe] = read_answers(write(tmp_path / "a.jsonl", line), byte_tokenizer(), "codes")
    assert probe.context == context


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r":2: not JSON \(.*\); allowed: an object a line"),
        ([1], ":2: a list; allowed: an object a line"),
        ({"prompt": "a"}, ":2: field answer is missing; allowed: prompt, answer, kind"),
        (LINE | {"answer": 7}, ":2: field answer is 7; allowed: a string that is not blank"),
        (LINE | {"prompt": "  "}, ":2: field prompt is '  '; allowed: a string"),
        (LINE | {"kind": ["a"]}, r":2: field kind is \['a'\]; allowed: a string"),
        (LINE | {"kind": 4}, ":2: field kind is 4; allowed: a string"),
        (LINE | {"keys": "4"}, ":2: field keys is '4'; allowed: an integer"),
        (LINE | {"keys": 4.0}, ":2: field keys is 4.0; allowed: an integer"),
        (LINE | {"keys": True}, ":2: field keys is True; allowed: an integer"),
        (LINE | {"anwser": "7"}, ":2: field anwser is unknown; allowed: prompt, answer, kind"),
        (
            LINE | {"prompt": "a" * 60},
            ":2: prompt and answer of 62 tokens are beyond .* 50; allowed",
        ),
    ],
)
def test_a_line_that_does_not_serve_is_named(tmp_path: Path, line: Any, message: str) -> None:
    path = write(tmp_path / "a.jsonl", LINE, line)
    with pytest.raises(ConfigError, match=rf"a\.jsonl{message}"):
        read_answers(path, byte_tokenizer(), "codes", max_tokens=50)


def test_a_file_that_does_not_serve_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.jsonl: holds no prompts"):
        read_answers(write(tmp_path / "a.jsonl", ""), byte_tokenizer(), "codes")
    with pytest.raises(ConfigError, match=r"none\.jsonl: cannot be read"):
        read_answers(tmp_path / "none.jsonl", byte_tokenizer(), "codes")
    (tmp_path / "a.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match=r"a\.jsonl\.gz: cannot be read"):
        read_answers(tmp_path / "a.jsonl.gz", byte_tokenizer(), "codes")
    packed = bytearray(write(tmp_path / "a.jsonl.gz", LINE).read_bytes())
    packed[10:14] = b"\xff" * 4
    for damaged in (packed, packed[:12]):
        (tmp_path / "a.jsonl.gz").write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"a\.jsonl\.gz: cannot be read"):
            read_answers(tmp_path / "a.jsonl.gz", byte_tokenizer(), "codes")
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"b\.jsonl: not UTF-8"):
        read_answers(tmp_path / "b.jsonl", byte_tokenizer(), "codes")


@pytest.mark.parametrize(
    ("name", "groups"),
    [("niah_single", {"single1"}), ("niah_multikey", {"multikey2", "multikey4"})],
)
def test_the_shipped_files_read(name: str, groups: set[str]) -> None:
    path = resolve_path(f"package:archsearch/assets/smollm2_135m/{name}.jsonl.gz")
    tokenizer = byte_tokenizer()
    probes = read_answers(path, tokenizer, "stations")
    assert len(probes) == 80
    assert {probe.group for probe in probes} == groups
    for probe in probes:
        said = tokenizer.decode(probe.answer)
        assert said[0] == " "
        assert len(said) == 8
        assert tokenizer.decode(probe.prompt).count(said) == 1
