"""What a trial measures."""

from __future__ import annotations

from typing import get_args

import pytest

from archsearch.config import GeneralKind, Metric, ProbeConfig, ProbeKind
from archsearch.data.tasks import GENERAL_KINDS, RETRIEVAL_KINDS, metric_name
from archsearch.execution.base import Outcome
from archsearch.search.records import WITHOUT_PROMPTS, TrialResult, measured_metrics
from archsearch.search.rung import judge


@pytest.mark.parametrize("kind", [*RETRIEVAL_KINDS, *GENERAL_KINDS])
def test_a_kind_of_prompts_gives_its_own_metrics(kind: ProbeKind) -> None:
    expected = {*WITHOUT_PROMPTS, f"{metric_name(kind)}_nll", f"{metric_name(kind)}_match"}
    if kind in get_args(GeneralKind):
        expected |= {"general_nll", "general_match"}
    found = measured_metrics(ProbeConfig(kinds=(kind,)))
    assert set(found) == expected
    assert len(found) == len(expected)


def test_all_kinds_together_give_every_metric() -> None:
    every = ProbeConfig(kinds=(*RETRIEVAL_KINDS, *GENERAL_KINDS))
    assert measured_metrics(every) == list(get_args(Metric))


def test_a_result_needs_the_metrics_of_its_prompts_and_no_others() -> None:
    result = TrialResult(3, "ok", metrics={"kl": 0.5, "fa_share": 0.25})
    assert judge(Outcome(3, result), ["kl"]).reason is None
    assert judge(Outcome(3, result), ["kl", "labels_nll"]).reason == (
        "the worker left out labels_nll"
    )
