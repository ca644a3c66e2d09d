"""Head maps as rows of bits: one a head (`free`) or one a KV group (`groups`). Numpy only.

Shapes: P head maps, U units, G KV groups of all layers, L layers, H query heads of all layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...config import CostConfig
from ...cost import kv_cache_bytes, state_bytes
from ...headmap import HeadMap, ModelShape, Operator

Bits = NDArray[np.bool_]
Row = NDArray[np.float64]


class Units:
    """What is chosen as a whole: query heads, or KV groups with all their heads."""

    def __init__(self, shape: ModelShape, *, whole_groups: bool) -> None:
        self.shape = shape
        self.whole_groups = whole_groups
        self.heads_of_unit = shape.group_size if whole_groups else 1
        """Query heads of a unit; they lie side by side."""
        self.units_of_group = 1 if whole_groups else shape.group_size
        self.count = shape.total_heads // self.heads_of_unit
        self.units_of_layer = self.count // shape.num_layers
        self.num_groups = shape.num_layers * shape.num_kv_heads
        # Sums over a few neighbours are faster as products than along a short axis.
        self.group_UG: Row = np.eye(self.num_groups).repeat(self.units_of_group, axis=0)
        """1 where a unit belongs to a KV group."""
        self.layer_UL: Row = np.eye(shape.num_layers).repeat(self.units_of_layer, axis=0)
        """1 where a unit belongs to a layer."""

    def of_maps(self, maps: Sequence[HeadMap]) -> Row:
        """Share of each unit's heads that are full attention, [P, U]."""
        if not maps:
            return np.zeros((0, self.count))
        return np.stack([self._of_map(head_map) for head_map in maps])

    def _of_map(self, head_map: HeadMap) -> Row:
        text = "".join(head_map.layers)
        full = np.frombuffer(text.encode("ascii"), dtype=np.uint8) == ord(Operator.FULL)
        shares: Row = full.reshape(self.count, -1).mean(axis=1)
        return shares

    @staticmethod
    def key(shares_U: Row) -> bytes | None:
        """What tells the map from others that are bits; None where a unit is partly full attention."""
        whole = ((shares_U == 0) | (shares_U == 1)).all()
        return (shares_U > 0.5).tobytes() if whole else None

    def to_map(self, full_U: Bits) -> HeadMap:
        """The head map of one row."""
        letters = np.where(np.repeat(full_U, self.heads_of_unit), Operator.FULL, Operator.GDN)
        width = self.shape.num_heads
        text = "".join(letters.tolist())
        rows = tuple(text[start : start + width] for start in range(0, len(text), width))
        return HeadMap(self.shape, rows)

    def of_table(self, table: Sequence[Sequence[float]]) -> Row:
        """A number a head, [layers][heads], added up over each unit's heads, [U]."""
        sums: Row = np.array(table, dtype=np.float64).reshape(self.count, -1).sum(axis=1)
        return sums

    def groups_PG(self, full_PU: Bits) -> Bits:
        """Which KV groups have a full-attention head."""
        parts = full_PU.reshape(len(full_PU), self.num_groups, self.units_of_group)
        found: Bits = parts[:, :, 0].copy()
        for place in range(1, self.units_of_group):
            found |= parts[:, :, place]
        return found


class Costs:
    """The metrics that follow from a map alone, for many maps at once; the same numbers as space.analytic_costs."""

    def __init__(self, units: Units, cost: CostConfig) -> None:
        self._units = units
        shape = units.shape
        one = HeadMap.from_full_heads(shape, [(0, 0)])
        self._kv_bytes = kv_cache_bytes(one, cost.context, element_bytes=cost.element_bytes)
        self._state_bytes = state_bytes(HeadMap.uniform(shape, Operator.GDN)) // shape.total_heads

    def of(self, full_PU: Bits) -> dict[str, Row]:
        """Costs by metric, [P] each."""
        total = self._units.shape.total_heads
        heads_P = full_PU.sum(axis=1) * self._units.heads_of_unit
        groups_P = self._units.groups_PG(full_PU).sum(axis=1)
        stored_P = groups_P * self._kv_bytes + (total - heads_P) * self._state_bytes
        return {"fa_share": heads_P / total, "cache_bytes": stored_P.astype(np.float64)}
