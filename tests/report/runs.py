"""Made-up runs for the tests of reports."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from archsearch.cost import cache_bytes
from archsearch.headmap import HeadMap, ModelShape
from archsearch.report.records import Candidate, Failure, Group, Objective, Rung, RunSummary
from archsearch.report.score_records import ScoreFiles, scores_from_json, similarity_from_json

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
            made_candidate(i, "random-control", "random", draw(), rng.random() + 0.2)
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


def score_data(shape: ModelShape = SHAPE, method: str = "causal", seed: int = 0) -> dict[str, Any]:
    """The data of a scores file with every part that one may have; some values are negative."""
    rng = random.Random(seed)

    def draw(width: int = shape.num_heads) -> list[list[float]]:
        return [[rng.uniform(-0.1, 1) for _ in range(width)] for _ in range(shape.num_layers)]

    def capability(probes: tuple[str, ...]) -> dict[str, Any]:
        names = ("recv", "send", "consistency", "score", "recv_spread", "send_spread")
        counts = {probe: {"kept": 6, "drawn": 8} for probe in probes}
        return {**{name: draw() for name in names}, "probes": counts}

    return {
        "schema": 1,
        "method": method,
        "composite": draw(),
        "spread": draw(),
        "groups": draw(shape.num_kv_heads),
        "capabilities": {
            "retrieval": capability(("single", "multikey")),
            "general": capability(("copying",)),
        },
    }


def old_score_data(shape: ModelShape = SHAPE) -> dict[str, Any]:
    """The data of a scores file as the first ones were: without scores, spreads, groups and counts."""
    data = score_data(shape)
    del data["groups"]
    data["spread"] = [[0.0] * shape.num_heads for _ in range(shape.num_layers)]
    for name, capability in data["capabilities"].items():
        kept = {key: capability[key] for key in ("recv", "consistency")}
        data["capabilities"][name] = {**kept, "send": None}
    return data


def similarity_data(shape: ModelShape = SHAPE, seed: int = 0) -> dict[str, Any]:
    """The data of a similarity file; heads are less alike than layers."""
    rng = random.Random(seed)

    def table(size: int, low: float, high: float) -> list[list[float]]:
        drawn = [[rng.uniform(low, high) for _ in range(size)] for _ in range(size)]
        return [
            [1.0 if a == b else drawn[min(a, b)][max(a, b)] for b in range(size)]
            for a in range(size)
        ]

    return {
        "schema": 1,
        "blocks": table(shape.num_layers, 0.6, 0.9),
        "heads": [table(shape.num_heads, -0.1, 0.4) for _ in range(shape.num_layers)],
    }


def made_scores() -> ScoreFiles:
    """Causal scores, two other methods and the similarity of layers."""
    return ScoreFiles(
        scores_from_json(score_data(), SHAPE),
        tuple(
            scores_from_json(score_data(method=method), SHAPE)
            for method in ("attribution", "replacement_kl")
        ),
        similarity_from_json(similarity_data(), SHAPE),
        {"retrieval": {"single": {"kept": 6, "drawn": 8}}},
    )
