"""Estimates of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from archsearch.config import RunConfig
from archsearch.configfile import load_config
from archsearch.footprint import GIB
from archsearch.headmap import ModelShape
from archsearch.models.teacher import TeacherInfo
from archsearch.plan import (
    STAGES,
    Done,
    Plan,
    duration,
    make_plan,
    matmul_rate,
    train_tokens,
    training_rows,
)
from archsearch.search.driver import scored_methods
from archsearch.search_plan import evaluation_tokens

INFO = TeacherInfo(
    shape=ModelShape("qwen3", 28, 16, 8, 128),
    hidden_size=2048,
    num_parameters=1_700_000_000,
    vocab_size=151_936,
    max_context=40_960,
)

RATE = 1e11
H200_RATE = 6.9e14
"""FLOP/s of a bf16 matmul that a plan measured there."""
SMOLLM2 = TeacherInfo(
    shape=ModelShape("llama", 30, 9, 3, 64),
    hidden_size=576,
    num_parameters=134_515_008,
    vocab_size=49_152,
    max_context=8192,
)
SPACES = Path(__file__).parents[1] / "search_spaces"


def test_tokens_follow_the_config(run_config: Path) -> None:
    config = load_config(run_config, [])
    assert train_tokens(config) == 1024
    assert evaluation_tokens(config) == 2 * 96 + 2 * 2 * 96
    kinds = load_config(run_config, ["probes.kinds=[tracking, labels]"])
    assert evaluation_tokens(kinds) == 2 * 96 + 2 * 96 + 2 * 100
    unseen = load_config(run_config, ["probes.unseen=[single]", "probes.contexts=[96, 192]"])
    assert evaluation_tokens(unseen) == 2 * 96 + 2 * 3 * (96 + 192)
    extra = "data.extra_heldout=[{label: a, sequences: 5}, {label: b}]"
    assert evaluation_tokens(load_config(run_config, [extra])) == 9 * 96 + 2 * 2 * 96
    loaded = load_config(run_config, ["supernet.source=some.safetensors"])
    assert train_tokens(loaded) == 256
    assert (
        train_tokens(load_config(run_config, ["supernet.source=x", "search.proxy_tokens=[0]"])) == 0
    )


@pytest.mark.parametrize(("name", "tokens"), [("niah_single", 276_078), ("niah_multikey", 125_000)])
def test_files_of_prompts_are_priced_by_their_size(
    run_config: Path, name: str, tokens: int
) -> None:
    path = f"package:archsearch/assets/smollm2_135m/{name}.jsonl.gz"
    base, more = (
        evaluation_tokens(load_config(run_config, [f"probes.files={files}"]))
        for files in ("[]", f"[{{name: stations, path: '{path}'}}]")
    )
    # As SmolLM2's tokenizer counts them.
    assert more - base == pytest.approx(tokens, rel=0.1)
    lost = "probes.files=[{name: stations, path: none.jsonl}]"
    assert evaluation_tokens(load_config(run_config, [lost])) == base


def test_a_plan_says_what_it_cannot_price(run_config: Path) -> None:
    harness = "harness.tasks=[arc_easy, sums]"
    plain, more = (
        make_plan(load_config(run_config, options), INFO, rate_flops=RATE).lines()
        for options in ([], [harness])
    )
    assert any(line.endswith("worker(s); lm-eval's arc_easy, sums not counted") for line in more)
    assert not any("lm-eval" in line for line in plain)


def test_a_plan_names_every_text(run_config: Path) -> None:
    options = ["data.extra_heldout=[{label: docs, source: docstrings}]", "data.niah_share=0"]
    plan = make_plan(load_config(run_config, options), INFO, rate_flops=RATE)
    [data] = [stage.what for stage in plan.stages if stage.name == "data"]
    assert data.endswith(
        "192 held-out tokens from the teacher, 192 docs tokens from Python's docstrings"
    )


def test_plan_has_every_stage_and_leaves_out_the_finished(run_config: Path) -> None:
    config = load_config(run_config, [])
    whole = make_plan(config, INFO, rate_flops=RATE)
    rest = make_plan(config, INFO, ("teacher", "data", "supernet"), rate_flops=RATE)
    assert [stage.name for stage in whole.stages] == list(STAGES)
    assert rest.seconds < whole.seconds
    assert sum("done" in line for line in rest.lines()) == 3


def test_what_is_done_of_a_stage_is_neither_estimated_nor_hidden(run_config: Path) -> None:
    config = load_config(run_config, ["scoring.methods=[restoration]"])
    whole = make_plan(config, INFO, rate_flops=RATE)
    done = Done(aligned=0.25, scored=["causal", "restoration"])
    rest = make_plan(config, INFO, rate_flops=RATE, done=done)
    was, now = stage_seconds(whole), stage_seconds(rest)
    assert now["supernet"] == pytest.approx(0.75 * was["supernet"])
    assert 0 < now["scores"] < was["scores"]
    everything = Done(scored=["causal", "replacement_kl", "restoration"])
    assert stage_seconds(make_plan(config, INFO, rate_flops=RATE, done=everything))["scores"] == 0
    said = "\n".join(rest.lines())
    assert "twins aligned on 1,024 tokens, 25% done" in said
    assert "by causal (done), replacement_kl, restoration (done), on" in said


def test_minutes_bound_the_estimate_of_a_search(run_config: Path) -> None:
    seconds = [
        stage_seconds(make_plan(load_config(run_config, options), INFO, rate_flops=RATE))["search"]
        for options in ([], ["search.max_minutes=0.5"])
    ]
    # Beside the workers' start.
    assert seconds[0] - seconds[1] > 60
    assert seconds[1] < 30 + 100


def test_a_plan_up_to_the_scores_has_no_search_in_it(run_config: Path) -> None:
    config = load_config(run_config, ["execution.executor=ray", "execution.workers=2"])
    whole = make_plan(config, INFO, rate_flops=RATE)
    part = make_plan(config, INFO, last="scores", rate_flops=RATE)
    assert [stage.name for stage in part.stages] == list(STAGES[:4])
    assert part.seconds < whole.seconds
    assert part.needs.host < whole.needs.host
    assert part.needs.disk < whole.needs.disk
    assert not any("trials" in line or "report" in line for line in part.lines())


def test_more_work_takes_longer_and_more_workers_more_memory(run_config: Path) -> None:
    few = make_plan(load_config(run_config, []), INFO, rate_flops=RATE)
    many = make_plan(load_config(run_config, ["search.trials=500"]), INFO, rate_flops=RATE)
    assert many.seconds > 10 * few.seconds
    workers = load_config(run_config, ["execution.executor=ray", "execution.workers=4"])
    assert make_plan(workers, INFO, rate_flops=RATE).needs.host > few.needs.host


def test_a_run_scores_by_what_its_search_reads_and_by_what_it_is_asked_for(
    run_config: Path,
) -> None:
    def methods(*overrides: str) -> list[str]:
        return scored_methods(load_config(run_config, list(overrides)))

    assert methods() == ["causal", "replacement_kl"]
    seeds = "search.seeds.methods=[blend_groups, duo_gates, attribution_groups, even_layers]"
    assert methods(seeds) == ["causal", "attribution", "duo_gates", "replacement_kl"]
    assert methods("scoring.methods=[restoration]")[-1] == "restoration"


@pytest.mark.parametrize(
    "override",
    [
        *(f"scoring.methods=[{name}]" for name in ("attribution", "leave_one_in", "duo_gates")),
        *(f"scoring.methods=[{name}]" for name in ("retrieval_heads", "replacement_nll")),
        "scoring.methods=[restoration]",
        "scoring.pairs=9",
        "scoring.contexts=[2048]",
        "scoring.sender_pairs=9",
        "scoring.general=[copying, agreement]",
    ],
)
def test_more_scores_take_longer(run_config: Path, override: str) -> None:
    base = ["scoring.retrieval=[single, tracking]", "scoring.sender_pairs=1"]
    less, more = (
        make_plan(load_config(run_config, [*base, *extra]), INFO, rate_flops=RATE)
        for extra in ([], [override])
    )
    assert stage_seconds(more)["scores"] > stage_seconds(less)["scores"]


def stage_seconds(plan: Plan) -> dict[str, float]:
    return {stage.name: stage.seconds for stage in plan.stages}


def test_the_estimate_of_a_run_on_an_h200_is_near_what_was_measured() -> None:
    # Seconds of the whole search in runs/README.md, of two objectives, and bytes of an earlier run.
    two = "[{metric: kl, direction: minimize}, {metric: cache_bytes, direction: minimize}]"
    measured = ["probes.unseen=[]", f"search.objectives={two}", "search.max_promoted=16"]
    config = load_config(SPACES / "smollm2_135m_gpu.yaml", measured)
    plan = make_plan(config, SMOLLM2, rate_flops=H200_RATE, device="cuda")
    seconds = stage_seconds(plan)
    for name, taken in (("data", 50), ("supernet", 29), ("scores", 24), ("search", 218)):
        assert taken / 1.5 < seconds[name] < taken * 1.5, (name, seconds[name])
    assert 80 * GIB < plan.needs.gpu < 120 * GIB
    assert plan.needs.host < 40 * GIB
    assert " of GPU memory" in plan.lines()[-1]


def test_workers_on_one_gpu_share_it() -> None:
    def search(*overrides: str) -> tuple[float, int]:
        config = load_config(SPACES / "smollm2_135m_gpu.yaml", list(overrides))
        plan = make_plan(config, SMOLLM2, rate_flops=H200_RATE, device="cuda")
        return stage_seconds(plan)["search"], plan.needs.gpu

    shared, one = search(), search("execution.workers=1", "execution.gpus_per_worker=1")
    four = search("execution.gpus_per_worker=1")
    assert shared[0] == one[0]
    assert shared[1] > 3 * one[1]
    assert four[0] < 0.4 * one[0]


def test_a_cpu_needs_no_gpu_memory(run_config: Path) -> None:
    plan = make_plan(load_config(run_config, []), INFO, rate_flops=RATE, device="cpu")
    assert plan.needs.gpu == 0
    assert "GPU" not in plan.lines()[-1]


def test_too_little_gpu_memory_is_said() -> None:
    config = load_config(SPACES / "smollm2_135m_gpu.yaml", [])
    plan = make_plan(config, SMOLLM2, rate_flops=H200_RATE, device="cuda")
    assert "warning" not in plan.lines()[-1]
    assert "warning" not in replace(plan, gpu_room=139 * GIB).lines()[-1]
    said = replace(plan, gpu_room=24 * GIB).lines()[-1]
    assert "warning: the GPU memory here is 24 GiB: lower distill.batch_tokens" in said


def test_own_pairs_are_named(run_config: Path) -> None:
    config = load_config(run_config, ["scoring.pairs_file=own.jsonl"])
    plan = make_plan(config, INFO, rate_flops=RATE)
    assert "own.jsonl" in next(s.what for s in plan.stages if s.name == "scores")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "moments"), (45, "45 s"), (600, "10 min"), (7200, "2.0 h")],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_matmul_rate_is_measured() -> None:
    assert matmul_rate(torch.device("cpu")) > 1e8


def test_text_that_is_held_out_too_is_not_trained_on() -> None:
    text = {"source": "file", "path": "a.txt"}
    sizes = {"sequence_length": 64, "heldout_sequences": 3, "niah_share": 0.25}
    found = []
    for train in (text, {**text, "temperature": 0.5}, {**text, "path": "b.txt"}):
        data = {**sizes, "train": train, "heldout": text}
        raw = {"schema": 1, "name": "a", "teacher": {"source": "x"}, "data": data}
        raw["supernet"] = {"tokens": 64 * 8}
        found.append(training_rows(RunConfig.model_validate_json(json.dumps(raw))))
    assert [rows.skip for rows in found] == [3, 3, 0]
    assert {(rows.text, rows.prompts) for rows in found} == {(6, 2)}


@pytest.mark.parametrize(
    ("share", "tokens", "rows"),
    [("0.0", 960, (10, 0)), ("0.01", 960, (9, 1)), ("0.5", 96, (1, 1)), ("0.3", 960, (7, 3))],
)
def test_a_share_of_prompts_is_one_prompt_at_least(
    run_config: Path, share: str, tokens: int, rows: tuple[int, int]
) -> None:
    options = [f"data.niah_share={share}", f"supernet.tokens={tokens}", "search.proxy_tokens=[0]"]
    found = training_rows(load_config(run_config, options))
    assert (found.text, found.prompts) == rows


@pytest.mark.parametrize(
    ("heldout", "extra", "skip"),
    [
        ("b.txt", [("a.txt", 5)], 5),
        ("b.txt", [("a.txt", None), ("c.txt", 9)], 3),
        ("a.txt", [("a.txt", 5), ("a.txt", 4)], 5),
        ("a.txt", [("a.txt", 2)], 3),
        ("b.txt", [("c.txt", 5)], 0),
    ],
)
def test_all_rows_that_any_held_out_text_takes_are_passed_over(
    run_config: Path, heldout: str, extra: list[tuple[str, int | None]], skip: int
) -> None:
    texts = [
        {"label": f"own{i}", "source": "file", "path": path, "sequences": sequences}
        for i, (path, sequences) in enumerate(extra)
    ]
    options = [
        "data.heldout_sequences=3",
        "data.train={source: file, path: a.txt}",
        f"data.heldout={{source: file, path: {heldout}}}",
        f"data.extra_heldout={json.dumps(texts)}",
    ]
    assert training_rows(load_config(run_config, options)).skip == skip
