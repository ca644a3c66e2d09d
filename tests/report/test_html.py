"""The static page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from archsearch.report.html import html_report, plot_axes
from archsearch.report.records import Objective
from archsearch.report.score_records import ScoreFiles

from .runs import made_scores, made_summary

VOID = {"meta", "br", "path", "rect", "wbr"}


class Balance(HTMLParser):
    """Checks that every element that needs it is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page() -> str:
    return html_report(replace(made_summary(), scores=made_scores()))


def test_page_is_balanced_and_needs_no_network(page: str) -> None:
    parser = Balance()
    parser.feed(page)
    assert not parser.open
    assert not re.search(r'(src|href)="', page)


def test_script_data_holds_every_point(page: str) -> None:
    text = re.search(r'<script type="application/json" id="candidates">(.*?)</script>', page)
    assert text is not None
    data = json.loads(text.group(1))
    keys = set(re.findall(r'data-key="([0-9][^"]*)"', page))
    assert keys == set(data["points"])
    # Also where a candidate of the random control has the number of another.
    assert len(keys) == sum(len(rung.candidates) for rung in made_summary().rungs)
    assert data["groupSize"] == 2


def test_front_has_a_card_each(page: str) -> None:
    front = made_summary().last.front
    assert all(f'id="card-{c.key}"' in page for c in front)
    assert page.count('class="card"') == len(front)


def test_text_from_outside_is_escaped(page: str) -> None:
    assert "org/<model>" not in page
    assert "| <b>" not in page


def test_costs_go_to_the_x_axis() -> None:
    kl, cost = Objective("kl", minimize=True), Objective("cache_bytes", minimize=True)
    nll = Objective("niah_multikey_nll", minimize=True)
    assert plot_axes((kl, cost)) == plot_axes((cost, kl)) == [(cost, kl)]
    assert len(plot_axes((kl, nll, cost))) == 3
    assert plot_axes((kl,)) == [(cost, kl)]


def test_page_without_a_front() -> None:
    summary = made_summary()
    rung = summary.last
    bare = replace(
        rung, candidates=tuple(replace(c, on_front=False) for c in rung.candidates), hypervolume={}
    )
    assert "<h1>" in html_report(replace(summary, rungs=(bare,)))


def test_scores_stand_between_the_result_and_the_details(page: str) -> None:
    order = ["The front", "Head scores", "Highest heads by", "by 2 other methods", "How alike"]
    places = [page.index(text) for text in [*order, "Metrics of all candidates"]]
    assert places == sorted(places)
    assert page.count('<svg xmlns="http://www.w3.org/2000/svg" class="scores"') == 3


def test_page_of_scores_alone() -> None:
    page = html_report(replace(made_summary(), rungs=(), scores=made_scores()))
    assert "no candidate has been evaluated yet" in page
    assert 'class="scores"' in page
    assert 'class="pareto"' not in page
    parser = Balance()
    parser.feed(page)
    assert not parser.open


def test_page_of_one_other_method_alone() -> None:
    scores = ScoreFiles(others=made_scores().others[:1])
    page = html_report(replace(made_summary(), rungs=(), scores=scores))
    assert "by 1 other method<" in page
    assert "Highest heads by attribution" in page


def test_cards_keep_to_the_main_metrics_and_tell_the_others_on_hover() -> None:
    summary = made_summary()
    more = dict.fromkeys(("copying_nll", "copying_match", "labels_nll", "labels_match", "x"), 0.25)
    rung = summary.last
    wide = replace(
        rung,
        candidates=tuple(replace(c, metrics={**c.metrics, **more}) for c in rung.candidates),
    )
    page = html_report(replace(summary, rungs=(wide,)))
    card = page[page.index('class="card"') :].split("<svg")[0]
    assert "copying_nll" in card.split("</h3><p ")[1].split(">")[0]
    assert "copying_nll <b>" not in card


def test_a_front_that_constraints_leave_empty_is_said_in_its_place() -> None:
    summary = made_summary()
    rung = summary.last
    bare = tuple(replace(c, on_front=False, feasible=False) for c in rung.candidates)
    unmet = "no head map meets search.constraints: kl at most 0 <b>"
    page = html_report(
        replace(summary, rungs=(replace(rung, candidates=bare),), met=("kl",), unmet=unmet)
    )
    alarm = page.split('<p class="alarm">')[1].split("</p>")[0]
    assert alarm == f"The front is empty: {unmet.removesuffix('<b>')}&lt;b&gt;."
    met = html_report(replace(summary, met=("kl at most 0.5 met by 7 of 12",)))
    assert "Constraints: kl at most 0.5 met by 7 of 12." in met.split("</p>")[0]
    assert 'class="alarm"' not in met
