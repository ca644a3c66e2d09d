"""Searches compared on a random model: found maps beside selectors', each trained once, on text and prompts that no search had."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archsearch.config import ObjectiveConfig
from archsearch.errors import ConfigError, RunFault
from archsearch.execution.serial import SerialExecutor
from archsearch.headmap import HeadMap
from archsearch.lab import search_compare
from archsearch.lab.bench_folder import read_config, read_shape
from archsearch.lab.found_maps import found_entries, merged, missing_scores, picks
from archsearch.lab.found_tables import beside, rows_at, show_share
from archsearch.lab.ledger import Ledger
from archsearch.lab.search_runs import Evaluation, Rung, Search
from archsearch.lab.selection_maps import CONTROL, Entry
from archsearch.lab.selection_tables import Line, Table
from archsearch.lab.student_worker import StudentWorker
from archsearch.rundir import RunDir
from archsearch.search.driver import run_search
from archsearch.search.front import Candidate
from archsearch.search.seeds import read_scores
from tests.search.fakes import SHAPE, FakeWorker, fake_config

HEADS = SHAPE.heads()
KL = ObjectiveConfig(metric="kl", direction="minimize")


def searched(run: Path, **search: Any) -> Path:
    """Made-up figures of a search in a run directory, with these fields of its section search."""
    config = RunDir(run).load_config()
    config = config.model_copy(update={"search": config.search.model_copy(update=search)})
    with RunDir(run) as run_dir:
        run_dir.write_json("config.json", config.model_dump(mode="json", by_alias=True))
        run_search(
            config,
            run_dir,
            read_shape(run_dir),
            read_scores(run_dir, ["causal", "replacement_kl"]),
            make_executor=lambda: SerialExecutor(FakeWorker, {"log": str(run / "calls.jsonl")}),
        )
    return run


@pytest.fixture
def runs(scored_run: Path) -> tuple[Path, Path]:
    other = Path(shutil.copytree(scored_run, scored_run.with_name("tpe")))
    ours = searched(scored_run, sampler="guided", representation="free")
    return ours, searched(other, random_control=False)


@pytest.fixture
def words(runs: tuple[Path, Path], tmp_path: Path) -> list[str]:
    """A command line of few maps, little training, and text of its own."""
    text = tmp_path / "text.npy"
    np.save(text, np.random.default_rng(7).integers(2, 60, (2, 96)).astype(np.uint16))
    options = [
        "probes.kinds=[single]",
        "probes.unseen=[]",
        "probes.contexts=[64, 96]",
        "probes.prompts=2",
        "probes.files=[]",
        "data.extra_heldout=[]",
        "data.heldout_sequences=2",
        f"data.heldout={{source: file, path: {text}}}",
    ]
    few = ["--only", "causal", "even_layers", "--shares", "0.5", "0.25", "--tokens", "192"]
    return [*map(str, runs), *few, *(word for option in options for word in ("--set", option))]


def call(patch: pytest.MonkeyPatch, *words: str) -> None:
    with patch.context() as only:
        only.setattr(sys, "argv", ["search_compare", *words])
        search_compare.main()


def rows_of(run: Path) -> list[dict[str, Any]]:
    return list(Ledger(run / "compare" / "readings.jsonl").rows().values())


def test_found_maps_and_selectors_are_trained_once_and_compared(
    runs: tuple[Path, Path],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    figures = tmp_path / "figures.json"
    call(monkeypatch, *words, "--figures", str(figures))
    said = capsys.readouterr().out
    assert "| hypervolume after 0 tokens a map | trials | seconds | 1.2 s | 2.5 s |" in said
    assert "| hypervolume after 256 tokens a map | trials | seconds | all |" in said
    assert "| guided, free | 10 | 5.0 |" in said
    assert "held-out text: 0 rows share a passage" in said
    assert "| map at 0.5 after 192 tokens | FA share | cache | KL | " in said
    assert "guided, free: candidate" in said.partition("| map at 0.25")[2]
    students = [row for row in rows_of(runs[0]) if row["map"] is not None]
    assert {row["tokens"] for row in students} == {192}
    maps = {json.dumps(row["map"]) for row in students}
    assert len(maps) == len(students) > 5
    records = {row["metric"]: row for row in json.loads(figures.read_text())}
    found = [row for name, row in records.items() if name.startswith("kl, found by guided, free")]
    # All selectors' maps there are: causal by head and by group, and the layers, as far as they are different ones.
    assert found
    assert all(2 <= int(row["compared_to"].split()[0]) <= 3 for row in found)
    shares = [float(row["metric"].rpartition("share ")[2].partition(",")[0]) for row in found]
    assert all(row["fa_share"] <= share for row, share in zip(found, shares, strict=True))
    assert "hypervolume of guided, free: random control, at 0 tokens a map" in records
    assert records["rows of held-out text that a search was measured on"]["value"] == 0
    text = (runs[0] / "compare" / "readings.jsonl").read_text()
    monkeypatch.setattr(StudentWorker, "__init__", lambda *_: pytest.fail("a worker was started"))
    call(monkeypatch, *words)
    assert (runs[0] / "compare" / "readings.jsonl").read_text() == text


def test_prompts_and_text_are_none_of_the_searches(
    runs: tuple[Path, Path], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_config(RunDir(runs[0]), [])
    (first, *_) = search_compare.read_searches(runs)
    measured = search_compare.measured_config(first, ["probes.unseen=[]"])
    assert measured.seed != config.seed
    assert measured.probes.kinds == config.probes.kinds
    # As in a trial of this run, whose rate falls from the first step on.
    assert (config.distill.decay_share, measured.distill.decay_share) == (1, 0.999)
    with pytest.raises(ConfigError, match="--set seed=3: the searches' own prompts"):
        call(monkeypatch, *words, "--set", "seed=3")
    own = "data.heldout={source: teacher}"
    with pytest.raises(ConfigError, match=r"heldout.npy: is text that the searches were measured"):
        call(monkeypatch, *words, "--set", own, "--seconds", "0")


def test_time_that_is_over_leaves_maps_and_a_dry_run_writes_nothing(
    runs: tuple[Path, Path],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    call(monkeypatch, *words, "--dry-run", "--rate", "96")
    said = capsys.readouterr().out
    maps = int(said.partition(" maps to train")[0].split()[-1])
    assert f"{maps * 192 / 96:.0f} s at 96 a second" in said
    assert not (runs[0] / "compare").exists()
    call(monkeypatch, *words, "--seconds", "0")
    assert f"{maps} maps left: the same command goes on" in capsys.readouterr().out
    assert rows_of(runs[0]) == []


def test_students_that_fail_are_named_at_the_end(
    words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figures = tmp_path / "figures.json"
    broken = ["--set", "distill.learning_rate=1e30", "--shares", "0.5", "--figures", str(figures)]
    with pytest.raises(RunFault, match=r"\d+ students failed: .*causal by head"):
        call(monkeypatch, *words, *broken)
    assert json.loads(figures.read_text())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shares", "1.5"], "--shares: allowed: above 0 and below 1"),
        (["--seeds", "0"], "allowed: --seeds of 1 or more"),
        (["--tokens", "-1"], "--tokens of 0 or more"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=said):
        call(monkeypatch, "RUN", *words)


def test_selectors_without_scores_are_left_out(scored_run: Path) -> None:
    run = RunDir(scored_run)
    assert missing_scores(run) == {}
    (run / "scores" / "replacement_nll.json").unlink()
    lacking = missing_scores(run)
    assert set(lacking) == {"replacement_nll", "program_both"}
    assert lacking["program_both"] == ["replacement_nll"]


def candidate(
    number: int, source: str, heads: int, kl: float, *, feasible: bool = True
) -> Candidate:
    head_map = HeadMap.from_full_heads(SHAPE, HEADS[number : number + heads])
    return Candidate(number, source, {"kl": kl, "niah_single_match": kl}, head_map, feasible)


POOL = [
    candidate(0, "causal", 4, 0.1),
    candidate(1, "search", 4, 0.2),
    candidate(2, "search", 4, 0.05, feasible=False),
    candidate(3, "search", 5, 0.01),
    candidate(4, "search", 3, 0.2),
]


def test_the_best_within_a_share_may_be_a_seed() -> None:
    assert [c.candidate for c in picks(POOL, KL, 0.25)] == [0, 1]
    assert [c.candidate for c in picks(POOL, KL, 0.5)] == [3]
    assert [c.candidate for c in picks(POOL, KL, 0.19)] == [4]
    # A selector takes the nearest whole number of heads: 2 of 16 here, 3 there.
    assert picks(POOL, KL, 0.15) == []
    assert [c.candidate for c in picks(POOL, KL, 0.16)] == [4]
    most = ObjectiveConfig(metric="niah_single_match", direction="maximize")
    assert [c.candidate for c in picks(POOL, most, 0.25)] == [1]


def search_of(name: str, *rungs: list[Candidate]) -> Search:
    lengths = zip((0, 1000), rungs, strict=False)
    made = [Rung(n, tuple(Evaluation(c.source, 1, c) for c in pool), ()) for n, pool in lengths]
    return Search(name, RunDir("none"), fake_config(), tuple(made))


def test_a_found_map_stands_once_with_all_that_it_is_best_by() -> None:
    entries = found_entries([search_of("a", POOL, POOL[1:]), search_of("b", POOL[:1])], [0.25])
    names = {name for entry in entries for name in entry.names}
    assert names == {
        ("a", "from causal, best kl after 0 tokens", 0.25, 0),
        ("a", "from search, best kl after 0 and 1,000 tokens", 0.25, 1),
        ("b", "from causal, best kl after 0 tokens", 0.25, 0),
    }
    assert [len(entry.names) for entry in entries] == [2, 1]
    selectors = [Entry(POOL[0].head_map, [("causal", "head", 0.25, 0)])]
    both = merged(entries, selectors)
    assert [len(entry.names) for entry in both] == [3, 1]
    assert [len(entry.names) for entry in entries] == [2, 1]


def line(number: int, kl: float, needles: float, *names: tuple[str, str, float, int]) -> Line:
    """A reading of four heads in the first layer or of four in two layers, which take more cache."""
    heads = HEADS[:4] if number % 2 else HEADS[2:6]
    head_map = HeadMap.from_full_heads(SHAPE, [*heads, HEADS[8 + number]])
    values = {"kl": kl, "a_match": needles, "a_nll": 1.0, "b_match": 1.0, "b_nll": 0.0}
    row = {"values": values, "train_seconds": 1.0, "measure_seconds": 1.0}
    return Line("compare", names, head_map, 1000, 0, row)


def test_a_found_map_is_counted_against_every_selectors() -> None:
    lines = [
        line(0, 0.5, 0.5, ("ours", "from search, best kl after 0 tokens", 0.25, 7)),
        line(1, 0.4, 0.5, ("causal", "head", 0.25, 0), ("theirs", "from causal", 0.25, 2)),
        line(2, 0.6, 0.4, ("random", "head", 0.25, 1)),
        line(4, 0.3, 0.4, ("blend", "head", 0.25, 0)),
        line(3, 0.0, 1.0, (CONTROL, "head", 0.25, 0)),
        line(5, 0.1, 0.9, ("blend", "head", 0.5, 0)),
    ]
    # The teacher itself fails at the second kind, which then decides nothing.
    teacher = {"kl": 0.0, "a_match": 1.0, "a_nll": 0.0, "b_match": 0.5, "b_nll": 0.0}
    table = Table(lines, teacher, fake_config())
    rows = rows_at(table, 0.25)
    assert [row.kl for row in rows] == [0.4, 0.5, 0.3, 0.6]
    theirs, ours = sorted(beside(rows), key=lambda one: one.row.kl)
    assert (len(ours.selectors), ours.higher_kl, ours.fewer_needles) == (3, 1, 2)
    assert ours.beaten_by == ["causal by head"]
    assert (theirs.higher_kl, theirs.beaten_by) == (1, [])
    assert ours.text == (
        "ours: candidate 7 from search, best kl after 0 tokens: KL 0.5000, below that of 1 of 3 selectors' maps; needles "
        "0.500, above those of 2; beaten in KL, needles and cache by causal by head"
    )
    failed = line(6, 0.2, 1.0, ("causal", "group", 0.25, 0))
    failed.row.pop("values")  # type: ignore[attr-defined]
    failed.row["failed"] = "loss is not finite"  # type: ignore[index]
    shown = show_share(Table([*lines, failed], teacher, fake_config()), 0.25)
    assert "| ours: candidate 7 from search | 0.312 | " in shown
    assert "random 2 by head" in shown
    assert "causal by group: loss is not finite" in shown
    assert (
        "| map at 0.25 after 1,000 tokens | FA share | cache | KL | a | needles | their NLL |"
        in shown
    )
