"""Checks of a config before any work."""

from __future__ import annotations

from typing import Any

import pytest

from archsearch.config import RunConfig
from archsearch.errors import ConfigError, EnvironmentFault
from archsearch.headmap import ModelShape
from archsearch.models.teacher import TeacherInfo
from archsearch.preflight import check_config, check_machine

INFO = TeacherInfo(
    shape=ModelShape("qwen3", 6, 8, 4, 32),
    hidden_size=192,
    num_parameters=2_300_000,
    vocab_size=455,
    max_context=2048,
)
SHIPPED = "package:archsearch/assets/tiny/supernet.safetensors"


def config_with(**sections: Any) -> RunConfig:
    teacher = {"source": "package:archsearch/assets/tiny/teacher", "device": "cpu"}
    # What the tiny teacher's tokenizer has words for.
    scoring = {"retrieval": ["single"], "general": []}
    base = {"schema": 1, "name": "x", "teacher": teacher, "scoring": scoring}
    return RunConfig.model_validate(base | sections)


@pytest.mark.parametrize("gdn", [{}, {"conv": False}, {"rope": True, "bias": True}])
def test_twin_options_of_a_loaded_supernet_may_be_left_out_or_equal(gdn: dict[str, bool]) -> None:
    check_config(config_with(supernet={"source": SHIPPED, "gdn": gdn}), INFO)


def test_twin_options_that_a_loaded_supernet_lacks_are_refused() -> None:
    config = config_with(supernet={"source": SHIPPED, "gdn": {"conv": True}})
    with pytest.raises(ConfigError, match=r"supernet\.gdn\.conv: True, but .* with False"):
        check_config(config, INFO)
    check_config(config_with(supernet={"gdn": {"conv": True}}), INFO)


def test_more_workers_than_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"execution\.workers: 5000 .*: 1 to \d+$"):
        check_machine(config_with(execution={"workers": 5000}))
    check_machine(config_with(execution={"workers": 2}))
    check_machine(config_with(execution={"executor": "serial", "workers": 5000}))


def test_a_gpu_that_is_not_there_is_found_before_anything_runs() -> None:
    with pytest.raises(EnvironmentFault, match=r"teacher\.device: cuda:99, but torch sees"):
        check_machine(config_with(teacher={"source": "x", "device": "cuda:99"}))


GENERAL = "copying or labels or arithmetic or lookup or agreement"


@pytest.mark.parametrize(
    ("search", "field", "needed"),
    [
        ({"objectives": ["kl", "niah_multivalue_nll"]}, "objectives[1]", "multivalue"),
        ({"objectives": ["tracking_match"]}, "objectives[0]", "tracking"),
        ({"objectives": ["general_nll"]}, "objectives[0]", GENERAL),
        ({"constraints": ["labels_match"]}, "constraints[0]", "labels"),
        ({"constraints": ["kl", "general_match"]}, "constraints[1]", GENERAL),
    ],
)
def test_a_metric_that_no_prompt_provides_is_refused(
    search: dict[str, list[str]], field: str, needed: str
) -> None:
    bounds = {"objectives": {"direction": "minimize"}, "constraints": {"max": 9.0}}
    sections = {
        name: [{"metric": metric, **bounds[name]} for metric in metrics]
        for name, metrics in search.items()
    }
    metric = sections[field.partition("[")[0]][-1]["metric"]
    with pytest.raises(ConfigError) as caught:
        check_config(config_with(search=sections), INFO)
    assert str(caught.value) == (
        f"search.{field}.metric: {metric} needs {needed} among probes.kinds; allowed with those that it has: "
        "kl, top1_agreement, niah_single_nll, niah_single_match, niah_multikey_nll, niah_multikey_match, "
        "fa_share, cache_bytes"
    )


