"""Labels: nothing that a config can name is without one."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from archsearch.config import Metric, ScoreMethod, SeedMethod
from archsearch.report.pareto_svg import MARKS
from archsearch.report.records import (
    COST_METRICS,
    MAIN_METRICS,
    METHOD_TITLES,
    METRIC_TITLES,
    metric_title,
)

from .runs import made_rung


def test_every_metric_has_a_label() -> None:
    assert set(METRIC_TITLES) == set(get_args(Metric))
    assert set(COST_METRICS) | set(MAIN_METRICS) <= set(METRIC_TITLES)


def test_ends_that_are_alike_are_no_interval() -> None:
    intervals = {"kl": (0.25, 0.75), "niah_multikey_match": (0.5, 0.5)}
    shown = replace(made_rung().candidates[1], intervals=intervals).shown
    assert (shown("kl"), shown("niah_multikey_match")) == ("0.4 (0.25 to 0.75)", "50%")


@pytest.mark.parametrize(
    ("metric", "title"),
    [
        ("niah_single_nll@4096", "single-key answer NLL (nats a token) at 4,096 tokens"),
        ("kl_docs", "kl_docs"),
        ("stations_match@1024", "stations_match at 1,024 tokens"),
        ("lm_task_pass@k", "lm_task_pass@k"),
    ],
)
def test_names_that_a_config_makes_stay_readable(metric: str, title: str) -> None:
    assert metric_title(metric) == title


def test_every_method_has_a_label_and_a_mark_of_its_own() -> None:
    own = {"search", "random-control"}
    assert set(METHOD_TITLES) == set(get_args(SeedMethod)) | own
    assert set(MARKS) == set(METHOD_TITLES)
    assert set(get_args(ScoreMethod)) <= set(METHOD_TITLES)
    looks = [(mark.shape, mark.colour) for mark in MARKS.values()]
    assert len(set(looks)) == len(looks)
    assert len(set(METHOD_TITLES.values())) == len(METHOD_TITLES)
    assert len(set(METRIC_TITLES.values())) == len(METRIC_TITLES)


def test_methods_of_whole_groups_say_so() -> None:
    named = {method for method, title in METHOD_TITLES.items() if "whole KV groups" in title}
    assert named == {method for method in METHOD_TITLES if method.endswith("_groups")}
