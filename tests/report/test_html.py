"""The static page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from archsearch.report.html import html_report, plot_axes
from archsearch.report.records import Objective

from .runs import made_summary

VOID = {"meta", "br", "path", "rect"}


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
    return html_report(made_summary())


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
