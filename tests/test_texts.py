"""The text of a run: what is written, and what training and held-out text may not share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from archsearch.config import RunConfig
from archsearch.configfile import load_config
from archsearch.data.lexicon import filler_vocabulary
from archsearch.errors import ConfigError
from archsearch.models.teacher import Teacher, load_teacher
from archsearch.progress import ignore_progress
from archsearch.rundir import RunDir
from archsearch.stages import RunContext
from archsearch.texts import write_texts

WORDS = sorted(word for word in filler_vocabulary() if word.isalpha())


@pytest.fixture(scope="module")
def teacher(teacher_folder: Path) -> Teacher:
    config = {"schema": 1, "name": "x", "teacher": {"source": str(teacher_folder), "device": "cpu"}}
    return load_teacher(RunConfig.model_validate(config).teacher)


def documents(path: Path, texts: Sequence[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def made_up(count: int, seed: int, *, size: int = 60) -> list[str]:
    rng = Random(seed)
    return [" ".join(rng.choices(WORDS, k=size)) for _ in range(count)]


def write(config: Path, run: Path, teacher: Teacher, *overrides: str) -> str:
    settings = load_config(config, list(overrides))
    with RunDir(run) as run_dir:
        context = RunContext(settings, run_dir)
        return write_texts(settings, run_dir, teacher, context.seed, ignore_progress)


def text_file(field: str, path: str) -> str:
    return f"{field}={{source: file, path: {path}}}"


def read(run: Path, name: str) -> Any:
    return np.load(run / name)


def test_extra_text_and_starts_are_written(
    run_config: Path, tmp_path: Path, teacher: Teacher
) -> None:
    train, extra = (documents(tmp_path / f"{n}.jsonl", made_up(40, n)) for n in (0, 1))
    run = tmp_path / "run"
    line = write(
        run_config,
        run,
        teacher,
        text_file("data.train", train),
        f"data.extra_heldout=[{{label: own, source: file, path: {extra}, sequences: 3}}, {{label: more}}]",
    )
    assert line.startswith(f"{(2 + 3 + 2) * 96:,} held-out and ")
    assert read(run, "heldout.npy").shape == read(run, "heldout-more.npy").shape == (2, 96)
    assert not np.array_equal(read(run, "heldout.npy"), read(run, "heldout-more.npy"))
    own = read(run, "heldout-own.npy")
    assert teacher.tokenizer.decode(own[0, :60]).split() == made_up(1, 1)[0].split()
    rows, starts = read(run, "train.npy"), read(run, "train_starts.npy")
    assert rows.shape == starts.shape
    # Each document has 60 words and an end of text.
    assert np.flatnonzero(starts.flatten()).tolist() == list(range(0, rows.size, 61))


def test_text_without_documents_has_no_starts(
    run_config: Path, tmp_path: Path, teacher: Teacher
) -> None:
    write(run_config, tmp_path / "run", teacher)
    assert not (tmp_path / "run" / "train_starts.npy").exists()


def leak(tmp_path: Path, *, passage: int) -> tuple[str, str]:
    """A training file whose third document holds that many words of the first held-out one, and the held-out file."""
    heldout, texts = made_up(10, 1, size=90), made_up(40, 0, size=95)
    words = texts[2].split()
    words[9 : 9 + passage] = heldout[0].split()[7 : 7 + passage]
    texts[2] = " ".join(words)
    train = documents(tmp_path / "train.jsonl", texts)
    return train, documents(tmp_path / "heldout.jsonl", heldout)


@pytest.mark.parametrize("field", ["data.heldout", "data.extra_heldout[0]"])
def test_a_passage_in_both_is_refused_and_named(
    run_config: Path, tmp_path: Path, teacher: Teacher, field: str
) -> None:
    train, heldout = leak(tmp_path, passage=64)
    other = text_file("data.heldout", heldout)
    if field != "data.heldout":
        other = f"data.extra_heldout=[{{label: own, source: file, path: {heldout}}}]"
    with pytest.raises(ConfigError) as caught:
        write(run_config, tmp_path / "run", teacher, text_file("data.train", train), other)
    assert str(caught.value) == (
        f"data.train: sequences of {train} share a passage of 64 tokens with those of {field}, counted from 0: "
        "2 (with 0); allowed: other text, or data.overlap: drop, which leaves them out"
    )


def test_one_file_serves_as_training_and_extra_text(
    run_config: Path, tmp_path: Path, teacher: Teacher
) -> None:
    path = documents(tmp_path / "a.jsonl", made_up(40, 0, size=95))
    extra = f"data.extra_heldout=[{{label: own, source: file, path: {path}, sequences: 3}}]"
    write(run_config, tmp_path / "run", teacher, text_file("data.train", path), extra)
    held, trained = (read(tmp_path / "run", name) for name in ("heldout-own.npy", "train.npy"))
    words = [teacher.tokenizer.decode(rows.flatten()).split() for rows in (held, trained)]
    # Each document has 95 words and an end of text.
    assert words[0][:95] == made_up(40, 0, size=95)[0].split()
    assert words[1][:95] == made_up(40, 0, size=95)[3].split()


def test_a_shorter_passage_is_let_pass(run_config: Path, tmp_path: Path, teacher: Teacher) -> None:
    train, heldout = leak(tmp_path, passage=63)
    options = (text_file("data.train", train), text_file("data.heldout", heldout))
    assert "left out" not in write(run_config, tmp_path / "run", teacher, *options)


def test_sequences_that_share_a_passage_are_left_out_where_that_is_asked_for(
    run_config: Path, tmp_path: Path, teacher: Teacher
) -> None:
    train, heldout = leak(tmp_path, passage=64)
    options = (text_file("data.train", train), text_file("data.heldout", heldout))
    run = tmp_path / "run"
    line = write(run_config, run, teacher, *options, "data.overlap=drop")
    assert "(1 sequences left out that share text with them)" in line
    clean = documents(tmp_path / "clean.jsonl", made_up(40, 0, size=95))
    options = (text_file("data.train", clean), text_file("data.heldout", heldout))
    write(run_config, tmp_path / "other", teacher, *options)
    for name in ("train.npy", "train_starts.npy"):
        whole, left = read(tmp_path / "other", name), read(run, name)
        assert np.array_equal(left, np.delete(whole, 2, axis=0)), name


def test_drawn_sequences_that_share_a_passage_are_left_out(
    run_config: Path, tmp_path: Path, teacher: Teacher
) -> None:
    write(run_config, tmp_path / "first", teacher)
    drawn = read(tmp_path / "first", "train.npy")
    assert len(drawn) > 2
    np.save(tmp_path / "leak.npy", drawn[[1, 1]])
    line = write(
        run_config,
        tmp_path / "run",
        teacher,
        text_file("data.heldout", str(tmp_path / "leak.npy")),
    )
    left = read(tmp_path / "run", "train.npy")
    assert np.array_equal(left, np.delete(drawn, 1, axis=0))
    assert "(1 sequences left out" in line


def test_text_that_is_held_out_altogether_is_refused(
    run_config: Path, tmp_path: Path, teacher: Teacher
) -> None:
    rows = np.tile(np.arange(10, 106, dtype=np.uint16), (30, 1))
    np.save(tmp_path / "same.npy", rows)
    np.save(tmp_path / "other.npy", rows)
    options = [text_file("data.train", str(tmp_path / "same.npy"))]
    options += [text_file("data.heldout", str(tmp_path / "other.npy")), "supernet.tokens=2048"]
    with pytest.raises(ConfigError, match=r"data\.train: every sequence shares a passage"):
        write(run_config, tmp_path / "run", teacher, *options, "data.overlap=drop")
    with pytest.raises(ConfigError, match=r": 0 \(with 0\), .* and \d+ more; allowed"):
        write(run_config, tmp_path / "run", teacher, *options)


def test_needles_lie_in_the_training_text_where_that_is_asked_for(
    run_config: Path, tmp_path: Path, teacher: Teacher
) -> None:
    train = documents(tmp_path / "train.jsonl", made_up(60, 0, size=200))
    option = text_file("data.train", train)
    write(run_config, tmp_path / "plain", teacher, option)
    write(run_config, tmp_path / "run", teacher, option, "data.niah_text_share=1.0")
    known = set(teacher.tokenizer.decode(read(tmp_path / "run", "train.npy").flatten()).split())
    in_text, in_stories = (
        [teacher.tokenizer.decode(row) for row in read(tmp_path / name, "retrieval.npy")]
        for name in ("run", "plain")
    )
    for prompt in in_text:
        assert "magic number" in prompt
        haystack = prompt.partition("Question")[0]
        assert "." not in re_without_needles(haystack)
        assert len(set(haystack.split()) & known) > 5
    assert all("." in re_without_needles(p.partition("Question")[0]) for p in in_stories)


def re_without_needles(haystack: str) -> str:
    """A haystack without its needles; made-up text has no full stops, stories have."""
    parts = haystack.split("The special magic number for")
    return parts[0] + "".join(part.partition(".")[2] for part in parts[1:])
