"""The two scripts on the shipped tiny teacher: what they write and print."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from archsearch.configfile import load_config
from archsearch.errors import ConfigError
from archsearch.headmap import ModelShape
from archsearch.lab import knockout, score_stability
from archsearch.lab.head_losses import Key
from archsearch.models.teacher import Teacher, load_teacher, resolve_path
from archsearch.rundir import RunDir, score_file
from archsearch.scoring.head_scores import HeadScores, groups_of
from archsearch.scoring.pairs import draw_pairs
from archsearch.scoring.receivers import receiver_effects
from archsearch.search.seeds import ScoreTables
from archsearch.stages import RunContext

CONFIG = Path("search_spaces/tiny.yaml")
SMALL = (
    "teacher.device=cpu",
    "scoring.retrieval=[single,multikey]",
    "scoring.contexts=[160]",
    "scoring.min_pairs=2",
    "probes.multi_keys=3",
)


@pytest.fixture(scope="module")
def tiny() -> Teacher:
    return load_teacher(load_config(CONFIG, SMALL).teacher)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny: Teacher) -> list[Path]:
    """Two runs of other seeds: receiver effects as causal scores, and their opposite as another method's."""
    folder = tmp_path_factory.mktemp("runs")
    config = load_config(CONFIG, SMALL)
    pairs = [
        pair
        for probe in draw_pairs(tiny, config, seed=1)["retrieval"].values()
        for pair in probe.pairs[:2]
    ]
    best_LH = receiver_effects(tiny, pairs, decay=0.9, min_gap=0.0).heads_PLH.mean(0)
    tables = {"causal": best_LH, "attribution": -best_LH}
    found = []
    for seed in (0, 1):
        run_dir = RunDir(folder / f"seed{seed}")
        run_dir.path.mkdir()
        run_dir.freeze_config(load_config(CONFIG, [*SMALL, f"seed={seed}"]))
        shutil.copy(resolve_path(config.supernet.source), run_dir / "supernet.safetensors")
        for method, table_LH in tables.items():
            groups_LG = groups_of(table_LH, tiny.shape.num_kv_heads)
            HeadScores.of(method, table_LH, groups_LG).save(run_dir / score_file(method))
        found.append(run_dir.path)
    return found


def run_main(module: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, *words])
    module.main()


