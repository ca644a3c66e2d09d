"""The picture of how alike layers and heads are."""

from __future__ import annotations

import re
from statistics import fmean
from xml.etree import ElementTree

import pytest

from archsearch.headmap import ModelShape
from archsearch.report.score_records import Similarity, similarity_from_json
from archsearch.report.similarity_svg import head_spreads, similarity_caption, similarity_svg

from .runs import SHAPE, similarity_data


def count(svg: str, name: str) -> int:
    return sum(e.get("class") == name for e in ElementTree.fromstring(svg).iter())


@pytest.mark.parametrize("shape", [SHAPE, ModelShape("llama", 30, 9, 3, 64)], ids=str)
def test_every_two_layers_and_every_layers_heads_are_drawn(shape: ModelShape) -> None:
    svg = similarity_svg(similarity_from_json(similarity_data(shape), shape))
    assert count(svg, "pair") == shape.num_layers**2
    assert count(svg, "spread") == count(svg, "block") == shape.num_layers


def test_spreads_hold_each_pair_of_heads_once() -> None:
    data = similarity_data()
    data["heads"][2] = [[1, 2, 3, 4], [2, 1, 5, 6], [3, 5, 1, 7], [4, 6, 7, 1]]
    assert head_spreads(similarity_from_json(data, SHAPE))[2] == [2, 3, 4, 5, 6, 7]


def test_caption_gives_the_means() -> None:
    data = similarity_data()
    caption = similarity_caption(similarity_from_json(data, SHAPE))
    near = fmean(data["blocks"][layer][layer + 1] for layer in range(5))
    pairs = [t[a][b] for t in data["heads"] for a in range(4) for b in range(4) if a < b]
    numbers = [float(n) for n in re.findall(r"-?[0-9]\.[0-9]{2}", caption)]
    expected = [near, fmean(pairs), min(pairs), max(pairs)]
    assert numbers == [pytest.approx(value, abs=0.0051) for value in expected]
    assert "speaks for choosing head by head" in caption
    assert "compared: 1 is the same" in caption


def test_caption_names_the_measure_and_escapes_one_it_does_not_know() -> None:
    def made(measure: str) -> Similarity:
        return similarity_from_json({**similarity_data(), "measure": measure}, SHAPE)

    assert "compared by linear CKA:" in similarity_caption(made("cka"))
    texts = ElementTree.fromstring(similarity_svg(made("<new>"))).itertext()
    assert "compared by <new>:" in " ".join(texts)


@pytest.mark.parametrize(("heads", "clear"), [(0.1, True), (0.6, False), (0.95, False)])
def test_caption_draws_no_conclusion_that_the_numbers_do_not_bear(
    heads: float, clear: bool
) -> None:
    data = similarity_data()
    data["blocks"] = [[0.7] * 6] * 6
    data["heads"] = [[[heads] * 4] * 4] * 6
    assert ("speaks for" in similarity_caption(similarity_from_json(data, SHAPE))) is clear


def test_caption_writes_no_negative_zero() -> None:
    data = similarity_data()
    data["heads"] = [[[-0.001] * 4] * 4] * 6
    caption = similarity_caption(similarity_from_json(data, SHAPE))
    assert "have 0.00 on average (from 0.00 to 0.00)" in caption


def test_layers_alone() -> None:
    data = similarity_data()
    del data["heads"]
    found = similarity_from_json(data, SHAPE)
    svg = similarity_svg(found)
    assert count(svg, "pair") == 36
    assert count(svg, "spread") == 0
    assert "heads of the same layer" not in similarity_caption(found)


@pytest.mark.parametrize(
    "shape", [ModelShape("llama", 1, 2, 1, 4), ModelShape("llama", 3, 1, 1, 4)]
)
def test_the_smallest_models(shape: ModelShape) -> None:
    svg = similarity_svg(similarity_from_json(similarity_data(shape), shape))
    assert count(svg, "pair") == shape.num_layers**2
    assert "nan" not in svg
