"""What can be said of a head map without making a student of it; smaller means better, as with losses. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..config import CostConfig
from ..headmap import HeadMap
from ..search.ranking import Table
from ..search.space import analytic_costs

TWIN_ERROR = "twin error"
"""The table of what each twin leaves of its head's variance."""
FA_SHARE = "minus FA share"
CACHE = "minus cache bytes"


def sum_of(method: str) -> str:
    """What the sum of a table, such as a method's scores, over the replaced heads is called."""
    return f"sum of {method}"


def predictors_of(
    head_map: HeadMap, tables: Mapping[str, Table], cost: CostConfig
) -> dict[str, float]:
    """The sum of each table over the heads that lose full attention, and what the map keeps and takes.

    tables are [layers][heads] by name: scores, and errors of the twins. The sum of single-replacement KL is the map's KL
    if damages add up.
    """
    full = head_map.full_heads()
    replaced = [head for head in head_map.model.heads() if head not in full]
    found = {
        sum_of(name): math.fsum(table[layer][head] for layer, head in replaced)
        for name, table in tables.items()
    }
    costs = analytic_costs(head_map, cost)
    return {**found, FA_SHARE: -costs["fa_share"], CACHE: -costs["cache_bytes"]}
