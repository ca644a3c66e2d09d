"""Searches that are killed on purpose: the scripts see what was lost, and nothing is where nothing was."""

from __future__ import annotations

import random
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from archsearch.errors import RunFault
from archsearch.headmap import HeadMap, Operator
from archsearch.lab.records import LabBook
from archsearch.lab.search_kills import Tally, _compare, count_faults, kill_many
from archsearch.lab.search_seconds import storage_seconds
from archsearch.lab.search_state import (
    Check,
    dashboard_response,
    kept_rows,
    measure_soak,
    measure_storage,
)
from archsearch.lab.stand_in import SHAPE, Settings, StandInWorker, score_tables, search
from archsearch.rundir import RunDir
from archsearch.search.records import TrialSpec
from archsearch.search.study import RungStudy

SEARCH = {"trials": 24, "sampler": "random", "proxy_tokens": [0, 100], "halving": {}}


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    with RunDir(tmp_path / "run") as run_dir:
        search(run_dir, Settings(SEARCH), say=lambda line: None)
    return tmp_path / "run"


def test_a_search_that_was_left_alone_has_no_faults(finished: Path) -> None:
    assert not any(count_faults(finished, Settings(SEARCH)).values())
    size, seconds = dashboard_response(RunDir(finished), "stand-in@0")
    assert size > 24 * 200
    assert seconds > 0


def change(folder: Path, statement: str) -> None:
    with sqlite3.connect(folder / "study.db") as connection:
        assert connection.execute(statement).rowcount > 0
    connection.close()


def test_what_is_lost_or_left_open_is_counted(finished: Path) -> None:
    known = _compare(finished, {}, Tally())
    assert len(known) > 24
    change(finished, "UPDATE trials SET state = 'RUNNING' WHERE trial_id = 3")
    faults = count_faults(finished, Settings(SEARCH))
    assert faults["candidates lost"] == 1
    assert faults["trials left open"] == 1
    tally = Tally()
    _compare(finished, known, tally)
    assert (tally.changed, tally.damaged) == (1, 0)


def test_what_counts_twice_is_counted(finished: Path) -> None:
    change(
        finished,
        "UPDATE trial_user_attributes SET value_json = '0' WHERE trial_id = 9 AND key = 'candidate'",
    )
    faults = count_faults(finished, Settings(SEARCH))
    assert faults["candidates or head maps with two results"] == 1


def test_kills_in_writes_and_between_them_lose_nothing(tmp_path: Path) -> None:
    settings = Settings(SEARCH)
    tally = kill_many(tmp_path / "run", settings, 2, random.Random(1), ("statement", "end"))
    assert dict(tally.kills) == {"statement": 1, "end": 1}
    assert (tally.changed, tally.damaged) == (0, 0)
    with RunDir(tmp_path / "run") as run_dir:
        search(run_dir, settings, say=lambda line: None)
    assert not any(count_faults(tmp_path / "run", settings).values())


def test_a_search_that_ends_before_its_kills_is_a_fault(tmp_path: Path) -> None:
    few = Settings({"trials": 1, "sampler": "random"})
    with pytest.raises(RunFault, match="ended after 0 kills"):
        kill_many(tmp_path / "run", few, 1, random.Random(1), ("begin",))


def test_bounds_that_are_missed_are_faults() -> None:
    check = Check(LabBook(0), [])
    check.add("a", 1, "x", exactly=1)
    check.add("b", 1, "x", most=2, least=None)
    assert check.faults == []
    check.add("c", 1, "x", exactly=2)
    check.add("d", 3, "x", most=2)
    check.add("e", 3, "x", least=4, note="y")
    assert check.faults == ["c: 1, not exactly 2", "d: 3, not at most 2", "e: 3, not at least 4"]
    assert check.book.rows[-1]["note"] == "y"


def test_more_full_heads_and_more_tokens_are_better() -> None:
    worker = StandInWorker({"seconds": 0.0})

    def kl(head_map: HeadMap, tokens: int) -> float:
        return worker(TrialSpec(0, head_map.to_json(), tokens)).metrics["kl"]

    full, none = (HeadMap.uniform(SHAPE, kind) for kind in (Operator.FULL, Operator.GDN))
    half = HeadMap.from_full_heads(SHAPE, SHAPE.heads()[:135])
    assert kl(full, 0) == 0 < kl(half, 0) < kl(none, 0)
    assert kl(half, 100) < kl(half, 0)
    assert len(score_tables()["causal"].groups[0]) == SHAPE.num_kv_heads


def test_the_soak_counts_and_measures(tmp_path: Path, shared_ray: None) -> None:
    check = Check(LabBook(0), [])
    measure_soak(tmp_path, check, 60, "random on groups", workers=2)
    rows = {row["metric"]: row["value"] for row in check.book.rows}
    assert rows["soak: trials with a result"] == 60
    assert rows["soak: candidates or maps evaluated twice"] == 0
    assert rows["soak: dashboard's answer for the study"] > 60 * 200
    assert rows["soak: processor seconds of a proposal, 100% of the way"] > 0
    assert not [fault for fault in check.faults if "a second" not in fault]


def test_writes_of_each_trial_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = RungStudy.end

    def slow(*given: Any) -> None:
        time.sleep(0.05)
        end(*given)

    monkeypatch.setattr(RungStudy, "end", slow)
    with RunDir(tmp_path / "slow") as run_dir:
        seconds = storage_seconds(run_dir, Settings({"trials": 4, "sampler": "random"}))
    assert len(seconds) == 4
    assert min(seconds) > 0.05
    assert RungStudy.end is slow
    check = Check(LabBook(0), [])
    measure_storage(tmp_path, check, 5, "random on groups")
    assert [row["unit"] for row in check.book.rows] == ["s", "s"]
    assert check.faults[0].startswith("storage: seconds of a trial's writes")


def test_figures_of_other_samplers_are_kept() -> None:
    old = [{"metric": "a"}, {"metric": "a", "sampler": "x"}, {"metric": "b", "sampler": "x"}]
    assert kept_rows(old, [{"metric": "a", "sampler": "x"}]) == [old[0], old[2]]
    assert kept_rows(old, [{"metric": "a"}]) == old[1:]