def figures_of(path: Path) -> dict[str, dict[str, Any]]:
    rows = json.loads(path.read_text())
    found = {row["metric"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def test_knockout_tells_good_scores_from_bad_ones(
    runs: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "knockout.json"
    words = [*map(str, runs), "--figures", str(target), "--pairs", "2", "--random", "1"]
    run_main(knockout, monkeypatch, *words, "--share", "0.1", "--device", "cpu")
    figures = figures_of(target)
    good = figures["answer NLL rise, causal by corrupt, all"]
    assert good["run_seeds"] == [0, 1]
    assert good["value"] == pytest.approx(sum(good["by_run"]) / 2)
    assert good["least"] == min(good["by_run"])
    # The heads of the largest effects hold the answer; those of the least do not.
    assert good["value"] > 1
    assert abs(figures["answer NLL rise, attribution by corrupt, all"]["value"]) < 0.5
    assert 0 <= figures["exact match fall, causal by corrupt, retrieval"]["value"] <= 1
    assert len(figures["answer NLL rise, causal by twin, retrieval"]["by_run"]) == 2
    opposite = figures["Spearman of head scores, causal and attribution"]["value"]
    assert opposite == pytest.approx(-1)
    printed = capsys.readouterr().out
    assert "| causal |" in printed
    assert "| random |" in printed


def test_times_random_is_over_the_mean_of_all_runs() -> None:
    def losses(causal: float, chance: float) -> dict[Key, float]:
        by_name = {"causal": causal, "random": chance}
        return {(name, "corrupt", "all", knockout.NLL): v for name, v in by_name.items()}

    first, second = knockout.with_times_random([losses(3.0, 0.5), losses(5.0, 0.0)])
    key = ("causal", "corrupt", "all", knockout.TIMES_RANDOM)
    assert first[key] == pytest.approx(12)
    assert second[key] == pytest.approx(20)
    (harmless,) = knockout.with_times_random([losses(3.0, -0.1)])
    assert key not in harmless


def test_knockout_pairs_are_not_the_runs_own(runs: list[Path], tiny: Teacher) -> None:
    run_dir = RunDir(runs[0])
    config = run_dir.load_config()
    own = draw_pairs(tiny, config, seed=RunContext(config, run_dir).seed("scoring"))
    bench = knockout.fresh_bench(run_dir, config, tiny, 2)
    rows = {tuple(row.tolist()) for batch in bench.batches for row in batch.ids_2PT}
    assert len(rows) == 8
    for probe in own["retrieval"].values():
        for pair in probe.pairs:
            assert not any(row[: len(pair.prompt)] == pair.prompt for row in rows)


def test_knockout_without_scores_says_what_to_run(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="archsearch score"):
        knockout.read_tables(RunDir(tmp_path))


def test_sets_are_of_one_size_and_random_ones_differ() -> None:
    shape = ModelShape("llama", 5, 8, 4, 16)
    table = [[float(layer * 8 + head) for head in range(8)] for layer in range(5)]
    tables = {"causal": ScoreTables(table, table)}
    sets = knockout.head_sets(shape, tables, 0.05, 3, seed=0)
    assert sets["causal"] == [frozenset({(4, 6), (4, 7)})]
    assert {len(heads) for heads in sets["random"]} == {2}
    assert len(set(sets["random"])) == 3
    assert sets["random"] == knockout.head_sets(shape, tables, 0.05, 3, seed=0)["random"]
    assert sets["random"] != knockout.head_sets(shape, tables, 0.05, 3, seed=1)["random"]


def ranks_by_hand(teacher: Teacher, context: int) -> list[float]:
    """Average ranks of the heads by mean receiver effect times consistency, on 4 pairs of either sub-probe."""
    settings = load_config(CONFIG, [*SMALL, f"scoring.contexts=[{context}]", "scoring.pairs=4"])
    probes = draw_pairs(teacher, settings, seed=settings.seed)["retrieval"]
    means = [
        receiver_effects(teacher, probe.pairs, decay=0.9, min_gap=0.0).heads_PLH.mean(0).flatten()
        for probe in probes.values()
    ]
    assert len(means) == 2
    scores = [
        (one + other) / 2 * ((one > 0.01) + (other > 0.01)) / 2
        for one, other in zip(*(mean.tolist() for mean in means), strict=True)
    ]
    return [sum(b < a for b in scores) + sum(b == a for b in scores) / 2 for a in scores]


def test_score_stability_writes_halves_contexts_and_senders(
    tiny: Teacher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "stability.json"
    words = [str(CONFIG), *(word for item in SMALL for word in ("--set", item))]
    words += ["--figures", str(target), "--pairs", "4", "--contexts", "160", "192"]
    run_main(score_stability, monkeypatch, *words, "--splits", "3", "--senders", "2")
    figures = figures_of(target)
    for context in (160, 192):
        assert figures[f"usable pairs, single at {context}"]["value"] == 4
        for size in (1, 2):
            title = f"agreement of halves, context {context}, {size} pairs a sub-probe"
            for name in ("composite", "composite, top 20%", "shared top 5%", "retrieval"):
                assert figures[f"{title}, {name}"]["splits"] == 3
            # With one capability the composite is its score up to scale.
            composite, alone = (
                figures[f"{title}, {n}"]["value"] for n in ("composite", "retrieval")
            )
            assert composite == pytest.approx(alone)
    assert "agreement of halves, context 160, 3 pairs a sub-probe, composite" not in figures
    by_hand = statistics.correlation(*(ranks_by_hand(tiny, context) for context in (160, 192)))
    found = figures["agreement of contexts 160 and 192, composite"]["value"]
    assert found == pytest.approx(by_hand, abs=1e-3)
    title = "agreement of every other pair, 2 sender pairs a capability"
    assert figures[f"{title}, receivers alone, composite"]["value"] > 0
    assert figures[f"{title}, with senders, composite"]["value"] > 0
    assert "least pairs a sub-probe with a mean of 0.9, context 192" in capsys.readouterr().out
    assert torch.get_float32_matmul_precision() == "highest"
