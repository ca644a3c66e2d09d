"""Composite scores: Eq. 11-12 on small tables, unusable pairs, and the scores file."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from archsearch.scoring.composite import HeadScores, composite

NAN = float("nan")


def scores_of(effects: dict[str, list], threshold: float = 0.01) -> HeadScores:
    return composite(
        {name: torch.tensor(value) for name, value in effects.items()}, threshold=threshold
    )


def test_consistency_is_the_share_of_pairs_above_the_threshold() -> None:
    scores = scores_of({"single": [[[0.5, 0.2]], [[0.3, 0.0]], [[0.4, 0.0]], [[0.8, 0.2]]]})
    capability = scores.capabilities["single"]
    assert capability.consistency == [[1.0, 0.5]]
    assert capability.recv[0] == pytest.approx([0.5, 0.1])
    assert capability.send is None


def test_sub_probes_average_their_pairs_first() -> None:
    # Two sub-probes of two pairs: the second's mean is below the threshold though one pair is above.
    effects = [[[[0.4, 0.0]], [[0.2, 0.0]]], [[[0.5, 0.0]], [[-0.5, 0.0]]]]
    assert scores_of({"single": effects}).capabilities["single"].consistency == [[0.5, 0.0]]


def test_composite_is_the_mean_of_min_max_scaled_capabilities() -> None:
    scores = scores_of(
        {"single": [[[1.0, 0.5, 0.0]]], "multikey": [[[0.02, 0.1, 0.02]]]}, threshold=0.01
    )
    assert scores.composite[0] == pytest.approx([0.5, 0.75, 0.0])


def test_pairs_that_say_nothing_are_left_out() -> None:
    clean = scores_of({"single": [[[0.5, 0.1]], [[0.3, 0.2]]]})
    assert scores_of({"single": [[[0.5, 0.1]], [[NAN, NAN]], [[0.3, 0.2]]]}) == clean


def test_a_capability_without_usable_pairs_scores_zero_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        scores = scores_of({"single": [[[0.5, 0.1]]], "multikey": [[[NAN, NAN]]]})
    assert scores.composite == [[0.5, 0.0]]
    assert "no pair of multi" in caplog.text


def test_spread_is_the_standard_error_in_units_of_the_composite() -> None:
    scores = scores_of({"single": [[[1.0, 0.0]], [[3.0, 0.0]]]})
    assert scores.spread[0] == pytest.approx([(2**0.5) / (2**0.5) / 2, 0.0])


def test_one_pair_has_no_spread() -> None:
    assert scores_of({"single": [[[0.5, 0.1]]]}).spread == [[0.0, 0.0]]


def test_no_capability_is_an_error() -> None:
    with pytest.raises(ValueError, match="no capability"):
        composite({}, threshold=0.01)


def test_scores_survive_the_file(tmp_path: Path) -> None:
    effects = {"single": torch.rand(3, 4, 5), "multikey": torch.rand(2, 3, 4, 5)}
    scores = composite(effects, threshold=0.3)
    path = tmp_path / "scores.json"
    scores.save(path)
    assert HeadScores.load(path) == scores
    assert [child.name for child in tmp_path.iterdir()] == ["scores.json"]


def test_plain_scores_survive_json() -> None:
    scores = HeadScores.plain("replacement_kl", torch.rand(3, 2))
    assert HeadScores.from_json(json.loads(json.dumps(scores.to_json()))) == scores


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema 2 is not 1"),
        ({"composite": [[0.0], [0.0, 1.0]]}, "is not 2 x 1"),
        ({"composite": [[NAN, 0.0]]}, "no finite number"),
        ({"spread": [["a", 0.0]]}, "no finite number"),
        ({"capabilities": {"single": {"recv": [[0.0, 0.0]]}}}, "malformed"),
        ({"method": None, "capabilities": None}, "malformed"),
    ],
)
def test_a_malformed_file_is_refused(change: dict, message: str) -> None:
    good = HeadScores.plain("causal", torch.zeros(1, 2)).to_json()
    with pytest.raises(ValueError, match=message):
        HeadScores.from_json(good | change)
