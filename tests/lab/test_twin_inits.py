"""Twins by several recipes in one pass: each as if alone, forks that leave the trunk alone, readings within a time."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from archsearch.config import SupernetConfig
from archsearch.configfile import load_config
from archsearch.errors import ConfigError
from archsearch.headmap import Operator
from archsearch.lab import records, twin_inits
from archsearch.lab.records import LabBook
from archsearch.lab.twin_banks import Banks
from archsearch.lab.twin_inits import Bench, compare, head_maps
from archsearch.lab.twin_recipes import RECIPES, distinct, recipe_config
from archsearch.models.teacher import Teacher
from archsearch.rundir import RunDir
from tests.random_models import VOCABULARY, random_teacher, random_tokens

LENGTH, ROWS = 32, 4
BASE = SupernetConfig(batch_tokens=LENGTH * ROWS, learning_rate=3e-3, warmup_steps=2)


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return random_teacher("qwen3", num_layers=2)


def batches(step: int) -> Iterator[Tensor]:
    while True:
        generator = torch.Generator().manual_seed(step)
        yield torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
        step += 1


def banks_of(teacher: Teacher, *names: str, layers: tuple[int, ...] = (0, 1)) -> Banks:
    configs = {name: recipe_config(BASE, RECIPES[name]) for name in names}
    return Banks(teacher, configs, batches, layers, seed=0, replay=True)


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_recipe_learns(teacher: Teacher, name: str) -> None:
    banks = banks_of(teacher, name)
    heldout_NT = random_tokens(8, LENGTH, seed=9)
    (before,) = banks.errors(heldout_NT)
    banks.advance(banks.plans(30, 2), 30)
    (after,) = banks.errors(heldout_NT)
    assert after.mean() < before.mean()


def test_side_by_side_is_as_alone(teacher: Teacher) -> None:
    names = ("as configured", "no norm", "rate 8e-3")
    together = banks_of(teacher, *names)
    together.advance(together.plans(6, 2), 6)
    for name, bank in zip(names, together.banks, strict=True):
        alone = banks_of(teacher, name)
        alone.advance(alone.plans(6, 2), 6)
        for key, value in alone.banks[0].supernet.state_dict().items():
            assert torch.equal(bank.supernet.state_dict()[key], value), (name, key)


def test_a_fork_leaves_the_trunk_as_it_was(teacher: Teacher) -> None:
    forked, straight = (banks_of(teacher, "as configured") for _ in range(2))
    forked.advance(forked.plans(5, 2), 4)
    forked.fork(forked.plans(5, 2), 5)
    assert forked.step == 5
    forked.back()
    for banks in (forked, straight):
        banks.advance(banks.plans(20, 2), 8)
    wanted = straight.banks[0].supernet.state_dict()
    for key, value in forked.banks[0].supernet.state_dict().items():
        assert torch.equal(value, wanted[key]), key


def test_layers_alone_train_alone(teacher: Teacher) -> None:
    banks = banks_of(teacher, "as configured", layers=(1,))
    before = {key: value.clone() for key, value in banks.banks[0].supernet.state_dict().items()}
    banks.advance(banks.plans(3, 1), 3)
    changed = {
        key.split(".")[1]
        for key, value in banks.banks[0].supernet.state_dict().items()
        if not torch.equal(value, before[key])
    }
    assert changed == {"1"}
    (errors,) = banks.errors(random_tokens(2, LENGTH))
    assert errors.shape == (1, teacher.shape.num_heads)


def test_maps_come_from_the_scores_that_there_are(teacher: Teacher, tmp_path: Path) -> None:
    shape = teacher.shape
    even = head_maps(shape, None, 0)
    assert list(even) == ["all_gdn", "even_layers at 0.500"]
    assert even["all_gdn"].fa_share == 0
    table = [[float(layer * 4 + head) for head in range(4)] for layer in range(2)]
    groups = [row[:2] for row in table]
    scores = {"composite": table, "groups": groups}
    (tmp_path / "scores").mkdir()
    (tmp_path / "scores" / "replacement_kl.json").write_text(json.dumps(scores))
    found = head_maps(shape, tmp_path, 0)
    assert list(found) == [
        "all_gdn",
        "replacement_kl at 0.125",
        "replacement_kl at 0.250",
    ]
    assert found["replacement_kl at 0.125"].heads(1, Operator.FULL) == (3,)


def bench_of(teacher: Teacher, run_config: Path, folder: Path) -> Bench:
    settings = [f"supernet.batch_tokens={LENGTH * ROWS}", "data.sequence_length=32"]
    config = load_config(run_config, settings)
    texts = {"held-out text": random_tokens(4, LENGTH, seed=5)}
    maps = head_maps(teacher.shape, None, 0)
    return Bench(
        config,
        teacher,
        texts,
        RunDir(folder),
        (0, 1),
        maps,
        [],
        LabBook(0),
        folder / "figures.json",
    )


@pytest.mark.parametrize("seconds", [1e9, 0.0])
def test_readings_come_in_time(
    teacher: Teacher,
    run_config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
) -> None:
    monkeypatch.setattr(Bench, "batches", lambda self, batch_tokens: batches)
    bench = bench_of(teacher, run_config, tmp_path)
    batch = LENGTH * ROWS
    readings = [0, 20 * batch, 50 * batch]
    compare(bench, ["as configured", "no norm"], readings, seconds, replay=True)
    for name in ("as configured", "no norm"):
        rows = [row for row in bench.book.rows if row["recipe"] == name]
        errors = {row["tokens"]: row for row in rows if "by_layer_and_head" in row}
        # Without any time a fork is made of the first steps, and measured.
        last = 50 * batch if seconds else twin_inits.STEPS_AT_ONCE * batch * 10 // 8
        assert list(errors) == (readings if seconds else [0, last])
        assert errors[last]["value"] < errors[0]["value"]
        heads = torch.tensor(list(errors[last]["by_layer_and_head"].values()))
        assert float(heads.median()) == pytest.approx(errors[last]["value"], rel=1e-3)
        measured = [(row["map"], row["tokens"]) for row in rows if "map" in row]
        assert measured == [(name, tokens) for tokens in (0, last) for name in bench.maps]
    json.dumps(bench.book.rows, allow_nan=False)


def test_a_diverged_recipe_is_told_and_the_others_go_on(
    teacher: Teacher, run_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "batches", lambda self, batch_tokens: batches)
    monkeypatch.setitem(RECIPES, "rate 8e-3", {"learning_rate": 1e30})
    bench = bench_of(teacher, run_config, tmp_path)
    compare(bench, ["rate 8e-3", "no norm"], [20 * LENGTH * ROWS], 1e9, replay=False)
    texts = [row.get("text") for row in bench.book.rows if row["tokens"] and "map" not in row]
    assert texts == ["not finite", None]
    json.dumps(bench.book.rows, allow_nan=False)


def test_texts_are_made_where_there_are_none(run_config: Path, tmp_path: Path) -> None:
    config = load_config(run_config, [])
    figures = tmp_path / "figures.json"
    args = argparse.Namespace(layers=None, no_students=False, scores=None, figures=figures)
    bench = Bench.open(config, RunDir(tmp_path / "run"), args)
    assert set(bench.texts) == {"held-out text", "prompts"}
    assert bench.maps
    assert bench.probes
    assert next(bench.batches(96 * 3)(0)).shape == (3, 96)
    alone = argparse.Namespace(**vars(args) | {"layers": [1]})
    again = Bench.open(config, RunDir(tmp_path / "run"), alone)
    assert torch.equal(again.texts["held-out text"], bench.texts["held-out text"])
    assert not again.maps


def test_of_recipes_that_come_to_the_same_config_the_first_is_kept() -> None:
    base = BASE.model_copy(update={"learning_rate": 4e-3})
    assert list(distinct(base, ["as configured", "rate 4e-3", "no norm"])) == [
        "as configured",
        "no norm",
    ]
    assert "rate 4e-3" in distinct(BASE, RECIPES)
    assert len(distinct(base, RECIPES)) < len(RECIPES)


def test_figures_of_several_files_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        book = LabBook(0)
        book.add(name, value, "")
        book.write(tmp_path / f"{name}.json")
    words = ["--join", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--to"]
    monkeypatch.setattr("sys.argv", ["records", *words, str(tmp_path / "c.json")])
    records.main()
    rows = json.loads((tmp_path / "c.json").read_text())
    assert [(row["metric"], row["value"]) for row in rows] == [("a", 1.0), ("b", 2.0)]
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(ConfigError, match="no list of records"):
        records.main()
