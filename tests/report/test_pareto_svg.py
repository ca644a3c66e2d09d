"""The Pareto plot as SVG."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

from archsearch.report.pareto_svg import HEIGHT, WIDTH, pareto_svg
from archsearch.report.records import METHOD_TITLES

from .runs import OBJECTIVES, made_rung


def points(svg: str) -> list[ElementTree.Element]:
    return [e for e in ElementTree.fromstring(svg).iter() if e.get("class") == "point"]


def test_is_xml_with_one_point_a_candidate() -> None:
    rung = made_rung()
    found = points(pareto_svg(rung.candidates, OBJECTIVES[1], OBJECTIVES[0]))
    assert {e.get("data-key") for e in found} == {c.key for c in rung.candidates}


def test_front_is_drawn_last_and_reached_by_keyboard() -> None:
    rung = made_rung()
    found = points(pareto_svg(rung.candidates, OBJECTIVES[1], OBJECTIVES[0]))
    focusable = [e.get("tabindex") is not None for e in found]
    assert focusable == sorted(focusable)
    assert sum(focusable) == len(rung.front)


def test_titles_hold_the_map() -> None:
    rung = made_rung()
    svg = pareto_svg(rung.candidates, OBJECTIVES[1], OBJECTIVES[0], titles=True)
    assert "/".join(rung.candidates[1].head_map.layers) in svg


def test_methods_that_are_new_to_the_plot_are_drawn_all_the_same() -> None:
    rung = made_rung()
    odd = [replace(c, method="something-new") for c in rung.candidates]
    assert len(points(pareto_svg(odd, OBJECTIVES[1], OBJECTIVES[0]))) == len(odd)


def test_one_point_is_enough() -> None:
    svg = pareto_svg(made_rung().candidates[:1], OBJECTIVES[1], OBJECTIVES[0])
    assert len(points(svg)) == 1
    assert "nan" not in svg


def test_legend_of_all_methods_stays_inside() -> None:
    rung = made_rung()
    methods = [m for m in METHOD_TITLES if m != "random"]
    candidates = [replace(rung.candidates[0], candidate=i, method=m) for i, m in enumerate(methods)]
    svg = pareto_svg(candidates, OBJECTIVES[1], OBJECTIVES[0])
    texts = [e for e in ElementTree.fromstring(svg).iter() if e.text in METHOD_TITLES.values()]
    assert len(texts) == len(methods)
    assert all(0 < float(e.get("y", "")) < HEIGHT for e in texts)
    assert all(float(e.get("x", "")) + 6.7 * len(e.text or "") < WIDTH for e in texts)


def test_maps_outside_the_constraints_are_hollow_and_the_legend_says_so() -> None:
    rung = made_rung()
    met = pareto_svg(rung.candidates, OBJECTIVES[1], OBJECTIVES[0])
    odd = [replace(c, feasible=c.candidate != 1) for c in rung.candidates]
    svg = pareto_svg(odd, OBJECTIVES[1], OBJECTIVES[0])
    hollow = [e.get("data-key") for e in points(svg) if e.get("fill-opacity") == "0"]
    assert sorted(map(str, hollow)) == ["0-1", "0-random-1"]
    assert "hollow: outside search.constraints" in svg
    assert "hollow" not in met
