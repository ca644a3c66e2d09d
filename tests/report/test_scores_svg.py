"""The picture of head scores."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from archsearch.headmap import ModelShape
from archsearch.report.scales import RAMP
from archsearch.report.score_records import Scores, scores_from_json
from archsearch.report.scores_svg import (
    MAX_WIDTH,
    effect_text,
    head_text,
    method_svg,
    scores_svg,
    value_text,
)

from .runs import SHAPE, old_score_data, score_data

Element = ElementTree.Element
SHAPES = [
    SHAPE,
    ModelShape("qwen3", 6, 8, 4, 16),
    ModelShape("llama", 30, 9, 3, 64),
    ModelShape("qwen3", 28, 16, 8, 128),
    ModelShape("llama", 2, 3, 3, 16),
    ModelShape("llama", 80, 8, 1, 16),
]


def made(shape: ModelShape = SHAPE) -> Scores:
    return scores_from_json(score_data(shape), shape)


def having(root: Element, name: str) -> list[Element]:
    return [e for e in root.iter() if e.get("class") == name]


def panels(svg: str) -> dict[str, Element]:
    """The panels by their titles."""
    return {next(text_of(p)): p for p in having(ElementTree.fromstring(svg), "panel")}


def text_of(element: Element) -> Iterator[str]:
    return (text for text in element.itertext() if text)


def place(cell: Element) -> tuple[float, float]:
    return float(cell.get("x", "")), float(cell.get("y", ""))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_head_is_in_every_panel_once(shape: ModelShape) -> None:
    found = panels(scores_svg(made(shape)))
    assert list(found) == ["composite", "retrieval", "general"]
    for panel in found.values():
        cells = having(panel, "head")
        titles = ["".join(cell.itertext()) for cell in cells]
        places = {tuple(title.split("\n")[0].split(", ")[:2]) for title in titles}
        assert places == {(f"layer {layer}", f"head {head}") for layer, head in shape.heads()}
        assert len(cells) == len({place(cell) for cell in cells}) == shape.total_heads
        assert len(having(panel, "kv-line")) == shape.num_kv_heads - 1
    assert len(having(found["composite"], "group")) == shape.num_layers * shape.num_kv_heads
    assert not having(found["general"], "group")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_everything_lies_inside_and_no_wider_than_a_page(shape: ModelShape) -> None:
    root = ElementTree.fromstring(scores_svg(made(shape)))
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    assert width <= MAX_WIDTH + 16
    for group in root:
        if "translate" not in group.get("transform", ""):
            continue
        dx, dy = (float(v) for v in group.get("transform", "")[10:-1].split(","))
        for cell in (e for e in group.iter() if e.tag.endswith("rect")):
            assert dx + float(cell.get("x", "")) + float(cell.get("width", "")) <= width
            assert dy + float(cell.get("y", "")) + float(cell.get("height", "")) <= height


def test_bands_label_each_kv_group_and_alternate() -> None:
    panel = panels(scores_svg(made()))["retrieval"]
    assert [text for text in text_of(panel) if text.startswith("kv")] == ["kv0", "kv1"]
    first, second = (band.get("fill") for band in having(panel, "band"))
    assert first != second


def test_heads_of_two_groups_stand_further_apart_than_those_of_one() -> None:
    panel = panels(scores_svg(made()))["retrieval"]
    ys = sorted({place(cell)[1] for cell in having(panel, "head")})
    steps = [b - a for a, b in pairwise(ys)]
    assert steps[0] == steps[2] < steps[1]


def test_the_highest_head_is_darkest_and_negative_ones_lightest() -> None:
    data = score_data()
    data["composite"] = [[-0.2, 0.0, 0.25, 0.5], *[[0.0, 0.0, 0.0, 0.0]] * 4, [0, 0, 0, 1.0]]
    panel = panels(method_svg(scores_from_json(data, SHAPE)))["causal score"]
    fills = [cell.get("fill") for cell in having(panel, "head")]
    assert fills[0] == fills[1] == RAMP[0]
    assert fills[-1] == RAMP[-1]
    assert len({*fills}) == 4


def test_hover_tells_all_that_is_known_of_a_head() -> None:
    data = score_data()
    data["capabilities"]["retrieval"]["recv"][5][3] = 0.125
    data["capabilities"]["retrieval"]["recv_spread"][5][3] = 0.01
    data["capabilities"]["retrieval"]["consistency"][5][3] = 0.75
    scores = scores_from_json(data, SHAPE)
    text = head_text(scores, 5, 3)
    assert text.startswith("layer 5, head 3, KV head 1\ncomposite ")
    assert "recv 0.125 ± 0.010, send " in text
    assert "consistency 0.750" in text
    titles = [
        "".join(c.itertext()) for c in having(ElementTree.fromstring(scores_svg(scores)), "head")
    ]
    assert text in titles


def test_names_from_outside_are_escaped() -> None:
    data = score_data(method="<b>&")
    data["capabilities"]["<i>"] = data["capabilities"].pop("general")
    scores = scores_from_json(data, SHAPE)
    assert "<i>" in panels(scores_svg(scores))
    assert "<b>&" in panels(method_svg(scores))


def test_old_files_are_drawn_by_receiver_effects() -> None:
    found = panels(scores_svg(scores_from_json(old_score_data(), SHAPE)))
    assert list(found) == ["composite", "retrieval", "general"]
    text = "".join(text_of(found["retrieval"]))
    assert "recv" in text
    assert "send" not in text
    assert "±" not in text
    assert not having(found["composite"], "group")


def test_a_capability_without_effects_has_no_panel() -> None:
    data = score_data()
    data["capabilities"]["general"] = {"consistency": data["capabilities"]["general"]["score"]}
    assert list(panels(scores_svg(scores_from_json(data, SHAPE)))) == ["composite", "retrieval"]


@pytest.mark.parametrize("value", [0.0, -1.0, 2.0])
def test_equal_scores_are_drawn(value: float) -> None:
    data = {"schema": 1, "method": "duo_gates", "composite": [[value] * 4] * 6}
    svg = method_svg(scores_from_json(data, SHAPE))
    assert len(having(panels(svg)["learned gates (DuoAttention)"], "head")) == 24
    assert "nan" not in svg


@pytest.mark.parametrize("value", [-0.0, -1e-5])
def test_a_zero_has_no_sign(value: float) -> None:
    assert effect_text([[value]], None, 0, 0) == "0.000"
    assert value_text([[-0.0]], None, 0, 0) == "0"
