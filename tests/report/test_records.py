"""Labels: nothing that a config can name is without one."""

from __future__ import annotations

from typing import get_args

from archsearch.config import Metric, ScoreMethod, SeedMethod
from archsearch.report.pareto_svg import MARKS
from archsearch.report.records import COST_METRICS, MAIN_METRICS, METHOD_TITLES, METRIC_TITLES


def test_every_metric_has_a_label() -> None:
    assert set(METRIC_TITLES) == set(get_args(Metric))
    assert set(COST_METRICS) | set(MAIN_METRICS) <= set(METRIC_TITLES)


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
