"""Confidence intervals: around the metric, narrower with more data, honest about chance, the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from archsearch.evaluation.divergence import TeacherReference, divergence
from archsearch.evaluation.intervals import Bootstrap, MeasureWithIntervals
from archsearch.evaluation.retrieval import Answer, Place, retrieval, summarize
from archsearch.evaluation.shares import mean_interval, share_interval
from tests.random_models import random_probes, random_teacher, random_tokens


def drawn_answers(count: int, seed: int) -> list[Answer]:
    rng = np.random.default_rng(seed)
    return [
        Answer(float(nll), int(tokens), bool(match))
        for nll, tokens, match in zip(
            rng.gamma(2, 3, count), rng.integers(1, 6, count), rng.random(count) < 0.4, strict=True
        )
    ]


@pytest.mark.parametrize("values", [[0.5] * 7, [0.25]])
def test_what_does_not_vary_has_no_interval(values: list[float]) -> None:
    found = Bootstrap(50, 0.9, seed=1).of_sequences({"kl": values, "top1_agreement": [0.5, 1.0]})
    assert found.keys() == {"top1_agreement"}


def test_all_right_and_all_wrong_are_not_certain() -> None:
    """Wilson's bounds: n / (n + z^2) and its mirror, z the quantile of the confidence."""
    kinds = (("single", True), ("multikey", False), ("copying", True), ("labels", True))
    found = {Place(kind): [Answer(1.0 + i, 2, match) for i in range(32)] for kind, match in kinds}
    ends = Bootstrap(50, 0.95, seed=1).of_answers(found)
    z2 = 1.959964**2
    assert ends["niah_single_match"] == pytest.approx((32 / (32 + z2), 1.0))
    assert ends["niah_multikey_match"] == pytest.approx((0.0, z2 / (32 + z2)))
    # A mean of two is as certain as their 64 prompts make it, or a little less.
    low, high = ends["general_match"]
    assert 32 / (32 + z2) < low < 64 / (64 + z2)
    assert high == 1.0


def test_intervals_of_shares_cover_the_true_share_about_as_often_as_they_say() -> None:
    """At a share near 1, where in 44% of all samples none of 16 prompts is wrong and a bootstrap would have no width."""
    rng = np.random.default_rng(7)
    counts = rng.binomial(16, 0.95, 400).tolist()
    ends = {count: share_interval(count, 16, 0.95) for count in set(counts)}
    covered = np.mean([ends[count][0] <= 0.95 <= ends[count][1] for count in counts])
    assert 0.9 <= covered <= 0.99
    half = [share_interval(8, 16, 0.95)]
    assert mean_interval([0.5], half) == pytest.approx(half[0])


def test_more_data_and_less_confidence_are_narrower() -> None:
    rng = np.random.default_rng(0)
    few, many = rng.random(20), rng.random(2000)

    def width(values: np.ndarray, confidence: float) -> float:
        low, high = Bootstrap(500, confidence, seed=3).of_sequences({"kl": values.tolist()})["kl"]
        assert low < values.mean() < high
        return high - low

    assert width(many, 0.95) < width(few, 0.95) / 5
    assert width(few, 0.5) < width(few, 0.95)
    # The normal approximation: 2 * 1.96 standard errors.
    assert width(many, 0.95) == pytest.approx(2 * 1.96 * many.std() / np.sqrt(2000), rel=0.1)


def test_intervals_cover_the_true_mean_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(5)
    covered = 0
    for number in range(200):
        sample = rng.exponential(1.0, 60)
        low, high = Bootstrap(200, 0.9, seed=number).of_sequences({"kl": sample.tolist()})["kl"]
        covered += low <= 1.0 <= high
    assert 0.8 <= covered / 200 <= 0.96


def test_answers_have_intervals_of_all_their_metrics() -> None:
    found = {
        Place("single"): drawn_answers(30, 1),
        Place("copying"): drawn_answers(30, 2),
        Place("labels"): drawn_answers(30, 3),
        Place("single", "", 64): drawn_answers(12, 4),
    }
    metrics = summarize(found)
    ends = Bootstrap(400, 0.95, seed=2).of_answers(found)
    assert ends.keys() == metrics.keys()
    assert {"niah_single_nll", "niah_single_nll@64", "general_match"} <= ends.keys()
    for name, (low, high) in ends.items():
        assert low < metrics[name] < high
    # The mean of two kinds varies less than either, as independent ones do.
    widths = {name: high - low for name, (low, high) in ends.items()}
    expected = np.hypot(widths["copying_match"], widths["labels_match"]) / 2
    assert widths["general_match"] == pytest.approx(expected, rel=0.15)
    assert Bootstrap(400, 0.95, seed=2).of_answers(found) == ends
    assert Bootstrap(400, 0.95, seed=3).of_answers(found) != ends


def test_no_answers_have_no_intervals() -> None:
    assert Bootstrap(10, 0.95, seed=0).of_answers({}) == {}


def test_metrics_are_those_of_a_trial() -> None:
    teacher, student = random_teacher("qwen3"), random_teacher("qwen3", seed=1)
    rows = random_tokens(6, 24)
    probes = [*random_probes(5, kind="single", seed=1), *random_probes(4, kind="multikey", seed=2)]
    reference = TeacherReference(teacher, rows, batch_tokens=50)
    measure = MeasureWithIntervals(
        {"": reference, "_other": TeacherReference(teacher, rows[:2])},
        probes,
        Bootstrap(100, 0.95, seed=0),
        batch_tokens=100,
    )
    metrics, intervals = measure(student.model)
    expected = divergence(student.model, reference) | retrieval(student.model, probes)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert metrics.keys() == {*expected, "kl_other", "top1_agreement_other"}
    # Two random models agree nowhere, in no sequence.
    assert metrics.keys() - intervals.keys() == {"top1_agreement", "top1_agreement_other"}
    assert all(
        low <= metrics[name] + 1e-6 and metrics[name] <= high + 1e-6
        for name, (low, high) in intervals.items()
    )
    low, high = intervals["kl"]
    assert 0 < low < metrics["kl"] < high
