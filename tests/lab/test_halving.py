"""Halving replayed over readings: the same candidates as a search with that halving takes, and hypervolumes by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from archsearch.config import RunConfig
from archsearch.configfile import load_config
from archsearch.errors import ConfigError
from archsearch.execution.serial import SerialExecutor
from archsearch.fidelity.records import FIDELITY_FILE, write_study
from archsearch.headmap import HeadMap, Operator
from archsearch.lab import halving
from archsearch.lab.halving_replay import drawn_share, replay, share_of_front, survivors
from archsearch.lab.halving_sources import RETRIEVAL, read_fidelity, read_ledger, read_run
from archsearch.lab.ledger import Ledger
from archsearch.lab.stand_in import SHAPE, Settings, StandInWorker, score_tables
from archsearch.rundir import RunDir
from archsearch.search.driver import run_search
from archsearch.search.front import Candidate, Scale
from archsearch.search.outcome import SearchOutcome
from archsearch.search.records import TrialResult, TrialSpec
from archsearch.search.space import random_map
from tests.fidelity.studies import LENGTHS, made_study
from tests.search.fakes import fake_config

MAP = HeadMap.uniform(SHAPE, Operator.GDN)


class NoisyWorker:
    """Stand-in figures that change their order from length to length."""

    def __init__(self, payload: dict[str, Any]) -> None:
        self._own = StandInWorker(payload)

    def __call__(self, spec: TrialSpec) -> TrialResult:
        result, rng = self._own(spec), Random(f"{spec.candidate} {spec.proxy_tokens}")
        values = {name: value * rng.uniform(0.5, 1) for name, value in result.metrics.items()}
        costs = {name: result.metrics[name] for name in ("fa_share", "cache_bytes")}
        return replace(result, metrics=values | costs)


def run_of(place: Path, keep: float) -> tuple[RunDir, RunConfig, SearchOutcome]:
    """A search of 40 maps at three lengths."""
    options = {"keep": keep, "bands": 3, "floor": 1}
    search = {"trials": 40, "sampler": "random", "proxy_tokens": [0, 100, 400], "halving": options}
    config = Settings(search).config()
    with RunDir(place) as run_dir:
        run_dir.freeze_config(config)
        run_dir.write_json("teacher.json", {"model": vars(SHAPE)})
        run_dir.record_provenance(0)
        outcome = run_search(
            config,
            run_dir,
            SHAPE,
            score_tables(),
            say=lambda line: None,
            make_executor=lambda: SerialExecutor(NoisyWorker, {"seconds": 0}),
        )
    return run_dir, config, outcome


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, RunConfig]:
    run_dir, config, _ = run_of(tmp_path_factory.mktemp("whole") / "run", 1)
    return run_dir, config


def test_a_run_that_prunes_none_tells_what_one_that_does_would_find(
    whole_run: tuple[RunDir, RunConfig], tmp_path: Path
) -> None:
    whole, config = whole_run
    pruned, pruning, outcome = run_of(tmp_path / "pruning", 0.3)
    readings = read_run(whole, config)
    alive = survivors(pruning.search, readings.rungs)
    assert alive == [{c.candidate for c in rung.search} for rung in outcome.rungs]
    found = replay(pruning, readings.rungs)
    assert 40 == found.kept[0] > found.kept[1] > found.kept[2]
    scale = Scale.of(config.search.objectives, readings.rungs[-1])
    ratio = scale.hypervolume(outcome.rungs[-1].search) / scale.hypervolume(readings.rungs[-1])
    assert found.volume == pytest.approx(ratio)
    assert readings.left_out == 0
    with pytest.raises(ConfigError, match=r"allowed: runs with .* search.halving.keep 1"):
        read_run(pruned, pruning)


def points(values: Sequence[tuple[float, float]]) -> list[Candidate]:
    return [
        Candidate(number, "search", {"kl": kl, "cache_bytes": cost, "fa_share": cost}, MAP)
        for number, (kl, cost) in enumerate(values)
    ]


def config_of(**search: Any) -> RunConfig:
    return fake_config(proxy_tokens=[0, 100, 400], **search)


def test_what_is_lost_is_lost_hypervolume() -> None:
    early = points([(4, 0), (0, 4), (4, 5), (4, 4)])
    # The third turns out to be the best, and would have been dropped at once.
    late = points([(4, 0), (0, 4), (1, 1), (4, 4)])
    options = {"keep": 0.5, "floor": 0, "bands": 1}
    found = replay(config_of(halving=options), [early, late, late])
    assert found.kept == (4, 2, 2)
    # Losses over 4.4: the front's box is the same, since it reaches as far.
    whole = (4.4 - 1) * (4.4 - 1) + 2 * 0.4
    assert found.volume == pytest.approx((2 * 0.4 * 4.4 - 0.4**2) / whole)
    assert found.box_volume == pytest.approx(found.volume)
    assert (found.front, found.front_reached) == (3, 2)
    # A bad map more makes room in the one box alone.
    bad = Candidate(4, "search", {"kl": 40.0, "cache_bytes": 40.0, "fa_share": 0.0}, MAP)
    wide = replay(config_of(halving=options), [[*rung, bad] for rung in (early, late, late)])
    assert wide.box_volume == pytest.approx(found.box_volume)
    assert wide.box_volume < wide.volume


@pytest.mark.parametrize("decay", [1.0, 0.2])
def test_tokens_are_those_of_training_that_goes_on(decay: float) -> None:
    rng = Random(3)
    rungs = [points([(rng.random(), rng.random()) for _ in range(30)]) for _ in range(3)]
    config = config_of(halving={"keep": 0.4, "floor": 0})
    distill = config.distill.model_copy(update={"decay_share": decay})
    found = replay(config.model_copy(update={"distill": distill}), rungs)
    _, first, last = found.kept
    gone_on_from = 100 if decay == 1 else 80
    assert found.tokens == first * 100 + last * (400 - gone_on_from)
    assert found.tokens_share == pytest.approx(found.tokens / (30 * 400))


def test_with_none_pruned_nothing_is_lost_and_few_drawn_have_less() -> None:
    rng = Random(1)
    rungs = [points([(rng.random(), rng.random()) for _ in range(30)]) for _ in range(3)]
    found = replay(config_of(halving={"keep": 1}), rungs)
    assert (found.volume, found.box_volume) == (1, 1)
    assert found.front_reached == found.front
    scale = Scale.of(config_of().search.objectives, rungs[-1])
    shares = [drawn_share(scale, rungs[-1], rungs[-1], count) for count in (1, 10, 30)]
    assert 0 < shares[0] < shares[1] < shares[2] == pytest.approx(1)
    assert share_of_front(scale, [], rungs[-1]) == 0


def ledger_of(path: Path, maps: int, lengths: Sequence[int]) -> list[HeadMap]:
    """Rows of random students, the teacher, a choice of selectors and a student of a second seed."""
    rng, ledger = Random(5), Ledger(path)
    found = [random_map(SHAPE, rng, 5, 250) for _ in range(maps)]
    answered = {"unseen_single_match": 1.0, "unseen_single_nll": 0.1}
    failed = {"unseen_multikey_match": 0.2, "unseen_multikey_nll": 2.0}
    ledger.add(
        "s/teacher/0/0", map=None, seed=0, tokens=0, values={"kl": 0.0, **answered, **failed}
    )
    ledger.add("s/choice/B", map=None, selectors=["causal"])
    for head_map in found:
        for tokens in lengths:
            values = {
                "kl": rng.random(),
                "unseen_single_nll": rng.random(),
                "unseen_multikey_nll": 9.0,
            }
            key = f"s/{head_map.digest}/0/{tokens}"
            ledger.add(key, map=head_map.to_json(), seed=0, tokens=tokens, values=values)
    again = f"s/{found[0].digest}/1/0"
    ledger.add(again, map=found[0].to_json(), seed=1, tokens=0, values={"kl": 77.0})
    return found


def test_students_of_a_ledger_that_were_read_at_every_length(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    maps = ledger_of(path, 12, (0, 500))
    lost = random_map(SHAPE, Random(9), 5, 250)
    Ledger(path).add("s/x/0/0", map=lost.to_json(), seed=0, tokens=0, values={"kl": 1.0})
    failed = {"map": lost.to_json(), "seed": 0, "tokens": 500, "failed": "not finite"}
    Ledger(path).add("s/x/0/500", **failed)
    readings = read_ledger(path, fake_config())
    assert readings.config.search.proxy_tokens == (0, 500)
    assert [[c.head_map for c in rung] for rung in readings.rungs] == [maps, maps]
    assert readings.left_out == 1
    for candidate in readings.rungs[1]:
        assert candidate.metrics["kl"] < 1
        # The teacher answers single needles alone.
        assert candidate.metrics[RETRIEVAL] == candidate.metrics["unseen_single_nll"]
        assert candidate.metrics["fa_share"] == candidate.head_map.fa_share
    Ledger(path).add("t/x/0/0", map=lost.to_json(), seed=0, tokens=0, values={"kl": 1.0})
    with pytest.raises(ConfigError, match="students of 2 settings"):
        read_ledger(path, fake_config())


def test_a_study_of_proxies_is_read_at_the_lengths_asked_for(tmp_path: Path) -> None:
    study = made_study()
    run_dir = RunDir(tmp_path)
    path = run_dir / FIDELITY_FILE
    with pytest.raises(ConfigError, match="no study"):
        read_fidelity(path, fake_config())
    write_study(run_dir, study)
    with pytest.raises(ConfigError, match=r"--lengths: two or three of 0, 100, 200, 1,000"):
        read_fidelity(path, fake_config())
    readings = read_fidelity(path, fake_config(), (0, 200, LENGTHS[-1]))
    assert [c.head_map for c in readings.rungs[0]] == [s.head_map for s in study.subjects]
    for subject, last in zip(study.subjects, readings.rungs[-1], strict=True):
        run = study.of(subject)
        assert run is not None
        assert last.metrics["kl"] == run.value("kl", LENGTHS[-1])
    assert readings.config.distill.decay_share == study.settings.decay_share
    # KL at 200 tokens has the order of the end: what is best there is kept.
    config = readings.config.search.model_copy(
        update={"halving": config_of(halving={"keep": 0.5}).search.halving}
    )
    found = replay(readings.config.model_copy(update={"search": config}), readings.rungs[1:])
    assert found.volume == pytest.approx(1)


def test_the_table_and_the_figures_are_of_every_pair_and_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "ledger.jsonl", tmp_path / "out.json"
    ledger_of(path, 12, (0, 500))
    like = tmp_path / "like.json"
    like.write_text(json.dumps([{"machine": "one GPU", "versions": {"torch": "9"}}]))
    words = ["--ledger", str(path), "--name", "students", "--measured-as", str(like), "--keep"]
    monkeypatch.setattr("sys.argv", ["halving", *words, "0.3", "0.5", "--figures", str(out)])
    halving.main()
    rows = json.loads(out.read_text())
    own = tuple(o.metric for o in load_config(halving.CONFIG).search.objectives)
    assert {(tuple(row["objectives"]), row["keep"]) for row in rows} == {
        (objectives, keep) for objectives in (*halving.PAIRS, own) for keep in (0.3, 0.5)
    }
    made = [{"machine": row["machine"], "versions": row["versions"]} for row in rows]
    assert made == [{"machine": "one GPU", "versions": {"torch": "9"}}] * len(rows)
    assert all(len(row["kept"]) == 2 and row["kept"][0] == 12 for row in rows)
    printed = capsys.readouterr().out
    assert "| students | kl and cache_bytes | 0.3 | 12, " in printed
    volumes = [
        row["value"] for row in rows if "hypervolume" in row["metric"] and row["keep"] == 0.3
    ]
    assert f"keep 0.3: at least {min(volumes):.4f} of the hypervolume" in printed


def test_a_run_is_read_from_the_command_line_with_its_versions(
    whole_run: tuple[RunDir, RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out.json"
    words = [str(whole_run[0].path), "--keep", "0.3", "--figures", str(out)]
    monkeypatch.setattr("sys.argv", ["halving", *words])
    halving.main()
    rows = json.loads(out.read_text())
    assert {row["lengths"][-1] for row in rows} == {400}
    assert "optuna" in rows[0]["versions"]
    assert "stand-in, seed 0" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["halving", *words, "--ledger", "x"])
    with pytest.raises(ConfigError, match="allowed: RUN, --ledger or --study"):
        halving.main()
