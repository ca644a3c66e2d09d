"""The worker: all metrics, the same each time; a distilled candidate is what its file says; faults are labelled."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from archsearch.attention.dispatch import OPERATORS, set_backend
from archsearch.attention.positions import set_rope_share
from archsearch.config import GdnConfig, RunConfig
from archsearch.cost import cache_bytes
from archsearch.data.niah import retrieval_rows
from archsearch.errors import ConfigError, EnvironmentFault
from archsearch.evaluation.divergence import divergence
from archsearch.headmap import HeadMap, ModelShape, Operator
from archsearch.models.cut import cut
from archsearch.models.full_heads import rope_share
from archsearch.models.supernet import Supernet
from archsearch.models.teacher import byte_tokenizer, load_teacher
from archsearch.search import trial
from archsearch.search.records import TrialResult, TrialSpec, measured_metrics, trained_path
from archsearch.search.trained import load_to_go_on, load_trained
from archsearch.search.trial import TrialWorker

LENGTH = 512


@pytest.fixture(scope="module")
def payload(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run directory with all that a worker reads, around a random teacher on disk."""
    run_dir = tmp_path_factory.mktemp("run")
    source = run_dir / "teacher"
    tokenizer = byte_tokenizer()
    hf_config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=LENGTH,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(hf_config).save_pretrained(source)
    tokenizer.save_pretrained(source)
    config = {
        "schema": 1,
        "name": "trial-test",
        "teacher": {"source": str(source), "device": "cpu"},
        "data": {"sequence_length": LENGTH, "heldout_sequences": 2, "niah_share": 0.5},
        "probes": {"contexts": [LENGTH], "multi_keys": 2, "digits": 3, "prompts": 2},
        "search": {"proxy_tokens": [0, 4 * LENGTH]},
        "distill": {"batch_tokens": 2 * LENGTH, "learning_rate": 1e-3},
    }
    teacher = load_teacher(RunConfig.model_validate(config).teacher)
    rng = np.random.default_rng(0)
    rows = rng.integers(len(tokenizer), size=(6, LENGTH), dtype=np.uint16)
    np.save(run_dir / "heldout.npy", rows[:2])
    np.save(run_dir / "train.npy", rows[2:])
    prompts = retrieval_rows(tokenizer, 4, LENGTH, keys=2, digits=3, seed=0)
    np.save(run_dir / "retrieval.npy", prompts)
    supernet = Supernet.migrated(teacher, GdnConfig())
    supernet.save(run_dir / "supernet.safetensors", teacher)
    dumped = RunConfig.model_validate(config).model_dump(mode="json", by_alias=True)
    return {"config": dumped, "run_dir": str(run_dir)}


@pytest.fixture(scope="module")
def worker(payload: dict[str, Any]) -> TrialWorker:
    return TrialWorker(payload)


