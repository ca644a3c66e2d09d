"""The stand-in for the model as a file and as a worker, and the bench of searches on it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from archsearch.config import CostConfig
from archsearch.configfile import load_config
from archsearch.errors import ConfigError
from archsearch.headmap import HeadMap, Operator
from archsearch.lab.ledger import Ledger
from archsearch.lab.map_list import head_map_of
from archsearch.lab.map_process import Hyperparameters
from archsearch.lab.map_table import MapTable
from archsearch.lab.records import LabBook
from archsearch.lab.search_bench import (
    CONFIG,
    CONTESTANTS,
    PROGRAM,
    SETTINGS,
    Bench,
    list_matches,
    play_all,
    standings,
)
from archsearch.lab.search_evaluator import (
    ASSET,
    HYPERPARAMETERS,
    SearchEvaluator,
    figures_by_loss,
    read_run_scores,
    subjects,
    write_evaluator,
)
from archsearch.lab.search_tables import Row, Standing, print_standing
from archsearch.search.front import Scale
from archsearch.search.records import TrialSpec
from archsearch.search.space import analytic_costs

from .map_tables import SHAPE, made_up_table, random_scores

ROOT = Path(__file__).parents[2]
SETTING = next(iter(SETTINGS))


@pytest.fixture(scope="module")
def evaluator_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    table, scores = made_up_table(150, 7), random_scores(7)
    everything = np.arange(150)
    hyper = {loss: s.fit(everything, 60, 0) for loss, s in subjects(table, scores).items()}
    path = tmp_path_factory.mktemp("evaluator") / "maps.npz"
    write_evaluator(table, scores, hyper, path)
    return path


@pytest.fixture(scope="module")
def bench(evaluator_file: Path) -> Bench:
    return Bench(SearchEvaluator.load(evaluator_file), load_config(ROOT / CONFIG))


def test_evaluator_comes_back_from_its_file_and_tells_measured_maps(bench: Bench) -> None:
    evaluator, table = bench.evaluator, made_up_table(150, 7)
    assert evaluator.scores == random_scores(7)
    for row in range(0, 150, 10):
        head_map = head_map_of(SHAPE, table.full_NLH[row])
        found = evaluator.metrics(head_map)
        assert set(found) == set(table.columns)
        np.testing.assert_allclose(
            [found[name] for name in ("kl", "niah_single_nll")],
            table.values_NK[row, [0, 2]],
            rtol=0.1,
            atol=0.02,
        )
        assert found | analytic_costs(head_map, CostConfig()) == found


def test_evaluator_is_a_worker(bench: Bench) -> None:
    head_map = HeadMap.uniform(SHAPE, Operator.GDN)
    result = bench.evaluator(TrialSpec(5, head_map.to_json(), 0))
    assert (result.candidate, result.status) == (5, "ok")
    assert result.metrics == bench.evaluator.metrics(head_map)


def test_evaluator_is_surer_of_measured_maps(bench: Bench) -> None:
    measured = [head_map_of(SHAPE, full) for full in bench.evaluator.table.full_NLH[:60]]
    draw = np.random.default_rng(0)
    others = [head_map_of(SHAPE, draw.random((4, 4)) < 0.4) for _ in range(60)]
    near_N, far_N = (bench.evaluator.deviation(maps) for maps in (measured, others))
    assert 0 < near_N.mean() < 0.9 * far_N.mean()


def test_figures_share_their_losses_hyperparameters() -> None:
    names = ("kl", "top1_agreement", "a_b_nll", "c_nll", "a_b_token_match", "c_match", "fa_share")
    found = figures_by_loss(names)
    assert found == {
        "kl": ["kl", "top1_agreement"],
        "a_b_nll": ["a_b_nll", "a_b_token_match"],
        "c_nll": ["c_nll", "c_match"],
    }


def test_a_table_without_hyperparameters_is_no_evaluator(tmp_path: Path) -> None:
    made_up_table(9, 0).save(tmp_path / "table.npz")
    with pytest.raises(ConfigError, match="but no evaluator"):
        SearchEvaluator.load(tmp_path / "table.npz")
    with pytest.raises(ConfigError, match="no table"):
        SearchEvaluator.load(tmp_path / "missing.npz")


def test_scores_of_another_run_are_refused(scored_run: Path) -> None:
    table = made_up_table(9, 0)
    with pytest.raises(ConfigError, match="not the scores that the maps were drawn by"):
        read_run_scores(table, scored_run)


def test_the_shipped_file_is_small_and_whole() -> None:
    table = MapTable.load(ASSET)
    assert ASSET.stat().st_size <= 1_000_000
    assert np.isfinite(table.values_NK).all()
    hyper = {loss: Hyperparameters(**h) for loss, h in table.facts[HYPERPARAMETERS].items()}
    assert set(hyper) == set(figures_by_loss(table.columns))
    assert {f"scores/{name}/heads" for name in table.facts["scores"]} <= set(table.extra)


def test_matches_are_played_once_and_counted(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger(tmp_path / "bench.jsonl")
    names = ["tpe", "nsga2", "random", PROGRAM]
    matches = list_matches([SETTING], names, 50, {"evaluator": "made up"})[:4]
    assert [match.contestant for match in matches] == names
    play_all(bench, matches, ledger, float("inf"))
    rows = ledger.rows()
    assert len(rows) == 4
    for match in matches[:3]:
        values = rows[match.key]["values"]
        assert values["maps"] == 50  # None twice, the seeds among them.
        assert 5 < values["seeds"] < 50
        volumes = [values["volumes"][str(n)] for n in range(5, 51, 5)]
        assert volumes == sorted(volumes)
        assert 0 < volumes[-1] < 1
    before = ledger.path.read_bytes()
    play_all(bench, matches, ledger, float("inf"))
    assert ledger.path.read_bytes() == before
    (standing,) = standings(bench, matches, rows)
    assert standing.everything >= max(row.volume(50) or 0 for row in standing.rows)
    print_standing(standing)
    assert all(name in capsys.readouterr().out for name in (names[0],))
    book = LabBook(0)
    standing.add_to(book, preliminary=True)
    assert "hypervolume of tpe after 50 trials" in {row["metric"] for row in book.rows}


def test_a_match_is_the_same_when_played_again(bench: Bench) -> None:
    match = list_matches([SETTING], ["tpe"], 30, {})[0]
    first, second = bench.play(match), bench.play(match)
    assert first["volumes"] == second["volumes"]
    assert first["front"] == second["front"]


def test_no_match_begins_after_the_time(bench: Bench, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "bench.jsonl")
    play_all(bench, list_matches([SETTING], ["random"], 20, {}), ledger, 0.0)
    assert ledger.rows() == {}


def test_first_matches_of_all_come_before_second_ones() -> None:
    matches = list_matches(list(SETTINGS), list(CONTESTANTS), 400, {})
    assert [m.seed for m in matches] == sorted(m.seed for m in matches)
    lengths = {(m.contestant, m.trials) for m in matches}
    assert ("gp", 100) in lengths
    assert ("guided free", 400) in lengths
    assert len({m.key for m in matches}) == len(matches)
    per_setting = [m.contestant for m in matches if m.setting == SETTING]
    assert (per_setting.count("gp"), per_setting.count("tpe")) == (3, 5)


def test_trials_to_the_rivals_end() -> None:
    def row(name: str, seed: int, volumes: dict[str, float]) -> Row:
        return Row(
            name,
            seed,
            {"volumes": volumes, "front": [[0.1, 0.1]], "seconds": 1.0, "deviation": 0.0},
        )

    rows = [
        row("nsga2", 0, {"50": 0.3, "400": 0.6}),
        row("nsga2", 1, {"50": 0.4, "400": 0.8}),
        row("guided free", 0, {"50": 0.6, "100": 0.7, "400": 0.9}),
        row("guided free", 1, {"50": 0.6, "100": 0.65, "400": 0.69}),
    ]
    objectives = load_config(ROOT / CONFIG).search.objectives
    standing = Standing.of("any", rows, Scale(objectives, (0.0, 0.0), (1.0, 1.0)))
    assert standing.target() == pytest.approx(0.7)
    assert [standing.trials_to_target(r) for r in rows] == [None, 400, 100, None]
    assert standing.everything == pytest.approx(0.81)


def test_ledger_keys_say_what_outcomes_depend_on() -> None:
    (match, *_) = list_matches([SETTING], ["tpe"], 50, {"sources": "abc"})
    assert json.loads(match.key) == {
        "setting": SETTING,
        "contestant": "tpe",
        "seed": 0,
        "trials": 50,
        "sources": "abc",
    }
