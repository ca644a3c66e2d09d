"""What a trial measures."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from archsearch.config import GeneralKind, Metric, ProbeKind, RunConfig
from archsearch.data.tasks import GENERAL_KINDS, RETRIEVAL_KINDS, metric_name
from archsearch.execution.base import Outcome
from archsearch.search.records import WITHOUT_PROMPTS, TrialResult, measured_metrics
from archsearch.search.rung import judge


def config_with(**sections: Any) -> RunConfig:
    base = {"schema": 1, "name": "x", "teacher": {"source": "x"}}
    return RunConfig.model_validate(base | sections)


@pytest.mark.parametrize("kind", [*RETRIEVAL_KINDS, *GENERAL_KINDS])
def test_a_kind_of_prompts_gives_its_own_metrics(kind: ProbeKind) -> None:
    expected = {*WITHOUT_PROMPTS, f"{metric_name(kind)}_nll", f"{metric_name(kind)}_match"}
    if kind in get_args(GeneralKind):
        expected |= {"general_nll", "general_match"}
    found = measured_metrics(config_with(probes={"kinds": [kind]}))
    assert set(found) == expected
    assert len(found) == len(expected)


def test_all_kinds_together_give_every_metric() -> None:
    every = config_with(probes={"kinds": [*GENERAL_KINDS, *RETRIEVAL_KINDS]})
    assert measured_metrics(every) == list(get_args(Metric))


def test_texts_contexts_files_and_tasks_add_their_own() -> None:
    lm = "lm_arc_easy_acc"
    config = config_with(
        data={"extra_heldout": [{"label": "docs", "source": "docstrings"}]},
        probes={
            "kinds": ["single", "copying"],
            "unseen": ["tracking"],
            "contexts": [512, 1024],
            "files": [{"name": "stations", "path": "a.jsonl"}],
        },
        harness={"tasks": ["arc", "arc_easy"]},
        search={"objectives": [{"metric": lm, "direction": "maximize"}]},
    )
    found = measured_metrics(config)
    assert len(set(found)) == len(found)
    assert set(found) == {
        *WITHOUT_PROMPTS,
        "kl_docs",
        "top1_agreement_docs",
        *(
            f"{name}_{figure}{place}"
            for name in ("niah_single", "unseen_tracking")
            for figure in ("nll", "match")
            for place in ("", "@512", "@1024")
        ),
        *(
            f"{n}_{figure}"
            for n in ("copying", "general", "stations")
            for figure in ("nll", "match")
        ),
        lm,
    }


def test_a_result_needs_the_metrics_of_its_prompts_and_no_others() -> None:
    result = TrialResult(3, "ok", metrics={"kl": 0.5, "fa_share": 0.25})
    assert judge(Outcome(3, result), ["kl"]).reason is None
    assert judge(Outcome(3, result), ["kl", "labels_nll"]).reason == (
        "the worker left out labels_nll"
    )
