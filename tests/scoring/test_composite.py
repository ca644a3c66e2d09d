"""Composite scores: Eq. 11-12 on small tables, unusable pairs, and the scores file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from archsearch.errors import ConfigError
from archsearch.scoring.composite import Evidence, composite, head_scores, summarise
from archsearch.scoring.head_scores import HeadScores, groups_of

NAN = float("nan")


def evidence(recv: list, send: list | None = None) -> Evidence:
    return Evidence(torch.tensor(recv), None if send is None else torch.tensor(send))


def test_consistency_is_the_share_of_sub_probes_whose_mean_is_above_the_threshold() -> None:
    # The second sub-probe's mean for head 0 is below the threshold, though one of its pairs is above.
    found = summarise(
        [evidence([[[0.4, 0.2]], [[0.2, 0.0]]]), evidence([[[0.5, 0.0]], [[-0.5, 0.0]]])], 0.01
    )
    assert found.consistency.tolist() == [[0.5, 0.5]]
    assert found.recv[0].tolist() == pytest.approx([0.15, 0.05])
    assert found.send is None
    assert found.score[0].tolist() == pytest.approx([0.075, 0.025])


def test_sub_probes_weigh_the_same_whatever_their_number_of_pairs() -> None:
    found = summarise([evidence([[[1.0]]] * 3), evidence([[[0.0]]])], 0.01)
    assert found.recv.tolist() == [[0.5]]


def test_the_larger_of_receiver_and_sender_effect_counts() -> None:
    first = evidence([[[0.6, 0.0, 0.0]]], [[[0.1, 0.4, 0.005]]])
    second = evidence([[[0.0, 0.0, 0.0]]], [[[0.0, 0.2, 0.005]]])
    found = summarise([first, second], 0.01)
    assert found.consistency.tolist() == [[0.5, 1.0, 0.0]]
    # max(recv, send) * k: 0.3 * 1/2, 0.3 * 1, 0.005 * 0
    assert found.score[0].tolist() == pytest.approx([0.15, 0.3, 0.0])


def test_senders_may_be_measured_on_some_sub_probes_only() -> None:
    found = summarise([evidence([[[0.1]]], [[[0.4]]]), evidence([[[0.1]]])], 0.01)
    assert found.send is not None
    assert found.send[0].tolist() == pytest.approx([0.4])


def test_composite_is_the_mean_of_min_max_scaled_capabilities() -> None:
    one = summarise([evidence([[[1.0, 0.5, 0.0]]])], 0.01)
    other = summarise([evidence([[[0.02, 0.1, 0.02]]])], 0.01)
    score, _ = composite([one, other])
    assert score[0].tolist() == pytest.approx([0.5, 0.75, 0.0])


def test_a_capability_that_tells_no_head_apart_adds_nothing() -> None:
    flat = summarise([evidence([[[0.3, 0.3]]])], 0.01)
    assert composite([flat])[0].tolist() == [[0.0, 0.0]]


def test_signed_scores_keep_their_zero_and_their_order() -> None:
    heads = {"user": {"pairs": evidence([[[0.4, 0.0, -0.1, 0.005]]])}}
    groups = {"user": {"pairs": evidence([[[0.4, -0.1]]])}}
    found = head_scores("attribution", heads, groups, 0.01, {}, signed=True)
    assert found.composite[0] == pytest.approx([0.8, 0.0, -0.2, 0.01])
    assert found.groups[0] == pytest.approx([0.8, -0.2])
    assert found.capabilities["user"].consistency == [[1.0, 0.0, 0.0, 0.0]]
    plain, _ = composite([summarise([heads["user"]["pairs"]], -1.0)])
    shift = torch.tensor(found.composite) - plain
    assert shift.flatten().tolist() == pytest.approx([-0.2] * 4)


def test_files_hold_no_negative_zero() -> None:
    heads = {"user": {"pairs": evidence([[[0.4, -0.1]]])}}
    found = head_scores("causal", heads, heads, 0.01, {})
    assert "-0.0" not in str(found.capabilities["user"].score)


def test_spread_is_the_standard_error_in_units_of_the_composite() -> None:
    found = summarise([evidence([[[1.0, 0.0]], [[3.0, 0.0]]])], 0.01)
    # Standard error 1 of a mean of 2 that min-max makes 1.
    assert composite([found])[1][0].tolist() == pytest.approx([0.5, 0.0])


def test_single_pairs_borrow_the_variance_of_all() -> None:
    alone = summarise([evidence([[[0.5, 0.1]]])], 0.01)
    assert alone.recv_spread.tolist() == [[0.0, 0.0]]
    two = summarise([evidence([[[1.0]]]), evidence([[[3.0]]])], 0.01)
    # Each sub-probe's variance is 2, the mean's (2 + 2) / 4.
    assert two.recv_spread.tolist() == [[1.0]]


def test_nothing_to_score_by_is_an_error() -> None:
    with pytest.raises(ValueError, match="no capability"):
        composite([])
    with pytest.raises(ValueError, match="without pairs"):
        summarise([evidence([])], 0.01)


def full_scores() -> HeadScores:
    heads = {"retrieval": {"single": Evidence(torch.rand(3, 4, 6), torch.rand(2, 4, 6))}}
    groups = {"retrieval": {"single": Evidence(torch.rand(3, 4, 2))}}
    counts = {"retrieval": {"single": {"kept": 3, "drawn": 5}}}
    return head_scores("causal", heads, groups, 0.3, counts)


def test_scores_survive_the_file(tmp_path: Path) -> None:
    scores = full_scores()
    path = tmp_path / "scores.json"
    scores.save(path)
    assert HeadScores.load(path) == scores
    assert [child.name for child in tmp_path.iterdir()] == ["scores.json"]
    assert scores.capabilities["retrieval"].probes["single"]["drawn"] == 5
    assert len(scores.groups[0]) == 2


def test_plain_scores_survive_json() -> None:
    values = torch.rand(3, 4)
    scores = HeadScores.of("replacement_kl", values, groups_of(values, 2))
    assert HeadScores.from_json(json.loads(json.dumps(scores.to_json()))) == scores
    assert scores.groups[0][1] == pytest.approx(float(values[0, 2:].max()))


EVIDENCE = {"recv": [[0.0, 0.0]], "send": None, "consistency": [[0.0, 0.0]]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 1}, "schema 1 is not 2"),
        ({"composite": [[0.0], [0.0, 1.0]]}, "is not 2 x 1"),
        ({"composite": [[NAN, 0.0]]}, "no finite number"),
        ({"groups": [[0.0], [0.0]]}, "is not 1 x 1"),
        ({"spread": [["a", 0.0]]}, "no finite number"),
        ({"capabilities": {"single": {"recv": [[0.0, 0.0]]}}}, "malformed"),
        ({"capabilities": {"single": EVIDENCE | {"probes": {"a": {"kept": 3}}}}}, "malformed"),
        ({"capabilities": {"single": EVIDENCE | {"probes": []}}}, "malformed"),
        (
            {"capabilities": {"single": EVIDENCE | {"probes": {"a": {"kept": 3, "drawn": ""}}}}},
            "does not count pairs",
        ),
        ({"method": None, "capabilities": None}, "malformed"),
    ],
)
def test_a_malformed_file_is_refused(change: dict, message: str) -> None:
    good = HeadScores.of("causal", torch.zeros(1, 2), torch.zeros(1, 1)).to_json()
    with pytest.raises(ValueError, match=message):
        HeadScores.from_json(good | change)


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff", b'{"schema": 1}'])
def test_a_file_that_is_none_is_named(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "scores.json"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=rf"^{path}: damaged or of another version \("):
        HeadScores.load(path)
