"""What the found map keeps beside baselines: which maps, on which weights, once each, whatever ends early."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from archsearch.config import RunConfig
from archsearch.errors import ConfigError, EnvironmentFault
from archsearch.execution.serial import SerialExecutor
from archsearch.headmap import HeadMap
from archsearch.rundir import RunDir
from archsearch.search.driver import needed_scores
from archsearch.search.outcome import SearchOutcome
from archsearch.search.records import TrialResult, TrialSpec
from archsearch.search.retention import (
    FOUND,
    RETENTION_FILE,
    TEACHER,
    Kept,
    Retention,
    compared_maps,
    read_retention,
)
from tests.search.fakes import SCORES, SHAPE, FakeWorker, fake_config, fake_search, read_log

OPTIONS = {"prompts": 12, "fa_share": 0.25, "random_maps": 2}
SEARCH: dict[str, Any] = {"proxy_tokens": [0, 100], "retention": OPTIONS}


def search(folder: Path, **payload: Any) -> tuple[RunConfig, SearchOutcome]:
    config = fake_config(**SEARCH)
    return config, fake_search(config, folder, **payload)


def calls_of(folder: Path) -> list[dict[str, Any]]:
    return [call for call in read_log(folder / "calls.jsonl") if call["retention"]]


def test_the_found_map_stands_beside_the_teacher_and_baselines(tmp_path: Path) -> None:
    config, outcome = search(tmp_path)
    retention = read_retention(RunDir(tmp_path))
    assert retention is not None
    assert (retention.tokens, retention.prompts, retention.kinds) == (100, 12, ("multikey",))
    sources = [kept.source for kept in retention.maps]
    assert sources[:2] == [TEACHER, FOUND]
    assert set(sources[2:]) <= {"search", "random", "even_layers"}
    maps = {kept.layers: HeadMap(SHAPE, kept.layers) for kept in retention.maps}
    assert len(maps) == len(retention.maps), "none twice"
    for kept in retention.maps:
        assert kept.metrics["niah_multikey_match"] == 0.5
        assert maps[kept.layers].fa_share <= 0.25 or kept.source == TEACHER
    within = [c for c in outcome.fronts.points if c.head_map.fa_share <= 0.25]
    best = min(within, key=lambda c: c.metrics["kl"])
    assert retention.maps[1].candidate == best.candidate
    assert retention.maps[1].method == best.source
    assert [kept.source for kept in compared_maps(config, SHAPE, SCORES, outcome)] == sources


def test_a_candidates_own_weights_are_measured_and_baselines_trained(tmp_path: Path) -> None:
    search(tmp_path)
    retention = read_retention(RunDir(tmp_path))
    assert retention is not None
    calls = {tuple(call["head_map"]["layers"]): call for call in calls_of(tmp_path)}
    for kept in retention.maps:
        call = calls[kept.layers]
        assert call["proxy_tokens"] == 100
        own = f"trials/{kept.candidate}-100.safetensors"
        expected = None if kept.candidate is None else str(tmp_path / own)
        assert call["parent"] == expected


def test_nothing_is_measured_twice_and_a_failed_map_again(tmp_path: Path) -> None:
    search(tmp_path)
    before = len(calls_of(tmp_path))
    search(tmp_path)
    assert len(calls_of(tmp_path)) == before == len(set(_maps(tmp_path)))
    data = json.loads((tmp_path / RETENTION_FILE).read_text())
    failed = data["maps"][-1]
    failed["reason"], failed["metrics"] = "worker died", {}
    (tmp_path / RETENTION_FILE).write_text(json.dumps(data))
    search(tmp_path)
    calls = calls_of(tmp_path)
    assert len(calls) == before + 1
    assert calls[-1]["head_map"]["layers"] == failed["layers"]
    retention = read_retention(RunDir(tmp_path))
    assert retention is not None
    assert all(kept.metrics for kept in retention.maps)


def _maps(folder: Path) -> list[tuple[str, ...]]:
    return [tuple(call["head_map"]["layers"]) for call in calls_of(folder)]


def test_a_damaged_file_is_made_again_and_refused_by_a_reader(tmp_path: Path) -> None:
    search(tmp_path)
    (tmp_path / RETENTION_FILE).write_text('{"schema": 2}')
    with pytest.raises(ConfigError, match="schema 2 is not 1"):
        read_retention(RunDir(tmp_path))
    search(tmp_path)
    assert read_retention(RunDir(tmp_path)) is not None


def test_a_map_that_fails_says_why(tmp_path: Path) -> None:
    # The fake's candidate 1 is all_gdn in both rungs, then the found map.
    said: list[str] = []
    search(tmp_path, said=said, faults={"1": [None, None, "nan"]})
    retention = read_retention(RunDir(tmp_path))
    assert retention is not None
    failed = [kept for kept in retention.maps if kept.reason]
    assert [(kept.source, kept.reason) for kept in failed] == [(FOUND, "non-finite: kl")]
    assert "retention: front failed: non-finite: kl" in said


def test_without_prompts_there_is_none(tmp_path: Path) -> None:
    config = fake_config(proxy_tokens=[0, 100])
    fake_search(config, tmp_path)
    assert read_retention(RunDir(tmp_path)) is None
    assert not calls_of(tmp_path)


def test_baselines_bring_the_scores_that_they_read() -> None:
    def needed(**options: Any) -> list[str]:
        retention = {**OPTIONS, **options}
        return list(needed_scores(fake_config(retention=retention).search))

    assert needed() == ["causal", "replacement_kl"]
    assert needed(methods=["attribution"]) == ["causal", "attribution", "replacement_kl"]
    assert needed(methods=["attribution"], prompts=0) == ["causal", "replacement_kl"]


def test_kinds_must_be_among_the_probes() -> None:
    with pytest.raises(ValueError, match=r"search\.retention\.kinds: tracking is not among"):
        fake_config(retention={"prompts": 4, "kinds": ["tracking"]})
    fake_config(retention={"kinds": ["tracking"]})


def test_a_retention_comes_back_as_it_was() -> None:
    kept = Kept("search", ("FG", "GG"), 3, "search", {"niah_multikey_match": 0.5})
    found = Retention(0.25, 8, ("multikey",), 100, (kept, Kept("random", ("GG", "GF"))))
    assert Retention.from_json(json.loads(json.dumps(found.to_json()))) == found
    with pytest.raises(ValueError, match="malformed"):
        Retention.from_json({"schema": 1, "maps": [{}]})


def test_a_file_that_is_gone_is_no_maps_fault(tmp_path: Path) -> None:
    class Losing(FakeWorker):
        def __call__(self, spec: TrialSpec) -> TrialResult:
            if spec.retention:
                raise FileNotFoundError(2, "No such file or directory", "train.npy")
            return super().__call__(spec)

    with pytest.raises(EnvironmentFault, match=r"^search\.retention: teacher: .*train\.npy"):
        search(tmp_path, worker=Losing)
    assert not (tmp_path / RETENTION_FILE).exists()
    search(tmp_path)


def test_maps_that_were_measured_beside_a_fault_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Losing(FakeWorker):
        def __call__(self, spec: TrialSpec) -> TrialResult:
            if spec.retention and len(calls_of(tmp_path)) == 2:
                raise FileNotFoundError(2, "No such file or directory", "train.npy")
            return super().__call__(spec)

    monkeypatch.setattr(SerialExecutor, "capacity", 3)
    with pytest.raises(EnvironmentFault, match=r"train\.npy"):
        search(tmp_path, worker=Losing)
    kept = read_retention(RunDir(tmp_path))
    assert kept is not None
    assert [bool(found.metrics) for found in kept.maps] == [True, True]
    search(tmp_path)
    assert len(calls_of(tmp_path)) == len(set(_maps(tmp_path)))