@pytest.mark.parametrize(
    ("scoring", "message"),
    [
        (
            {"contexts": [512, 4096]},
            r"^scoring\.contexts: 4096 is .* teacher's 2048 tokens; allowed",
        ),
        (
            {"retrieval": ["single"], "pairs": 3},
            r"^scoring\.min_pairs: 4, .*retrieval has 1 .* 1 to 3$",
        ),
        ({"replacement_length": 4000}, r"^scoring\.replacement_length: 4000 is above"),
    ],
)
def test_scoring_that_cannot_be_is_refused(scoring: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(config_with(scoring={"general": [], **scoring}), INFO)


@pytest.mark.parametrize("field", ["kinds", "unseen"])
def test_contexts_beyond_the_window_need_a_word(field: str) -> None:
    # The unseen kinds are words that the tiny teacher's tokenizer lacks.
    probes = {"contexts": [256, 4096], field: ["single"]}
    message = r"^probes\.contexts: 4096 is beyond the teacher's 2048 tokens; allowed: 1 to 2048, or more with probes\.beyond_window: true$"
    with pytest.raises(ConfigError, match=message):
        check_config(config_with(probes={"kinds": ["single"], **probes}), INFO)
    allowed = config_with(probes={"kinds": ["single"], **probes, "beyond_window": True})
    if field == "kinds":
        check_config(allowed, INFO)
    else:
        with pytest.raises(
            ConfigError, match=r"^probes\.unseen: .*no token .*; allowed: \[\] only$"
        ):
            check_config(allowed, INFO)


def test_texts_and_scores_stay_within_the_window() -> None:
    for sections in ({"data": {"sequence_length": 4096}}, {"scoring": {"contexts": [4096]}}):
        scoring = {"retrieval": ["single"], "general": [], **sections.get("scoring", {})}
        config = config_with(**{**sections, "scoring": scoring}, probes={"beyond_window": True})
        with pytest.raises(ConfigError, match=r"4096 is beyond .*; allowed: 1 to 2048$"):
            check_config(config, INFO)


def test_as_many_likeliest_tokens_as_there_are_can_be_kept() -> None:
    most = INFO.vocab_size
    check_config(config_with(distill={"teacher_logits": "topk", "top_k": most}), INFO)
    check_config(config_with(distill={"top_k": most + 1}), INFO)
    distill = {"teacher_logits": "topk", "top_k": most + 1}
    message = (
        rf"^distill\.top_k: {most + 1} is beyond the teacher's vocabulary; allowed: 1 to {most}$"
    )
    with pytest.raises(ConfigError, match=message):
        check_config(config_with(distill=distill), INFO)


@pytest.mark.parametrize(
    ("metric", "needed"),
    [
        (
            "niah_single_nll@4096",
            "single among probes.kinds and 4096 among several probes.contexts",
        ),
        ("niah_single_nll@512", "single among probes.kinds and 512 among several probes.contexts"),
        ("unseen_tracking_match", "tracking among probes.unseen"),
        ("kl_docs", "its label among data.extra_heldout"),
        ("stations_nll", "its name among probes.files"),
        ("niah_sngle_nll", "its name among probes.files"),
        ("lm_arc_easy_acc", "its task among harness.tasks"),
    ],
)
def test_a_metric_of_the_configs_own_needs_its_part(metric: str, needed: str) -> None:
    search = {"objectives": [{"metric": metric, "direction": "minimize"}]}
    config = config_with(search=search, probes={"contexts": [512]})
    with pytest.raises(
        ConfigError,
        match=rf"^search\.objectives\[0\]\.metric: {metric} needs {needed}; allowed with",
    ):
        check_config(config, INFO)


@pytest.mark.parametrize("metric", ["own_multikey4_nll", "own_nll@512"])
def test_groups_and_lengths_of_a_file_are_no_objectives(metric: str) -> None:
    search = {"objectives": [{"metric": metric, "direction": "minimize"}]}
    files = [{"name": "own", "path": "own.jsonl"}]
    with pytest.raises(
        ConfigError, match=rf"{metric} needs .* \(groups and lengths of own are only reported\); "
    ):
        check_config(config_with(search=search, probes={"files": files}), INFO)


def test_a_metric_of_one_context_is_taken_where_there_are_several() -> None:
    search = {"objectives": [{"metric": "niah_single_nll@256", "direction": "minimize"}]}
    check_config(config_with(search=search, probes={"contexts": [256, 512]}), INFO)


def test_packages_and_files_that_measure_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^probes\.files\[0\]\.path: .*none\.jsonl"):
        check_machine(config_with(probes={"files": [{"name": "a", "path": "none.jsonl"}]}))
    extra = [{"label": "own", "source": "file", "path": "none.txt"}]
    with pytest.raises(ConfigError, match=r"^data\.extra_heldout\[0\]\.path: .*none\.txt"):
        check_machine(config_with(data={"extra_heldout": extra}))
    monkeypatch.setattr("archsearch.evaluation.harness.find_spec", lambda _: None)
    with pytest.raises(
        EnvironmentFault, match=r"^harness\.tasks: needs the Python package lm-eval"
    ):
        check_machine(config_with(harness={"tasks": ["arc_easy"]}))


def test_contexts_that_nothing_reads_may_be_beyond_the_teacher() -> None:
    probes = {"kinds": ["copying"], "contexts": [4096]}
    scoring = {"retrieval": [], "contexts": [4096], "general": ["copying"]}
    config = config_with(probes=probes, scoring=scoring)
    with pytest.raises(ConfigError) as caught:
        check_config(config, INFO)
    assert "4096" not in str(caught.value)
