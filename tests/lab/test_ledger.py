"""The ledger of long comparisons: rows by key, whatever was cut off, whoever adds to it."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from archsearch.errors import ConfigError
from archsearch.lab.ledger import Ledger


def test_rows_come_back_in_their_order(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "folder" / "rows.jsonl")
    assert ledger.rows() == {}
    ledger.add("b", values={"kl": 0.25}, seed=1)
    ledger.add("a", failed="not finite")
    found = Ledger(ledger.path).rows()
    assert list(found) == ["b", "a"]
    assert found["b"] == {"key": "b", "values": {"kl": 0.25}, "seed": 1}


def test_the_first_row_of_a_key_counts(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "rows.jsonl")
    ledger.add("a", values={"kl": 1.0})
    ledger.add("a", values={"kl": 2.0})
    assert ledger.rows()["a"]["values"] == {"kl": 1.0}


def test_a_line_that_was_cut_off_is_left_out_and_spoils_no_other(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "rows.jsonl")
    ledger.add("a", values={"kl": 1.0})
    whole = ledger.path.read_bytes()
    ledger.add("b", values={"kl": 2.0})
    ledger.path.write_bytes(ledger.path.read_bytes()[: len(whole) + 17])
    assert list(ledger.rows()) == ["a"]
    ledger.add("c", values={"kl": 3.0})
    assert list(ledger.rows()) == ["a", "c"]


def test_lines_that_are_no_rows_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"key": "a"}\n{"name": "b"}\n')
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2"):
        Ledger(path).rows()


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        Ledger(tmp_path / "rows.jsonl").add("a", values={"kl": float("nan")})


def _add_many(path: str, name: str) -> None:
    for number in range(40):
        Ledger(Path(path)).add(f"{name}{number}", text=name * 500)


def test_processes_may_add_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_add_many, args=(str(path), name)) for name in "xy"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    rows = Ledger(path).rows()
    assert len(rows) == 80
    assert all(row["text"] == key[0] * 500 for key, row in rows.items())
