"""The final stage: the best points trained further, on other text and prompts, and alone in pareto.json."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from archsearch.cli import app
from archsearch.config import RunConfig
from archsearch.configfile import load_config
from archsearch.data.corpora import load_tokens
from archsearch.models.teacher import load_teacher
from archsearch.plan import heldout_rows, train_tokens
from archsearch.search.final import final_config
from archsearch.search.trial import evaluation_probes, retention_probes
from tests.search.fakes import FakeWorker, fake_config, fake_search, going_on, read_log

FINAL = {"proxy_tokens": [0, 100], "final": {"tokens": 400, "max_points": 2}}


class Finalist(FakeWorker):
    """Gives intervals at the final stage."""

    def __call__(self, spec: Any) -> Any:
        result = super().__call__(spec)
        if not spec.final:
            return result
        kl = result.metrics["kl"]
        return replace(result, intervals={"kl": (0.9 * kl, 1.2 * kl)})


def test_the_best_points_alone_are_in_the_pareto_file(tmp_path: Path) -> None:
    config = fake_config(trials=12, random_control=True, **FINAL)
    outcome = fake_search(config, tmp_path, worker=Finalist)
    proxies, final = outcome.rungs[:-1], outcome.rungs[-1]
    assert [rung.proxy_tokens for rung in outcome.rungs] == [0, 100, 400]
    wanted, control = going_on(proxies[-1].fronts, 2)
    assert [c.candidate for c in final.search] == [c.candidate for c in wanted]
    assert [c.candidate for c in final.control] == [c.candidate for c in control]
    calls = read_log(tmp_path / "calls.jsonl")
    assert [call["proxy_tokens"] == 400 for call in calls] == [call["final"] for call in calls]
    for call in calls:
        if call["final"] and call["candidate"]:
            assert call["parent"].endswith(f"{call['candidate']}-100.safetensors")
    pareto = json.loads((tmp_path / "pareto.json").read_text())
    assert (pareto["proxy_tokens"], pareto["confidence"]) == (400, 0.95)
    assert {p["candidate"] for p in pareto["points"]} <= {c.candidate for c in wanted}
    for point in pareto["points"]:
        kl = point["metrics"]["kl"]
        assert point["intervals"] == {"kl": [pytest.approx(0.9 * kl), pytest.approx(1.2 * kl)]}
    reasons = {row.reason for row in final.pruned[0]}
    assert reasons <= {
        "on no front after 100 tokens",
        "on the front after 100 tokens, but search.final.max_points 2 others add more hypervolume",
    }
    again = fake_search(config, tmp_path, worker=Finalist)
    assert json.loads((tmp_path / "pareto.json").read_text()) == pareto
    assert again.lines == outcome.lines
    assert len(read_log(tmp_path / "calls.jsonl")) == len(calls)


def test_without_tokens_there_is_none(tmp_path: Path) -> None:
    config = fake_config(final={"max_points": 2})
    assert config.search.lengths == (0,)
    assert final_config(config) is None
    fake_search(config, tmp_path)
    pareto = json.loads((tmp_path / "pareto.json").read_text())
    assert "confidence" not in pareto
    assert all("intervals" not in point for point in pareto["points"])


@pytest.mark.parametrize("tokens", [50, 100])
def test_fewer_tokens_than_the_last_proxy_are_refused(tokens: int) -> None:
    with pytest.raises(ValueError, match=rf"final.tokens: {tokens} is no more than .* above 100"):
        fake_config(proxy_tokens=[0, 100], final={"tokens": tokens})


def finalist_config(run_config: Path, path: Path) -> RunConfig:
    """Text from a file, with final rows behind those of trials."""
    rows = np.random.default_rng(0).integers(2, 40, (40, 96))
    np.save(path, rows)
    source = f"{{source: file, path: {path}}}"
    return load_config(
        run_config,
        [
            f"data.heldout={source}",
            f"data.train={source}",
            f"data.extra_heldout=[{{source: file, path: {path}, label: same, sequences: 5}}]",
            "search.final={tokens: 512, max_points: 2, sequences: 3, prompts: 5, resamples: 50}",
        ],
    )


def test_final_rows_lie_behind_those_of_trials_and_training_behind_both(
    run_config: Path, tmp_path: Path
) -> None:
    from archsearch.plan import training_rows
    from archsearch.progress import ignore_progress
    from archsearch.rundir import RunDir
    from archsearch.texts import write_texts

    config = finalist_config(run_config, tmp_path / "rows.npy")
    teacher = load_teacher(config.teacher)
    with RunDir(tmp_path / "run") as run_dir:
        write_texts(config, run_dir, teacher, lambda purpose: 1, ignore_progress)
    rows = np.load(tmp_path / "rows.npy")
    files = {
        "heldout": (0, 2),
        "heldout-same": (0, 5),
        "final-heldout": (2, 5),
        "final-heldout-same": (5, 8),
    }
    for name, (start, stop) in files.items():
        assert (np.load(tmp_path / f"run/{name}.npy") == rows[start:stop]).all(), name
    assert training_rows(config).skip == 8
    assert (np.load(tmp_path / "run/train.npy")[0] == rows[8]).all()
    assert [count for _, count in heldout_rows(config)] == [5, 8]
    assert train_tokens(config) >= 512


def test_drawn_text_and_prompts_are_others(run_config: Path) -> None:
    config = load_config(run_config, ["search.final={tokens: 512, sequences: 3, prompts: 5}"])
    final = final_config(config)
    assert final is not None
    teacher = load_teacher(config.teacher)
    probes = [evaluation_probes(teacher, config), evaluation_probes(teacher, final)]
    assert [len(found) for found in probes] == [4, 10]
    seen = {probe.prompt for probe in (*probes[0], *retention_probes(teacher, config))}
    assert not seen & {probe.prompt for probe in probes[1]}
    texts = [
        load_tokens(
            config.data.heldout, teacher.tokenizer, teacher, sequences=2, length=96, seed=seed
        )
        for seed in (1, 2)
    ]
    assert (texts[0] != texts[1]).any()


def test_a_whole_run_ends_in_it(run_config: Path, tmp_path: Path) -> None:
    """The teacher has no interval of KL to speak of, students have; exports are of the final weights."""
    config = "search.final={tokens: 384, max_points: 2, sequences: 3, prompts: 3, resamples: 50}"
    command = ["run", str(run_config), "--run-dir", str(tmp_path / "run"), "--set", config]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    pareto = json.loads((tmp_path / "run/pareto.json").read_text())
    assert pareto["proxy_tokens"] == 384
    for point in pareto["points"]:
        without = set(point["metrics"]) - set(point["intervals"])
        assert {"fa_share", "cache_bytes"} <= without
        assert not [name for name in without if name.endswith("_match")]
        for name, (low, high) in point["intervals"].items():
            assert low - 1e-6 <= point["metrics"][name] <= high + 1e-6
    trials = json.loads((tmp_path / "run/trials.json").read_text())["rungs"]
    assert [rung["proxy_tokens"] for rung in trials] == [0, 256, 384]
    before = {c["candidate"]: c["metrics"]["kl"] for c in trials[1]["candidates"]}
    assert all(
        before[c["candidate"]] != c["metrics"]["kl"]
        for c in trials[2]["candidates"]
        if c["candidate"]
    )
    shown = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert "on text and prompts that no trial saw" in shown.output
    exported = CliRunner().invoke(
        app, ["export", str(tmp_path / "run"), "--knee", "--to", str(tmp_path / "out")]
    )
    assert exported.exit_code == 0, exported.output
    facts = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")]
    assert any(f.get("distillation_tokens") in (0, 384) for f in facts if isinstance(f, dict))
