"""Fronts of searches at equal seconds and trials: figures by hand, and which runs may be compared at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from archsearch.config import ObjectiveConfig, RunConfig
from archsearch.errors import ConfigError
from archsearch.headmap import HeadMap, Operator
from archsearch.lab.records import LabBook
from archsearch.lab.search_fronts import (
    CONTROL,
    Curve,
    Fronts,
    record_fronts,
    record_search,
    show_fronts,
)
from archsearch.lab.search_runs import Evaluation, Rung, Search, read_searches
from archsearch.rundir import RunDir
from archsearch.search.front import Candidate, Scale
from archsearch.search.storage import open_storage
from archsearch.timings import record_stage
from tests.search.fakes import SHAPE, fake_config, fake_search

MAP = HeadMap.uniform(SHAPE, Operator.GDN)
BOTH = tuple(ObjectiveConfig(metric=name, direction="minimize") for name in ("kl", "cache_bytes"))
UNIT = Scale(BOTH, (0.0, 0.0), (1.0, 1.0))


def without_trials(run: RunDir) -> None:
    (run / "study.db").unlink()
    open_storage(run.storage)


def tried(seconds: float, *losses: float, source: str = "search") -> Evaluation:
    """A try with a point of the unit square, or without losses one that failed."""
    metrics = dict(zip(("kl", "cache_bytes"), losses, strict=bool(losses)))
    return Evaluation(source, seconds, Candidate(0, source, metrics, MAP) if losses else None)


def test_a_curve_counts_seconds_of_failed_tries_and_trials_of_results() -> None:
    curve = Curve("a", (tried(2, 0.5, 0.5), tried(3), tried(1, 0.25, 0.75), tried(4, 0, 0.9)))
    assert curve.seconds == [2, 5, 6, 10]
    assert [len(curve.within(seconds)) for seconds in (1.9, 2, 5.9, 6, 100)] == [0, 1, 1, 2, 3]
    assert curve.steps(UNIT) == [(10, 3, pytest.approx(0.25 + 0.0625 + 0.025))]
    assert curve.reaches(0.25, UNIT) == (2, 1)
    assert curve.reaches(0.3, UNIT) == (6, 2)
    assert curve.reaches(0.9, UNIT) is None


def search_of(name: str, *rungs: Rung) -> Search:
    return Search(name, RunDir("none"), fake_config(proxy_tokens=[0, 100]), rungs)


def two_searches() -> list[Search]:
    """Ours finds most late and takes 8 s, the other takes 10 s; corners and ends are the same."""
    ends = (tried(1, 0, 1, source="all_full"), tried(1, 1, 0, source="all_gdn"))
    ours = Rung(0, (*ends, tried(1), tried(5, 0.1, 0.1)), (tried(4, 0.9, 0.9),))
    other = Rung(0, (*ends, tried(8, 0.5, 0.5)), ())
    late = Rung(100, (tried(7, 0.2, 0.2),), ())
    return [search_of("ours", ours, late), search_of("other", other, late)]


def test_fronts_are_compared_in_one_box_at_quarters_of_the_shorter_search() -> None:
    fronts = Fronts.of(BOTH, 0, two_searches())
    assert [curve.name for curve in fronts.curves] == [
        "ours",
        "ours: seeds alone",
        f"ours: {CONTROL}",
        "other",
        "other: seeds alone",
    ]
    assert (fronts.scale.ideal, fronts.scale.reference) == ((0, 0), (1.1, 1.1))
    assert fronts.seconds == [2, 4, 6, 8]
    assert fronts.trials == [1, 2, 3]
    ours, seeds, control, other, _ = fronts.curves
    corners, whole = (0.1 * 1.1 * 2 - 0.01) / 1.21, (1.0 + 2 * 0.1 * 0.1) / 1.21
    assert fronts.after_seconds(ours) == pytest.approx([corners, corners, corners, whole])
    assert fronts.after_seconds(seeds) == pytest.approx([corners] * 4)
    assert fronts.after_seconds(other) == pytest.approx([corners] * 4)
    assert fronts.after_trials(control) == pytest.approx([0.04 / 1.21] * 3)
    races = {(race.search.name, race.other.name): race.reached for race in fronts.races()}
    assert races["ours", "other"] == (2, 2)
    assert races["other", "ours"] is None
    assert races["other", f"ours: {CONTROL}"] == (1, 1)
    assert "other has the 0.8430 of ours: never" in show_fronts(fronts)


def test_figures_say_what_was_spent() -> None:
    book = LabBook(0)
    first, later = (Fronts.of(BOTH, tokens, two_searches()) for tokens in (0, 100))
    record_fronts(book, first)
    rows = {row["metric"]: row for row in book.rows}
    assert len(rows) == len(book.rows)
    row = rows["hypervolume of other, at 0 tokens a map, after 8.00 s"]
    assert (row["trials"], row["ended"]) == (2, False)
    assert rows["hypervolume of ours: seeds alone, at 0 tokens a map, after 8.00 s"]["ended"]
    whole = rows["hypervolume of ours, at 0 tokens a map"]
    assert whole["curve"] == [[8, 3, pytest.approx(0.84298)]]
    never = rows["seconds of other to the hypervolume of ours, at 0 tokens a map"]
    assert (never["value"], never["trials"]) == (-1, -1)
    # Candidates of the second length were chosen by the first: no time is equal there.
    assert later.seconds == later.trials == later.races() == []
    assert "| ours | 1 | 7.0 |" in show_fronts(later)
    json.dumps(book.rows, allow_nan=False)


Change = Callable[[RunDir], None]


def made_run(place: Path, faults: dict[str, Any] | None = None, **changes: Any) -> RunDir:
    """A finished search with the files of a run."""
    search = {"proxy_tokens": [0, 100], "trials": 10, "random_control": True}
    config = fake_config(**{**search, **changes})
    with_gpu = {"execution": config.execution.model_copy(update={"gpus_per_worker": 0.25})}
    config = config.model_copy(update=with_gpu)
    place.mkdir()
    fake_search(config, place, faults=faults or {})
    run = RunDir(place)
    run.write_json("teacher.json", {"model": vars(SHAPE), "fingerprint": "f"})
    for name in ("supernet.safetensors", "train.npy", "heldout.npy", "scores.json"):
        run.write_text(name, name)
    return run


OURS = {"sampler": "guided", "representation": "free"}


def test_seconds_are_a_share_of_the_gpu_and_of_every_try_that_says_them(tmp_path: Path) -> None:
    faults = {"5": ["missing"], "6": ["raise"]}
    first = made_run(tmp_path / "a", faults, **OURS)
    searches = read_searches([first.path, made_run(tmp_path / "b").path])
    assert [search.name for search in searches] == ["guided, free", "tpe, ranked"]
    rung = searches[0].rungs[0]
    # One without a figure took its half second and is not tried again; one whose worker raised says none, and is.
    assert (len(rung.candidates), len(rung.search)) == (9, 11)
    assert sum(e.seconds for e in rung.search) == pytest.approx(10 * 0.5 * 0.25)
    assert {e.source for e in rung.search} >= {"all_full", "all_gdn", "causal", "search"}
    assert {e.source for e in rung.control} == {"random-control"}
    ends = [c.trial for c in rung.candidates]
    assert len(set(ends)) == 9
    assert [rung.tokens for rung in searches[1].rungs] == [0, 100]
    record_stage(first, "search", 7.0, 0, "")
    book = LabBook(0)
    record_search(book, searches[0])
    (row,) = book.rows
    assert row["metric"] == "seconds of the search stage, guided, free"
    assert (row["value"], row["trials"], row["gpus_per_worker"]) == (7, 10, 0.25)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, RunDir]:
    """Two runs that may be compared; not to be changed."""
    place = tmp_path_factory.mktemp("pair")
    return made_run(place / "a", **OURS), made_run(place / "b", random_control=False, trials=9)


def copies(place: Path, pair: tuple[RunDir, RunDir]) -> list[RunDir]:
    return [RunDir(shutil.copytree(run.path, place / run.path.name)) for run in pair]


def other_config(**search: Any) -> Change:
    def change(run: RunDir) -> None:
        config: RunConfig = run.load_config()
        config = config.model_copy(update={"search": config.search.model_copy(update=search)})
        run.write_json("config.json", config.model_dump(mode="json", by_alias=True))

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda run: run.write_text("train.npy", "other"), "b/train.npy: not the same as"),
        (lambda run: run.write_text("heldout-docs.npy", "more"), "b/heldout-docs.npy: not the"),
        (lambda run: run.write_text("scores.json", "other"), "b/scores.json: not the same as"),
        (lambda run: (run / "supernet.safetensors").unlink(), "b/supernet.safetensors: not"),
        (
            lambda run: run.write_json("teacher.json", {"model": vars(SHAPE), "fingerprint": "g"}),
            "b: another teacher than",
        ),
        (
            other_config(proxy_tokens=(0, 200)),
            r"search.proxy_tokens: \[0, 100\] -> \[0, 200\]\); allowed",
        ),
        (lambda run: (run / "trials.json").unlink(), "the search has not run to there yet"),
        (lambda run: (run / "study.db").unlink(), "b/study.db: missing"),
        (without_trials, "b: its search has no results"),
        (other_config(**OURS), "b: also searched with guided, free; allowed: one run of each"),
    ],
)
def test_runs_that_searched_something_else_are_refused(
    tmp_path: Path, pair: tuple[RunDir, RunDir], change: Change, said: str
) -> None:
    first, other = copies(tmp_path, pair)
    change(other)
    with pytest.raises(ConfigError, match=said):
        read_searches([first.path, other.path])


def test_runs_may_differ_in_what_no_figure_depends_on(
    tmp_path: Path, pair: tuple[RunDir, RunDir]
) -> None:
    first, other = copies(tmp_path, pair)
    # Scores that were made later, for more selectors.
    first.write_text("scores/restoration.json", "more")
    assert len(read_searches([first.path, other.path])) == 2
