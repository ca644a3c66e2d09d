"""Head maps: what they say of heads and KV heads, and their JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from archsearch.headmap import HeadMap, ModelShape, Operator

SHAPE = ModelShape("llama", num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, revision="abc")
MIXED = HeadMap(SHAPE, ("FGGNGG", "GGGGGF"), window=(4, None), slots=(3, None))


def test_json_round_trip(tmp_path: Path) -> None:
    assert HeadMap.from_json(json.loads(json.dumps(MIXED.to_json()))) == MIXED
    MIXED.save(tmp_path / "map.json")
    assert HeadMap.load(tmp_path / "map.json") == MIXED
    assert MIXED.to_json()["schema"] == 1
    assert MIXED.to_json()["layers"] == ["FGGNGG", "GGGGGF"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": 2}, "schema 2 is not 1"),
        ({"layers": ["FGGNGG"]}, "layers has 1 entries"),
        ({"layers": ["FGGNGG", "GGGGGX"]}, "layer 1 is 'GGGGGX'"),
        ({"window": [None, None]}, "positive window and slots"),
        ({"model": {"family": "llama"}}, "malformed"),
    ],
)
def test_a_malformed_map_is_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        HeadMap.from_json({**MIXED.to_json(), **change})


def test_heads_and_kv_heads() -> None:
    assert MIXED.heads(0, Operator.GDN) == (1, 2, 4, 5)
    assert MIXED.kv_heads(0, Operator.FULL) == (0,)
    assert MIXED.kv_heads(0, Operator.NHA) == (1,)
    assert MIXED.kv_heads(1, Operator.FULL) == (1,)
    assert MIXED.full_heads() == {(0, 0), (1, 5)}
    assert MIXED.fa_share == pytest.approx(2 / 12)


def test_maps_from_heads() -> None:
    made = HeadMap.from_full_heads(SHAPE, [(0, 0), (1, 5)])
    assert made.layers == ("FGGGGG", "GGGGGF")
    assert made.with_operator([(0, 0), (1, 5)], Operator.GDN) == HeadMap.uniform(
        SHAPE, Operator.GDN
    )
    with pytest.raises(ValueError, match="no heads"):
        HeadMap.from_full_heads(SHAPE, [(2, 0)])


def test_digests_tell_maps_apart() -> None:
    digests = {HeadMap.uniform(SHAPE, op, window=4, slots=3).digest for op in Operator}
    assert len({*digests, MIXED.digest}) == 4


def test_a_shape_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="no multiple"):
        ModelShape("llama", 2, 6, 4, 8)
    with pytest.raises(ValueError, match="head_dim must be positive"):
        ModelShape("llama", 2, 6, 2, 0)
    assert SHAPE.groups()[1] == ((0, 3), (0, 4), (0, 5))
