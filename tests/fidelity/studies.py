"""Made-up studies: the truth is known, and proxies are it with more or less noise."""

from __future__ import annotations

from random import Random

from archsearch.fidelity.records import Group, Reading, Run, Settings, Study, Subject
from archsearch.headmap import HeadMap, ModelShape
from archsearch.search.space import random_map

SHAPE = ModelShape("qwen3", num_layers=6, num_heads=8, num_kv_heads=4, head_dim=16)
LENGTHS = (0, 100, 200, 1000)


def made_study(
    *, good: int = 10, mixed: int = 6, repeats: int = 4, noise: float = 0.0, seed: int = 0
) -> Study:
    """KL after all tokens is `truth`; at 0 tokens it is in reverse order, at 100 noisy, at 200 in the right order."""
    rng = Random(seed)
    subjects, runs = [], {}
    counts: list[tuple[Group, int]] = [("good", 6)] * good
    counts += [("mixed", 2 + 5 * number) for number in range(mixed)]
    for number, (group, count) in enumerate(counts):
        head_map, truth = random_map(SHAPE, rng, count, count), 2 - count / 48 + 0.01 * number
        known = {"sum of replacement_kl": truth + 0.2 * rng.random(), "minus FA share": -count / 48}
        subjects.append(Subject(f"map {number}", group, head_map, known))
        for again in range(2 if number < repeats else 1):
            long = truth + noise * rng.gauss(0, 1)
            runs[head_map.layers, again] = made_run(head_map, long, rng)
    return Study(SHAPE, Settings(LENGTHS, 0.2, 10), tuple(subjects), runs)


def made_run(head_map: HeadMap, truth: float, rng: Random) -> Run:
    """The readings of one map."""
    values = (1 / truth, truth + 0.05 * rng.random(), truth**3, truth)
    cost = 1000.0 * len(head_map.full_heads())
    readings = [
        Reading(
            tokens,
            {
                "kl": value,
                "top1_agreement": 1 / (1 + value),
                "niah_single_nll": 2 * value,
                "niah_single_match": 0.5,
                "fa_share": head_map.fa_share,
                "cache_bytes": cost,
            },
            None if tokens == 0 else value + 1,
            float(tokens),
        )
        for tokens, value in zip(LENGTHS, values, strict=True)
    ]
    return Run(tuple(readings), 12.0)
