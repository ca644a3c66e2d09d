"""Fronts, hypervolumes and the knee, on points whose answer is known."""

from __future__ import annotations

import json

import pytest

from archsearch.config import ObjectiveConfig
from archsearch.headmap import HeadMap, Operator
from archsearch.search.front import CONTROL, Candidate, Fronts, Scale, knee, pareto_front
from tests.search.fakes import SHAPE, going_on

KL = ObjectiveConfig(metric="kl", direction="minimize")
MATCH = ObjectiveConfig(metric="niah_multikey_match", direction="maximize")
BYTES = ObjectiveConfig(metric="cache_bytes", direction="minimize")
MAP = HeadMap.uniform(SHAPE, Operator.GDN)


def point(number: int, kl: float, match: float, source: str = "search", **more: bool) -> Candidate:
    metrics = {"kl": kl, "niah_multikey_match": match, "cache_bytes": 1.0}
    return Candidate(number, source, metrics, MAP, **more)  # type: ignore[arg-type]


POINTS = [
    point(0, 0.0, 0.0),
    point(1, 1.0, 0.9),
    point(2, 4.0, 1.0),
    point(3, 2.0, 0.5),  # dominated by 1
    point(4, 1.0, 0.9),  # equal to 1
]


def test_the_front_holds_what_nothing_dominates_once() -> None:
    scale = Scale.of([KL, MATCH], POINTS)
    assert [c.candidate for c in pareto_front(POINTS, scale)] == [0, 1, 2]


def test_infeasible_points_are_on_no_front_and_in_no_volume() -> None:
    points = [*POINTS, point(5, -1.0, 2.0, feasible=False)]
    scale = Scale.of([KL, MATCH], points)
    front = pareto_front(points, scale)
    assert [c.candidate for c in front] == [0, 1, 2]
    assert scale.hypervolume(points) == pytest.approx(scale.hypervolume(front))


def test_hypervolume_is_the_share_of_the_box() -> None:
    points = [point(0, 0.0, 0.0), point(1, 1.0, 1.0)]
    scale = Scale.of([KL, MATCH], points)
    assert scale.ideal == (0.0, 1.0)
    assert scale.reference == pytest.approx((1.1, -0.1))
    # Each point covers a strip of 0.1 / 1.1 along one side of the box.
    strip = 0.1 / 1.1
    assert scale.hypervolume(points) == pytest.approx(2 * strip - strip**2)
    assert scale.hypervolume([]) == 0.0


def test_one_objective() -> None:
    scale = Scale.of([KL], POINTS)
    assert [c.candidate for c in pareto_front(POINTS, scale)] == [0]
    assert scale.hypervolume(POINTS) == 1.0
    assert knee(pareto_front(POINTS, scale), [KL]) == POINTS[0]


def test_an_objective_on_which_all_agree() -> None:
    scale = Scale.of([KL, BYTES], POINTS)
    assert [c.candidate for c in pareto_front(POINTS, scale)] == [0]
    assert scale.hypervolume(POINTS) == pytest.approx(1.0)


def test_the_knee_is_the_best_compromise() -> None:
    front = pareto_front(POINTS, Scale.of([KL, MATCH], POINTS))
    found = knee(front, [KL, MATCH])
    assert found is not None
    assert found.candidate == 1
    assert knee([], [KL]) is None


def test_fronts_compare_search_seeds_and_control() -> None:
    search = [point(0, 0.0, 0.0, "causal"), point(1, 1.0, 0.9), point(2, 4.0, 0.8, "random")]
    control = [point(0, 4.0, 0.2, CONTROL), point(1, 3.5, 0.1, CONTROL)]
    fronts = Fronts.of([KL, MATCH], search, control, proxy_tokens=7)
    volumes = fronts.hypervolumes()
    assert volumes["front"] > volumes["seeds"] > volumes["random"] > 0
    assert fronts.lines("untrained")[1].startswith(
        f"hypervolume: front {volumes['front']:.4f}, seeds alone "
    )
    promoted, drawn = going_on(fronts)
    assert [c.candidate for c in promoted] == [0, 1, 2]
    assert [c.source for c in drawn] == [CONTROL, CONTROL]
    said = fronts.lines("untrained")[0]
    assert said == "front: 2 points of 3 (untrained), 1 that no seed supplied"
    data = json.loads(json.dumps(fronts.to_json(), allow_nan=False))
    assert data["objectives"][1] == {"metric": "niah_multikey_match", "direction": "maximize"}
    assert [p["source"] for p in data["points"]] == ["causal", "search"]
    assert data["random"]["hypervolume"] == volumes["random"]
    assert data["knee"] in (0, 1)


def test_nothing_finished_gives_empty_fronts() -> None:
    data = Fronts.of([KL, MATCH], [], [], 0).to_json()
    assert (data["points"], data["knee"], data["hypervolume"]) == ([], None, 0.0)


def test_a_limit_promotes_the_points_that_add_most() -> None:
    corner, near_it, far = point(0, 0.5, 0.5), point(1, 0.52, 0.51), point(2, 0.0, 0.1)
    weak = point(3, 1.0, 0.55)
    fronts = Fronts.of([KL, MATCH], [corner, near_it, far, weak], [], 0)
    assert len(fronts.points) == 4
    assert len(going_on(fronts)[0]) == 4
    assert [c.candidate for c in going_on(fronts, 2)[0]] == [0, 2]
