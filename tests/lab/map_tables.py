"""A table of head maps of a small shape, with made-up figures that are no sums over heads."""

from __future__ import annotations

import numpy as np

from archsearch.config import CostConfig
from archsearch.headmap import ModelShape
from archsearch.lab.map_list import FAMILIES, draw_maps, head_map_of
from archsearch.lab.map_table import MADE_BY, MapTable, digest_of
from archsearch.metrics import COSTS
from archsearch.search.seeds import ScoreTables
from archsearch.search.space import analytic_costs

SHAPE = ModelShape("qwen3", num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16)
METHODS = ("causal", "replacement_kl", "replacement_nll")
COLUMNS = ("kl", "top1_agreement", "niah_single_nll", "niah_single_token_match")
COLUMNS += ("niah_single_match", *COSTS)


def random_scores(seed: int) -> dict[str, ScoreTables]:
    """A score a head and a group, by method."""
    draw = np.random.default_rng(seed)
    return {
        name: ScoreTables(draw.random((4, 4)).tolist(), draw.random((4, 2)).tolist())
        for name in METHODS
    }


def made_up_table(count: int, seed: int) -> MapTable:
    """Maps of the list and figures that fall with the heads kept, layers that have none left twice as bad."""
    scores = random_scores(seed)
    maps = draw_maps(SHAPE, scores, count, seed)
    lost_NLH = ~maps.full_NLH
    damage_LH = np.array(scores["replacement_kl"].heads)
    kl_NL = (lost_NLH * damage_LH).sum(2) * (1 + lost_NLH.all(2))
    kl_N = 0.01 * kl_NL.sum(1) ** 1.5
    nll_N = 0.05 + (lost_NLH * np.array(scores["replacement_nll"].heads)).sum((1, 2)) ** 2 / 20
    costs = [analytic_costs(head_map_of(SHAPE, full), CostConfig()) for full in maps.full_NLH]
    columns = [kl_N, np.exp(-kl_N), nll_N, np.exp(-nll_N), np.exp(-2 * nll_N)]
    columns += [np.array([cost[name] for cost in costs]) for name in COSTS]
    facts = {
        "model": vars(SHAPE),
        "cost": CostConfig().model_dump(),
        "families": list(FAMILIES),
        "prompts": {"kinds": ["single"]},
        "scores": {name: digest_of(repr(scores[name]).encode()) for name in METHODS},
        MADE_BY: [],
    }
    values_NK = np.stack(columns, axis=1).astype(np.float32)
    indices_N = np.arange(count, dtype=np.int32)
    return MapTable(maps.full_NLH, indices_N, maps.family_N, values_NK, COLUMNS, facts)
