"""Thousands of head maps measured in one model: the same figures as cut students, in parts, after kills, and joined."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from archsearch.config import CostConfig
from archsearch.data.niah import Probe
from archsearch.errors import ConfigError
from archsearch.evaluation.divergence import TeacherReference, divergence
from archsearch.evaluation.retrieval import retrieval
from archsearch.headmap import HeadMap, ModelShape
from archsearch.lab import map_measures
from archsearch.lab.map_list import FAMILIES, draw_maps, head_map_of
from archsearch.lab.map_measures import Readings, SwitchedModel, present_scores
from archsearch.lab.map_table import MADE_BY, MapTable, join
from archsearch.models.cut import cut
from archsearch.models.teacher import Teacher
from archsearch.rundir import RunDir
from archsearch.search.seeds import ScoreTables
from archsearch.search.space import analytic_costs
from tests.random_models import VOCABULARY, random_supernet, random_teacher

SHAPE = ModelShape("llama", 12, 9, 3, 16)
SMALL = ("--sequences", "2", "--kinds", "single", "--prompts", "2", "--context", "64")


def random_scores(shape: ModelShape, seed: int = 0) -> dict[str, ScoreTables]:
    draw = np.random.default_rng(seed)
    return {
        name: ScoreTables(
            draw.random((shape.num_layers, shape.num_heads)).tolist(),
            draw.random((shape.num_layers, shape.num_kv_heads)).tolist(),
        )
        for name in ("causal", "replacement_kl")
    }


def random_probes(seed: int) -> list[Probe]:
    """Prompts of two kinds, whose answers and lengths differ."""
    draw = np.random.default_rng(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.integers(1, VOCABULARY, count).tolist())

    return [
        Probe(kind, 40, tokens(length), tokens(answer), tokens(length), tokens(answer))
        for kind, length, answer in (
            ("single", 31, 3),
            ("multikey", 40, 4),
            ("single", 17, 1),
            ("multikey", 29, 2),
            ("single", 38, 4),
        )
    ]


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def teacher(request: pytest.FixtureRequest) -> Teacher:
    return random_teacher(request.param, num_layers=3)


@pytest.mark.parametrize("batch_tokens", [10_000, 90])
def test_figures_are_those_of_a_student_that_is_cut(teacher: Teacher, batch_tokens: int) -> None:
    supernet, probes = random_supernet(teacher), random_probes(2)
    text_RT = torch.randint(VOCABULARY, (3, 36), generator=torch.Generator().manual_seed(3))
    switched = SwitchedModel(teacher, supernet)
    readings = Readings(teacher, text_RT, probes, batch_tokens)
    reference = TeacherReference(teacher, text_RT)
    maps = draw_maps(teacher.shape, random_scores(teacher.shape), 24, 4).full_NLH
    for full_LH in maps:
        row = readings.measure(switched.set_map(full_LH)).tolist()
        found = dict(zip(readings.columns, row, strict=True))
        student = cut(teacher, supernet, head_map_of(teacher.shape, full_LH))
        wanted = divergence(student, reference) | retrieval(student, probes)
        assert wanted.keys() < found.keys()
        for name, value in wanted.items():
            assert found[name] == pytest.approx(value, rel=1e-4, abs=2e-6), name
    kl = readings.columns.index("kl")
    assert readings.measure(switched.set_map(maps[0]))[kl] == pytest.approx(0, abs=1e-6)
    assert readings.measure(switched.set_map(maps[1]))[kl] > 1e-3


def test_the_share_of_right_tokens_is_counted_by_token(teacher: Teacher) -> None:
    probes = random_probes(5)
    # Greedy answers, but for the last token of one: all tokens right, and one less.
    answers = []
    for probe in probes:
        row = list(probe.prompt)
        for _ in probe.answer:
            row.append(int(teacher.model(input_ids=torch.tensor([row])).logits[0, -1].argmax()))
        answers.append(tuple(row[len(probe.prompt) :]))
    wrong = (answers[0][-1] + 1) % VOCABULARY
    answers[0] = (*answers[0][:-1], wrong)
    probes = [replace(p, answer=a) for p, a in zip(probes, answers, strict=True)]
    readings = Readings(teacher, torch.randint(VOCABULARY, (1, 20)), probes, 10_000)
    switched = SwitchedModel(teacher, random_supernet(teacher))
    full_LH = np.ones((teacher.shape.num_layers, teacher.shape.num_heads), dtype=np.bool_)
    row = readings.measure(switched.set_map(full_LH)).tolist()
    found = dict(zip(readings.columns, row, strict=True))
    assert found["niah_single_token_match"] == pytest.approx(7 / 8)
    assert found["niah_single_match"] == pytest.approx(2 / 3)
    assert found["niah_multikey_token_match"] == found["niah_multikey_match"] == 1


def test_the_list_is_fixed_and_its_prefixes_are_shorter_lists() -> None:
    scores = random_scores(SHAPE)
    long, again, short = (draw_maps(SHAPE, scores, count, 7) for count in (600, 600, 150))
    assert np.array_equal(long.full_NLH, again.full_NLH)
    assert np.array_equal(long.full_NLH[:150], short.full_NLH)
    assert np.array_equal(long.family_N[:150], short.family_N)
    assert len({row.tobytes() for row in long.full_NLH}) == 600
    assert long.full_NLH[0].all()
    assert not long.full_NLH[1].any()
    other = draw_maps(SHAPE, scores, 600, 8).full_NLH
    assert len({row.tobytes() for row in other} & {row.tobytes() for row in long.full_NLH}) < 200


def test_every_part_has_every_family_and_size() -> None:
    maps = draw_maps(SHAPE, random_scores(SHAPE), 1500, 9)
    shares = maps.full_NLH.mean((1, 2))
    for part in range(3):
        families = Counter(FAMILIES[code] for code in maps.family_N[part::3])
        total = families.total()
        assert families["random"] / total == pytest.approx(0.2, abs=0.06)
        assert families["groups"] / total == pytest.approx(0.1, abs=0.05)
        assert (families["ranked"] + families["seed"]) / total == pytest.approx(0.4, abs=0.07)
        assert families["mutated"] / total == pytest.approx(0.3, abs=0.07)
        counts, _ = np.histogram(np.log2(np.maximum(shares[part::3], 1 / 64)), 6, (-6, 0))
        assert counts.min() / total > 0.08


def test_families_are_what_they_are_called() -> None:
    scores = random_scores(SHAPE)
    maps = draw_maps(SHAPE, scores, 800, 10)
    families = np.array(FAMILIES)[maps.family_N]
    by_group = maps.full_NLH.reshape(len(maps.full_NLH), -1, SHAPE.group_size)
    whole = (by_group.all(-1) | ~by_group.any(-1)).all(-1)
    assert whole[families == "groups"].all()
    assert not whole[families == "random"].all()
    # Ranked maps keep heads of high scores; random ones do not.
    mean_LH = np.mean([np.array(tables.heads) for tables in scores.values()], axis=0)
    small = (maps.full_NLH.mean((1, 2)) < 0.3) & maps.full_NLH.any((1, 2))

    def kept(family: str) -> float:
        rows = maps.full_NLH[(families == family) & small]
        return float(np.mean([mean_LH[row].mean() for row in rows]))

    assert kept("ranked") > kept("random") + 0.1
    assert kept("mutated") > kept("random") + 0.05
    # A mutation is at most eight heads away from a map before it, twice that for swaps.
    flat = maps.full_NLH.reshape(len(maps.full_NLH), -1)
    for index in np.flatnonzero(families == "mutated"):
        assert (flat[:index] ^ flat[index]).sum(-1).min() <= 16


def test_without_scores_the_other_families_remain() -> None:
    maps = draw_maps(SHAPE, {}, 200, 11)
    assert {FAMILIES[code] for code in maps.family_N} == {"uniform", "random", "groups", "mutated"}
    with pytest.raises(ValueError, match="--maps"):
        draw_maps(ModelShape("llama", 1, 4, 2, 16), {}, 17, 11)


def run_it(patch: pytest.MonkeyPatch, *words: str) -> None:
    with patch.context() as only:
        only.setattr(sys, "argv", ["map_measures", *map(str, words)])
        map_measures.main()


def test_parts_stop_go_on_and_join(
    scored_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(map_measures, "AT_ONCE", {"cpu": 2})
    monkeypatch.setattr(map_measures, "SAVE_SECONDS", 0.0)
    first, second, whole = (tmp_path / f"{name}.npz" for name in ("a", "b", "whole"))
    words = (str(scored_run), "--maps", "20", *SMALL)
    # The clock passes its end after two saves; maps that are launched by then are measured too.
    saves = []
    monkeypatch.setattr(MapTable, "save", _counted(saves, MapTable.save))
    clock = _Clock(stop_after=lambda: len(saves) >= 2)
    monkeypatch.setattr(map_measures, "time", clock)
    run_it(monkeypatch, *words, "--part", "0/2", "--seconds", "1000", "--to", str(first))
    stopped = MapTable.load(first)
    assert stopped.indices_N.tolist() == [0, 2, 4, 6, 8, 10]
    assert "4 missing" in capsys.readouterr().out
    monkeypatch.setattr(map_measures, "time", time)
    run_it(monkeypatch, *words, "--part", "0/2", "--to", str(first))
    assert "4 of 10 maps to measure" in capsys.readouterr().out
    run_it(monkeypatch, *words, "--part", "1/2", "--to", str(second))
    run_it(monkeypatch, "--join", str(second), str(first), "--to", str(whole))
    assert "20 maps, 0 not finite" in capsys.readouterr().out
    table = MapTable.load(whole)
    assert table.indices_N.tolist() == list(range(20))
    run = RunDir(scored_run)
    shape = ModelShape(**run.read_json("teacher.json")["model"])
    listed = draw_maps(shape, present_scores(run), 20, map_measures.LIST_SEED)
    assert np.array_equal(table.full_NLH, listed.full_NLH)
    assert np.array_equal(table.families_N, listed.family_N)
    assert [made["maps"] for made in table.facts[MADE_BY]] == [10, 6, 4]
    # All at once gives the same figures.
    once = tmp_path / "once.npz"
    run_it(monkeypatch, *words, "--to", str(once))
    assert np.allclose(MapTable.load(once).values_NK, table.values_NK, rtol=1e-4, atol=1e-6)
    column = dict(zip(table.columns, table.values_NK.T, strict=True))
    cost = run.load_config().cost
    costs = [analytic_costs(head_map_of(shape, row), cost) for row in table.full_NLH]
    assert column["cache_bytes"].tolist() == [row["cache_bytes"] for row in costs]
    assert column["fa_share"].tolist() == pytest.approx([row["fa_share"] for row in costs])


class _Clock(SimpleNamespace):
    """time.monotonic that jumps ahead once stop_after says so."""

    def monotonic(self) -> float:
        return time.monotonic() + (1e6 if self.stop_after() else 0)


def _counted(calls: list[Path], save: object) -> object:
    def counted(table: MapTable, path: Path) -> None:
        save(table, path)  # type: ignore[operator]
        calls.append(path)

    return counted


def test_figures_of_other_things_are_not_mixed(
    scored_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "a.npz", tmp_path / "b.npz"
    words = (str(scored_run), "--maps", "4", *SMALL)
    run_it(monkeypatch, *words, "--to", str(first))
    with pytest.raises(ConfigError, match="text"):
        run_it(monkeypatch, *words, "--tokens", "32", "--to", str(first))
    with pytest.raises(ConfigError, match="list_seed"):
        run_it(monkeypatch, *words, "--seed", "1", "--to", str(first))
    run_it(monkeypatch, *words, "--set", "probes.digits=3", "--to", str(second))
    with pytest.raises(ConfigError, match="prompts"):
        join([first, second])
    shutil.copy(first, second)
    table = MapTable.load(first)
    replace(table, full_NLH=~table.full_NLH).save(second)
    with pytest.raises(ConfigError, match="map 0"):
        join([first, second])
    with pytest.raises(ConfigError, match="not in this list"):
        run_it(monkeypatch, *words, "--to", str(second))
    second.write_bytes(first.read_bytes()[:-200])
    with pytest.raises(ConfigError, match="damaged"):
        MapTable.load(second)


def test_a_table_comes_back_as_it_was_and_stays_small(tmp_path: Path) -> None:
    shape = ModelShape("llama", 30, 9, 3, 64)
    draw = np.random.default_rng(12)
    maps = draw_maps(shape, random_scores(shape), 400, 13, CostConfig())
    columns = tuple(f"column_{number}" for number in range(10))
    values = draw.random((400, 10)).astype(np.float32)
    facts = {"model": vars(shape), MADE_BY: [{"maps": 400}]}
    table = MapTable(
        maps.full_NLH, np.arange(400, dtype=np.int32), maps.family_N, values, columns, facts
    )
    table.save(tmp_path / "table.npz")
    back = MapTable.load(tmp_path / "table.npz")
    assert np.array_equal(back.full_NLH, table.full_NLH)
    assert np.array_equal(back.values_NK, values)
    assert (back.columns, back.facts) == (columns, json.loads(json.dumps(facts)))
    # 5000 maps within a megabyte.
    assert (tmp_path / "table.npz").stat().st_size < 1e6 * 400 / 5000
    full = head_map_of(shape, back.full_NLH[5])
    assert isinstance(full, HeadMap)
    assert len(full.full_heads()) == back.full_NLH[5].sum()
