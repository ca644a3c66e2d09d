"""What a study says of its proxies, where the truth is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from archsearch.config import ObjectiveConfig
from archsearch.fidelity.analysis import FIT, LOSS, analyse, groups_of, targets_of
from archsearch.fidelity.records import Agreement, Study

from .studies import made_study

OBJECTIVES = [
    ObjectiveConfig(metric="niah_single_nll", direction="minimize"),
    ObjectiveConfig(metric="cache_bytes", direction="minimize"),
    ObjectiveConfig(metric="lm_task_acc", direction="maximize"),
]


def found(study: Study, proxy: str, tokens: int, group: str, metric: str = "kl") -> Agreement:
    (row,) = (
        row
        for row in study.agreements
        if (row.proxy, row.tokens, row.group, row.metric) == (proxy, tokens, group, metric)
    )
    return row


@pytest.fixture(scope="module")
def study() -> Study:
    return analyse(made_study(), ["kl"])


def test_an_exact_proxy_has_no_regret_and_a_reversed_one_the_most(study: Study) -> None:
    right, wrong = (found(study, "kl", tokens, "good, 12.5% FA") for tokens in (200, 0))
    assert (right.spearman, right.regret, right.regret_of_three) == (pytest.approx(1), 0, 0)
    assert wrong.spearman == pytest.approx(-1)
    # Ten maps, each 0.01 worse than the one before.
    assert wrong.regret == pytest.approx(0.09)
    assert wrong.regret_of_three == pytest.approx(0.07)
    assert right.maps == wrong.maps == 10
    assert found(study, LOSS, 200, "good, 12.5% FA").spearman == pytest.approx(1)


def test_metrics_of_which_more_is_better_are_turned(study: Study) -> None:
    assert found(study, "top1_agreement", 0, "all").spearman == pytest.approx(-1)
    target = analyse(made_study(), ["top1_agreement"])
    assert found(target, "kl", 200, "all", "top1_agreement").spearman == pytest.approx(1)


def test_maps_of_different_shares_are_judged_by_the_front_that_is_left(study: Study) -> None:
    right, wrong = (found(study, "kl", tokens, "all") for tokens in (200, 0))
    assert right.regret is None
    assert right.front_lost == pytest.approx(0)
    assert wrong.front_lost is not None
    assert wrong.front_lost > 0.2


def test_half_of_the_good_maps_is_the_better_one(study: Study) -> None:
    row = found(study, "kl", 200, "better half of good, 12.5% FA")
    assert row.maps == 5
    (group,) = (g for g in groups_of(study, "kl") if "half" in g.title)
    assert [pair.subject.origin for pair in group.pairs] == [f"map {n}" for n in range(5)]


def test_predictors_and_a_fit_need_no_training(study: Study) -> None:
    assert found(study, "minus FA share", 0, "good, 12.5% FA").spearman == 0
    assert found(study, "minus FA share", 0, "all").spearman > 0.5
    fit = found(study, FIT, 0, "all")
    assert fit.spearman > 0.95, "the reversed metric tells a fit as much as the right one"
    assert found(study, FIT, 100, "good, 12.5% FA").spearman > 0.95
    assert not any(row.tokens == 1000 for row in study.agreements)


def test_two_seeds_say_how_far_any_proxy_can_go() -> None:
    exact = analyse(made_study(), ["kl"]).ceilings
    assert {row.group for row in exact} >= {"all", "good, 12.5% FA"}
    assert all(row.reliability == 1 and row.deviation == 0 for row in exact)
    noisy = {row.group: row for row in analyse(made_study(noise=0.03), ["kl"]).ceilings}
    assert 0.01 < noisy["all"].deviation < 0.1
    assert noisy["good, 12.5% FA"].reliability < noisy["all"].reliability < 1
    assert not analyse(made_study(repeats=2), ["kl"]).ceilings


def test_maps_that_are_not_trained_yet_are_left_out() -> None:
    whole = made_study()
    trained = dict(list(whole.runs.items())[:6])
    part = analyse(replace(whole, runs=trained), ["kl"])
    assert {row.maps for row in part.agreements} <= set(range(5, 7))
    assert not analyse(replace(whole, runs={}), ["kl"]).agreements


def test_other_maps_of_one_share_are_a_group_too() -> None:
    base = made_study(good=6, mixed=0)
    others = tuple(replace(s, group="mixed") for s in base.subjects)
    titles = [group.title for group in groups_of(replace(base, subjects=others), "kl")]
    assert titles == ["all", "others, 12.5% FA"]


def test_targets_are_objectives_with_a_direction_and_kl() -> None:
    assert targets_of(OBJECTIVES, made_study()) == ["niah_single_nll", "kl"]
    assert targets_of(OBJECTIVES, replace(made_study(), runs={})) == []
