"""The picture of a head map."""

from __future__ import annotations

from collections import Counter
from xml.etree import ElementTree

from archsearch.headmap import HeadMap, ModelShape, Operator
from archsearch.report.headmap_svg import COLOURS, OUTLINE, headmap_svg, legend_svg

SHAPE = ModelShape("llama", 2, 4, 2, 16)


def rectangles(svg: str, attribute: str) -> Counter[str | None]:
    root = ElementTree.fromstring(svg)
    return Counter(e.get(attribute) for e in root.iter() if e.tag.endswith("rect"))


def test_one_cell_a_head_in_its_operators_colour() -> None:
    head_map = HeadMap(SHAPE, ("FFGG", "GNNG"), (None, 8), (None, 4))
    fills = rectangles(headmap_svg(head_map), "fill")
    letters = Counter("".join(head_map.layers))
    for operator, colour in COLOURS.items():
        assert fills[colour] == letters[operator.value]


def test_outlines_the_kv_heads_that_are_cached_in_full() -> None:
    head_map = HeadMap(SHAPE, ("FGGG", "FGGF"))
    assert rectangles(headmap_svg(head_map), "stroke")[OUTLINE] == 3


def test_legend_names_the_operators_that_occur() -> None:
    legend = legend_svg(HeadMap.uniform(SHAPE, Operator.GDN))
    assert "Gated DeltaNet" in legend
    assert "native hybrid" not in legend