def spec_of(*rows: str, tokens: int = 0, **fields: Any) -> TrialSpec:
    shape = ModelShape("qwen3", num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
    head_map = HeadMap(shape, rows).to_json()
    return TrialSpec(candidate=3, head_map=head_map, proxy_tokens=tokens, **fields)


def metrics_of(result: TrialResult) -> dict[str, float]:
    assert result.status == "ok", result.reason
    return result.metrics


def test_the_kernels_that_the_config_asks_for_are_those_of_the_worker(
    payload: dict[str, Any],
) -> None:
    config = payload["config"] | {"kernels": {"full": "torch"}}
    try:
        TrialWorker(payload | {"config": config})
        assert OPERATORS["full"].wish == "torch"
    finally:
        set_backend("full", "auto")


def test_reports_every_metric_and_the_cost(worker: TrialWorker) -> None:
    spec = spec_of("FFGG", "GGFG")
    result = worker(spec)
    metrics = metrics_of(result)
    assert set(metrics) == {
        "kl",
        "top1_agreement",
        "niah_single_nll",
        "niah_single_match",
        "niah_multikey_nll",
        "niah_multikey_match",
        "fa_share",
        "cache_bytes",
    }
    assert metrics["fa_share"] == 3 / 8
    assert metrics["cache_bytes"] == cache_bytes(HeadMap.from_json(spec.head_map), 32_768)
    assert result.tokens == 0
    assert result.seconds > 0
    assert TrialResult.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_evaluation_probes_follow_the_config(worker: TrialWorker, payload: dict[str, Any]) -> None:
    kinds = ("tracking", "labels", "single", "agreement")
    sizes = {"kinds": kinds, "contexts": (400, LENGTH), "multi_keys": 2, "digits": 3, "prompts": 3}
    config = RunConfig.model_validate(payload["config"] | {"probes": sizes})
    probes = trial.evaluation_probes(worker.teacher, config)
    counts = Counter(probe.kind for probe in probes)
    assert counts == {"tracking": 6, "labels": 3, "single": 6, "agreement": 3}
    contexts = Counter(probe.context for probe in probes if probe.kind in ("tracking", "single"))
    assert contexts == {400: 6, LENGTH: 6}
    assert len({probe.prompt for probe in probes}) == len(probes)


def test_general_kinds_become_metrics(payload: dict[str, Any]) -> None:
    probes = {"kinds": ["labels", "copying", "single"], "contexts": [LENGTH], "prompts": 1}
    config = payload["config"] | {"probes": probes}
    metrics = metrics_of(TrialWorker({**payload, "config": config})(spec_of("FFGG", "GGFG")))
    names = {"labels", "copying", "general", "niah_single"}
    found = {f"{name}_{figure}" for name in names for figure in ("nll", "match")}
    assert set(metrics) == found | {"kl", "top1_agreement", "fa_share", "cache_bytes"}


def test_the_teacher_itself_has_no_divergence_and_is_not_distilled(worker: TrialWorker) -> None:
    result = worker(spec_of("FFFF", "FFFF", tokens=4 * LENGTH))
    assert abs(metrics_of(result)["kl"]) < 1e-5
    assert result.tokens == 0


def test_same_spec_same_metrics_in_any_worker(worker: TrialWorker, payload: dict[str, Any]) -> None:
    for tokens in (0, 2 * LENGTH):
        spec = spec_of("FGGG", "GGGG", tokens=tokens, seed=5)
        first = worker(spec)
        # The alias, the random state and what ran before must not matter.
        plain = RunConfig.model_validate(payload["config"]).model_dump()
        other = TrialWorker({**payload, "config": plain})
        torch.manual_seed(123)
        assert metrics_of(other(spec)) == metrics_of(first)


def test_a_distilled_candidate_is_what_its_file_says(worker: TrialWorker) -> None:
    spec = spec_of("FGGG", "GGFG", tokens=4 * LENGTH)
    before = metrics_of(worker(spec_of("FGGG", "GGFG")))
    result = worker(spec)
    assert result.tokens == 4 * LENGTH
    assert metrics_of(result)["kl"] < before["kl"]
    head_map = HeadMap.from_json(spec.head_map)
    student = cut(worker.teacher, worker.supernet, head_map, copy=True)
    assert load_trained(student, trained_path(worker.run_dir, spec)) == 4 * LENGTH
    assert divergence(student, worker._reference)["kl"] == metrics_of(result)["kl"]


def test_a_parent_is_continued(worker: TrialWorker) -> None:
    short = spec_of("GGGG", "GGFG", tokens=2 * LENGTH)
    first = metrics_of(worker(short))
    longer = replace(
        short, proxy_tokens=4 * LENGTH, parent=str(trained_path(worker.run_dir, short))
    )
    result = worker(longer)
    assert result.tokens == 2 * LENGTH
    assert metrics_of(result)["kl"] < first["kl"]


def test_full_attention_heads_become_what_the_config_says_in_distillation(
    payload: dict[str, Any], worker: TrialWorker
) -> None:
    """The file holds their gate and gamma, and the tokens behind it how much of RoPE is left."""
    full = {"rope": False, "rope_fade_tokens": 4 * LENGTH, "log_scale": True}
    full |= {"norm": True, "gate": True}
    config = payload["config"] | {"student": {"full": full}}
    other = TrialWorker({**payload, "config": config})
    plain = spec_of("FGGG", "GGFG")
    assert metrics_of(other(plain)) == metrics_of(worker(plain)), "not before it"
    spec = replace(plain, proxy_tokens=4 * LENGTH, candidate=11)
    found = metrics_of(other(spec))
    assert found["kl"] != metrics_of(worker(spec))["kl"]
    options = other.config.student.full
    path = trained_path(other.run_dir, spec)
    metrics_of(other(spec))
    branch = trial.read_branch(other.teacher, other.config, other.run_dir)
    head_map = HeadMap.from_json(spec.head_map)
    student = cut(other.teacher, other.supernet, head_map, copy=True, full=branch)
    assert student.config.fa["rope_share"] == 1
    set_rope_share(student, rope_share(options, load_trained(student, path)))
    assert student.config.fa["rope_share"] == 0
    assert bool(student.model.layers[0].self_attn.full.gate_proj.weight.any())
    assert divergence(student, other._reference)["kl"] == found["kl"]


def test_retention_asks_fresh_prompts_of_weights_as_they_are(payload: dict[str, Any]) -> None:
    """With a parent, the stored weights; without one, those of a candidate that reached the last proxy."""
    search = {"proxy_tokens": [0, 2 * LENGTH, 6 * LENGTH]}
    search |= {"retention": {"prompts": 3, "kinds": ["single"]}}
    other = TrialWorker({**payload, "config": payload["config"] | {"search": search}})
    asked = trial.retention_probes(other.teacher, other.config)
    assert Counter(probe.kind for probe in asked) == {"single": 3}
    trials = trial.evaluation_probes(other.teacher, other.config)
    assert not {probe.prompt for probe in asked} & {probe.prompt for probe in trials}

    spec = spec_of("FGGG", "GGGF", tokens=2 * LENGTH)
    other(spec)
    promoted = replace(spec, proxy_tokens=6 * LENGTH, parent=str(trained_path(other.run_dir, spec)))
    other(promoted)
    stored = trained_path(other.run_dir, promoted)
    asks = replace(promoted, retention=True, parent=str(stored))
    as_it_is, baseline = other(asks), other(replace(asks, parent=None))
    assert set(metrics_of(as_it_is)) == {
        "niah_single_nll",
        "niah_single_match",
        "fa_share",
        "cache_bytes",
    }
    assert metrics_of(as_it_is) == metrics_of(baseline)
    assert (as_it_is.tokens, baseline.tokens) == (0, 6 * LENGTH)
    assert trained_path(other.run_dir, replace(asks, parent=None)) != stored


def test_a_longer_proxy_goes_on_from_before_the_rate_fell(payload: dict[str, Any]) -> None:
    search = {"proxy_tokens": [0, 8 * LENGTH, 12 * LENGTH]}
    options = payload["config"]["distill"] | {"decay_share": 0.5}
    config = payload["config"] | {"distill": options, "search": search}
    worker = TrialWorker({**payload, "config": config})
    short = spec_of("GFGG", "GGGG", tokens=8 * LENGTH)
    first = worker(short)
    assert first.tokens == 8 * LENGTH
    path = trained_path(worker.run_dir, short)
    students = [
        cut(worker.teacher, worker.supernet, HeadMap.from_json(short.head_map), copy=True)
        for _ in range(2)
    ]
    assert load_trained(students[0], path) == 8 * LENGTH
    assert load_to_go_on(students[1], path) == 4 * LENGTH
    kl = [divergence(student, worker._reference)["kl"] for student in students]
    assert kl[0] == metrics_of(first)["kl"]
    assert kl[0] != kl[1]
    longer = replace(short, proxy_tokens=12 * LENGTH, parent=str(path))
    result = worker(longer)
    assert result.tokens == 8 * LENGTH
    # Nothing comes after the longest proxy.
    assert load_to_go_on(students[1], trained_path(worker.run_dir, longer)) == 12 * LENGTH


def test_candidates_share_the_teachers_answers_on_disk_too(
    payload: dict[str, Any], tmp_path: Path
) -> None:
    run_dir = shutil.copytree(payload["run_dir"], tmp_path / "run")
    spec = spec_of("FGGG", "GGGF", tokens=4 * LENGTH)
    metrics = []
    for cache_gib in (4.0, 0.0, 0.0):
        options = payload["config"]["distill"] | {"cache_gib": cache_gib}
        config = payload["config"] | {"distill": options}
        worker = TrialWorker({"config": config, "run_dir": str(run_dir)})
        metrics.append(metrics_of(worker(spec)))
    assert metrics[0] == metrics[1] == metrics[2]
    assert len(list((run_dir / trial.TEACHER_LOGITS).rglob("*.safetensors"))) == 2


def test_marked_documents_of_the_training_text_are_kept_apart(
    payload: dict[str, Any], tmp_path: Path
) -> None:
    run_dir = shutil.copytree(payload["run_dir"], tmp_path / "run")
    rows = np.load(run_dir / "train.npy")
    options = payload["config"]["distill"] | {"packed": True}
    config = payload["config"] | {"distill": options}
    spec, found = spec_of("FGGG", "GGGF", tokens=2 * LENGTH), []
    for marks in ([0], [0, 100, 300], [0, 100, 300]):
        starts = np.zeros(rows.shape, dtype=bool)
        starts[:, marks] = True
        np.save(run_dir / trial.STARTS_FILE, starts)
        found.append(metrics_of(TrialWorker({"config": config, "run_dir": str(run_dir)})(spec)))
    assert found[1] == found[2]
    assert found[0]["kl"] != found[1]["kl"]


def test_weights_of_another_map_are_refused(worker: TrialWorker) -> None:
    spec = spec_of("GGGG", "GFGG", tokens=2 * LENGTH)
    worker(spec)
    other = HeadMap.uniform(worker.teacher.shape, Operator.GDN)
    student = cut(worker.teacher, worker.supernet, other, copy=True)
    with pytest.raises(EnvironmentFault, match="another head map"):
        load_trained(student, trained_path(worker.run_dir, spec))


def test_control_and_search_keep_their_files_apart(worker: TrialWorker) -> None:
    spec = spec_of("GGGG", "GGGG", tokens=LENGTH)
    control = replace(spec, method="random-control")
    assert trained_path(Path("run"), spec) != trained_path(Path("run"), control)


def test_nan_is_a_labelled_failure_and_does_no_harm_to_the_next(
    worker: TrialWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tokens in (0, 2 * LENGTH):
        spec = spec_of("GGGG", "FFFF", tokens=tokens)
        with monkeypatch.context() as patch:
            broken = Supernet.migrated(worker.teacher, GdnConfig())
            with torch.no_grad():
                broken.twins[0].gamma[1] = torch.nan
            patch.setattr(worker, "supernet", broken)
            result = worker(spec)
        assert result.status == "failed"
        assert result.reason is not None
        assert result.reason.startswith("non-finite")
        assert "kl" not in result.metrics
        assert metrics_of(worker(spec))


@pytest.mark.parametrize(
    ("error", "label"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), "out of memory: CUDA"),
        (MemoryError("no room"), "host out of memory: no room"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9"), "host out of memory"),
    ],
)
def test_memory_faults_are_labelled(
    worker: TrialWorker, monkeypatch: pytest.MonkeyPatch, error: Exception, label: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(trial, "divergence", fail)
    result = worker(spec_of("GGGG", "GGGG"))
    assert result.status == "failed"
    assert result.reason is not None
    assert result.reason.startswith(label)


def test_other_faults_are_raised(worker: TrialWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(trial, "divergence", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        worker(spec_of("GGGG", "GGGG"))


def test_a_missing_file_is_named(payload: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"supernet\.safetensors"):
        TrialWorker({**payload, "run_dir": str(tmp_path)})


def test_extra_texts_files_and_unseen_prompts_become_metrics(
    payload: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "own.jsonl"
    lines = [{"prompt": "A is 7. A is", "answer": " 7", "keys": keys} for keys in (1, 2)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_dir = Path(payload["run_dir"])
    rows = np.load(run_dir / "heldout.npy")
    np.save(run_dir / "heldout-same.npy", rows)
    np.save(run_dir / "heldout-other.npy", rows[:, ::-1])
    more = {
        "data": payload["config"]["data"]
        | {"extra_heldout": [{"label": "same"}, {"label": "other"}]},
        "probes": {
            "kinds": ["single"],
            "unseen": ["multiquery"],
            "contexts": [420, 2 * LENGTH],  # Twice the window.
            "beyond_window": True,
            "multi_keys": 2,
            "prompts": 1,
            "files": [{"name": "own", "path": str(path)}],
        },
    }
    config = RunConfig.model_validate(payload["config"] | more)
    worker = TrialWorker({**payload, "config": config.model_dump(mode="json", by_alias=True)})
    wanted = tuple(measured_metrics(config))
    metrics = metrics_of(worker(spec_of("FFGG", "GGFG", metrics=wanted)))
    groups = {f"own_{keys}_{figure}" for keys in (1, 2) for figure in ("nll", "match")}
    assert set(metrics) == {*wanted, *groups}
    assert {"niah_single_nll@420", f"unseen_multiquery_match@{2 * LENGTH}"} <= set(wanted)
    assert metrics["kl_same"] == metrics["kl"] != metrics["kl_other"]
    assert metrics["top1_agreement_same"] == metrics["top1_agreement"]


def test_tasks_of_the_harness_become_metrics(
    payload: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fake:
        def measure(self, student: torch.nn.Module) -> dict[str, float]:
            return {"lm_sums_acc": float(student.config.num_hidden_layers)}

    monkeypatch.setattr(trial, "open_harness", lambda config, teacher: Fake())
    metrics = metrics_of(TrialWorker(payload)(spec_of("FFGG", "GGFG", metrics=("lm_sums_acc",))))
    assert metrics["lm_sums_acc"] == 2.0


def test_training_without_its_prompts_is_refused(payload: dict[str, Any], tmp_path: Path) -> None:
    shutil.copy(Path(payload["run_dir"]) / "train.npy", tmp_path)
    worker = TrialWorker(payload | {"train_dir": str(tmp_path)})
    with pytest.raises(EnvironmentFault, match=r"retrieval\.npy: cannot be read"):
        worker.batches(0)


def test_a_metric_that_no_trial_has_is_named(worker: TrialWorker) -> None:
    message = (
        r"^search: lm_sums_acc is no metric that a trial has; allowed: cache_bytes, fa_share, kl"
    )
    with pytest.raises(ConfigError, match=message):
        worker(spec_of("FFGG", "GGFG", metrics=("kl", "lm_sums_acc")))


def test_a_missing_extra_text_is_named(payload: dict[str, Any]) -> None:
    data = payload["config"]["data"] | {"extra_heldout": [{"label": "none"}]}
    with pytest.raises(EnvironmentFault, match=r"heldout-none\.npy: cannot be read"):
        TrialWorker({**payload, "config": payload["config"] | {"data": data}})
