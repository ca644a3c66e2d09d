"""Made-up runs for the tests of reports."""

from __future__ import annotations

import random
from dataclasses import replace

from archsearch.cost import cache_bytes
from archsearch.headmap import HeadMap, ModelShape
from archsearch.report.records import Candidate, Failure, Group, Objective, Rung, RunSummary

SHAPE = ModelShape("llama", 6, 4, 2, 16)
OBJECTIVES = (Objective("kl", minimize=True), Objective("cache_bytes", minimize=True))


def made_candidate(
    number: int, method: str, group: Group, head_map: HeadMap, kl: float
) -> Candidate:
    """A candidate with the metrics that reports read."""
    metrics = {
        "kl": kl,
        "niah_multikey_match": 0.5,
        "fa_share": head_map.fa_share,
        "cache_bytes": float(cache_bytes(head_map, 1024)),
    }
    return Candidate(number, method, group, head_map, metrics)


def made_rung(tokens: int = 0) -> Rung:
    """Two seeds, ten search points and ten random ones, some of them on the front."""
    rng = random.Random(0)
    heads = SHAPE.heads()

    def draw() -> HeadMap:
        return HeadMap.from_full_heads(SHAPE, rng.sample(heads, rng.randint(1, 20)))

    half = HeadMap.from_full_heads(SHAPE, heads[:12])
    candidates = [
        made_candidate(0, "all_full", "seed", HeadMap.from_full_heads(SHAPE, heads), 0.0),
        made_candidate(1, "causal", "seed", half, 0.4),
        *(made_candidate(i, "search", "search", draw(), rng.random()) for i in range(2, 12)),
        *(
            made_candidate(100 + i, "random-control", "random", draw(), rng.random() + 0.2)
            for i in range(10)
        ),
    ]
    front = {0, 2, 3, 4}
    return Rung(
        tokens,
        tuple(replace(c, on_front=c.candidate in front, proxy_tokens=tokens) for c in candidates),
        {"front": 0.8, "seeds": 0.7, "random": 0.6},
        (1.0, 1.0),
    )


def made_summary() -> RunSummary:
    """A run of two rungs with a failed trial."""
    return RunSummary(
        name="made-up",
        config={"teacher": {"source": "org/<model>"}},
        objectives=OBJECTIVES,
        rungs=(made_rung(), made_rung(4096)),
        failures=(Failure(9, "search", 0, "out of memory | <b>"),),
        stages=({"stage": "search", "seconds": 12.5, "peak_bytes": 2**31},),
    )
