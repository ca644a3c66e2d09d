"""Seeds: exactly as many full-attention heads as asked for, chosen by what the method names."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import get_args

import pytest

from archsearch.config import CostConfig, ScoreMethod, SearchConfig, SeedConfig, SeedMethod
from archsearch.cost import cache_bytes
from archsearch.errors import ConfigError
from archsearch.headmap import HeadMap, ModelShape, Operator
from archsearch.rundir import RunDir, score_file
from archsearch.search.seeds import (
    SELECTORS,
    UNIFORM,
    ScoreTables,
    Seed,
    most_seeds_of_search,
    needed_by_seeds,
    num_full_heads,
    ranks,
    read_scores,
    seed_maps,
    seeds_of_search,
    top_heads,
    within_share,
)

SHAPE = ModelShape("llama", num_layers=6, num_heads=9, num_kv_heads=3, head_dim=8)
SHARES = (0.5, 0.25, 0.125, 0.03)


def draw_table(seed: int, width: int = SHAPE.num_heads) -> list[list[float]]:
    rng = random.Random(seed)
    return [[rng.random() for _ in range(width)] for _ in range(SHAPE.num_layers)]


def tables(heads: list[list[float]], groups: list[list[float]] | None = None) -> ScoreTables:
    """Scores with groups of their own: those of a group need not follow from its heads'."""
    return ScoreTables(heads, groups or draw_table(99, SHAPE.num_kv_heads))


SCORES = {
    method: tables(draw_table(number), draw_table(100 + number, SHAPE.num_kv_heads))
    for number, method in enumerate(get_args(ScoreMethod))
}
BY_GROUP = {"duo_gates", *(name for name in SELECTORS if name.endswith("_groups"))}
BY_LAYER = {"restoration", "even_layers"}
BY_BYTES = {name for name in SELECTORS if name.endswith("_bytes")}
# Those that keep something else than the highest of one table.
OTHERS = {"program_groups", "program_both_groups", "causal_per_layer_groups", "random_groups"}
READS = {"blend": {"causal", "replacement_kl"}, "program": {"replacement_kl"}}
READS["program_both"] = {"replacement_kl", "replacement_nll"}


def seed_of(method: str, share: float, scores: dict[str, ScoreTables] = SCORES) -> frozenset:
    config = SeedConfig(methods=(method,), fa_shares=(share,))
    [seed] = seed_maps(SHAPE, scores, config, seed=0)
    assert seed.method == method
    return seed.head_map.full_heads()


def test_every_method_of_the_config_has_a_selector() -> None:
    assert set(get_args(SeedMethod)) == set(SELECTORS) | set(UNIFORM)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("method", sorted(set(SELECTORS) - BY_GROUP - BY_LAYER - BY_BYTES))
def test_seed_has_exactly_the_asked_number_of_full_heads(method: str, share: float) -> None:
    assert len(seed_of(method, share)) == num_full_heads(SHAPE, share)


@pytest.mark.parametrize(("share", "count"), [(0.5, 9), (0.25, 5), (0.125, 2), (0.03, 1)])
@pytest.mark.parametrize("method", sorted(BY_GROUP))
def test_groups_are_whole_and_the_best(method: str, share: float, count: int) -> None:
    full = seed_of(method, share)
    kept = [all(head in full for head in group) for group in SHAPE.groups()]
    assert len(full) == 3 * sum(kept) == 3 * count  # Whole groups and nothing else.
    if method in OTHERS:
        return
    values = [group_value(method, *group[0]) for group in SHAPE.groups()]
    inside = [value for value, is_kept in zip(values, kept, strict=True) if is_kept]
    outside = [value for value, is_kept in zip(values, kept, strict=True) if not is_kept]
    assert min(inside) >= max(outside)


def group_value(method: str, layer: int, head: int) -> float:
    """The group's score, or for a blend of scores its mean place among all groups."""
    found = []
    for name in SELECTORS[method].scores:
        table = SCORES[name].groups
        own = table[layer][head // 3]
        below = sum(value < own for row in table for value in row)
        found.append(float(below) if len(SELECTORS[method].scores) > 1 else own)
    return sum(found) / len(found)


@pytest.mark.parametrize(("share", "count"), [(0.5, 3), (0.25, 2), (0.125, 1), (0.03, 1)])
def test_restoration_takes_the_best_layers_whole(share: float, count: int) -> None:
    full = seed_of("restoration", share)
    sums = [sum(row) for row in SCORES["restoration"].heads]
    best = sorted(range(SHAPE.num_layers), key=lambda layer: -sums[layer])[:count]
    assert full == {(layer, head) for layer in best for head in range(SHAPE.num_heads)}


def test_a_seed_needs_the_scores_that_it_is_named_after() -> None:
    for method in get_args(SeedMethod):
        needed = needed_by_seeds(SeedConfig(methods=(method,)))
        base = method.removesuffix("_groups").removesuffix("_bytes").removesuffix("_per_layer")
        if base in ("all_full", "all_gdn", "even_layers", "random"):
            assert needed == set()
        else:
            assert needed == READS.get(base, {base})


def test_every_method_of_the_config_gives_maps_at_every_share() -> None:
    config = SeedConfig(methods=get_args(SeedMethod), fa_shares=SHARES)
    maps = seed_maps(SHAPE, SCORES, config, seed=0)
    named = [name for seed in maps for name in (seed.method, *seed.also)]
    for method in get_args(SeedMethod):
        assert 1 <= named.count(method) <= len(SHARES)


def test_scores_are_read_from_the_files_of_a_run(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for method in ("causal", "attribution"):
        data = {"composite": [[0.5]], "groups": [[0.25]], "method": method}
        run_dir.write_json(score_file(method), data)
    assert (tmp_path / "scores/attribution.json").exists()
    found = read_scores(run_dir, ("causal", "attribution"))
    assert found == dict.fromkeys(("causal", "attribution"), ScoreTables([[0.5]], [[0.25]]))
    (tmp_path / "scores.json").write_text(json.dumps({"composite": [[0.5]]}))
    with pytest.raises(ConfigError, match=r"scores\.json: damaged .*groups"):
        read_scores(run_dir, ("causal",))
    with pytest.raises(ConfigError, match=r"duo_gates\.json: missing"):
        read_scores(run_dir, ("duo_gates",))


@pytest.mark.parametrize(("share", "layers"), [(0.5, [1, 3, 5]), (0.25, [1, 4]), (0.03, [3])])
def test_even_layers_are_whole_and_evenly_spaced(share: float, layers: list[int]) -> None:
    full = seed_of("even_layers", share)
    assert full == {(layer, head) for layer in layers for head in range(SHAPE.num_heads)}


def test_uniform_methods_ignore_shares() -> None:
    config = SeedConfig(methods=("all_full", "all_gdn"), fa_shares=SHARES)
    maps = [seed.head_map for seed in seed_maps(SHAPE, {}, config, seed=0)]
    assert [head_map.fa_share for head_map in maps] == [1.0, 0.0]


@pytest.mark.parametrize("method", sorted(set(get_args(ScoreMethod)) - BY_GROUP - BY_LAYER))
def test_ranked_methods_keep_the_highest_scores(method: str) -> None:
    full, table = seed_of(method, 0.25), SCORES[method].heads
    kept = [table[layer][head] for layer, head in full]
    rest = [table[layer][head] for layer, head in set(SHAPE.heads()) - full]
    assert min(kept) > max(rest)


def test_causal_per_layer_keeps_a_head_in_each_layer() -> None:
    by_layer = [[float(10 - layer)] * SHAPE.num_heads for layer in range(SHAPE.num_layers)]
    scores = {"causal": tables(by_layer)}
    assert {layer for layer, _ in seed_of("causal", 0.25, scores)} == {0, 1}
    full = seed_of("causal_per_layer", 0.25, scores)
    assert {layer for layer, _ in full} == set(range(SHAPE.num_layers))
    assert len(full) == num_full_heads(SHAPE, 0.25)


def test_causal_per_layer_with_fewer_heads_than_layers_takes_the_best_layers() -> None:
    table = [[float(layer)] * SHAPE.num_heads for layer in range(SHAPE.num_layers)]
    assert seed_of("causal_per_layer", 0.03, {"causal": tables(table)}) == {(5, 0), (4, 0)}


def test_causal_per_layer_groups_keeps_a_group_in_each_layer() -> None:
    groups = [[float(10 - layer), 0.0, 1.0] for layer in range(SHAPE.num_layers)]
    scores = {"causal": tables(SCORES["causal"].heads, groups)}
    full = seed_of("causal_per_layer_groups", 0.5, scores)
    firsts = {(layer, head) for layer in range(SHAPE.num_layers) for head in range(3)}
    assert firsts < full
    assert {head for _, head in full - firsts} == {6, 7, 8}


def sums_of_groups(heads: list[list[float]]) -> list[list[float]]:
    return [[sum(row[3 * g : 3 * g + 3]) for g in range(3)] for row in heads]


def test_program_without_interaction_is_the_top_of_the_list() -> None:
    heads = SCORES["replacement_kl"].heads
    scores = {"replacement_kl": tables(heads, sums_of_groups(heads))}
    assert seed_of("program", 0.25, scores) == seed_of("replacement_kl", 0.25, scores)
    whole = seed_of("replacement_kl_groups", 0.25, scores)
    assert seed_of("program_groups", 0.25, scores) == whole


def test_program_saves_the_group_that_is_worse_than_its_heads() -> None:
    heads = [[0.1] * SHAPE.num_heads for _ in range(SHAPE.num_layers)]
    heads[2] = [0.11] * SHAPE.num_heads
    groups = sums_of_groups(heads)
    groups[4][1] = 5.0
    full = seed_of("program", 0.03, {"replacement_kl": tables(heads, groups)})
    assert len(full) == num_full_heads(SHAPE, 0.03) == 2
    # One head of it is enough; the other goes where heads alone count most.
    assert sorted(layer for layer, _ in full) == [2, 4]


def test_both_damages_count_by_their_share_of_all() -> None:
    kl, nll = ([[0.0] * SHAPE.num_heads for _ in range(SHAPE.num_layers)] for _ in range(2))
    kl[0], nll[1][2], nll[3][4] = [2e-4] * 9, 30.0, 20.0
    scores = {
        "replacement_kl": tables(kl, sums_of_groups(kl)),
        "replacement_nll": tables(nll, sums_of_groups(nll)),
    }
    assert seed_of("program_both", 0.03, scores) == {(1, 2), (3, 4)}


@pytest.mark.parametrize("context", [64, 4096])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("method", sorted(BY_BYTES))
def test_programs_of_bytes_cost_no_more_than_evenly_spaced_layers(
    method: str, share: float, context: int
) -> None:
    heads = {name: SCORES[name].heads for name in SELECTORS[method].scores}
    scores = {name: tables(table, sums_of_groups(table)) for name, table in heads.items()}

    def bytes_and_damage(name: SeedMethod) -> tuple[int, float]:
        config = SeedConfig(methods=(name,), fa_shares=(share,))
        [seed] = seed_maps(SHAPE, scores, config, seed=0, cost=CostConfig(context=context))
        gone = set(SHAPE.heads()) - seed.head_map.full_heads()
        totals = [sum(map(sum, table)) for table in heads.values()]
        lost = [sum(table[layer][head] for layer, head in gone) for table in heads.values()]
        shares = [part / total for part, total in zip(lost, totals, strict=True)]
        return cache_bytes(seed.head_map, context), sum(shares)

    own, layers = bytes_and_damage(method), bytes_and_damage("even_layers")
    assert own[0] <= layers[0]
    assert own[1] < layers[1]


def test_random_groups_differ_by_number_and_share() -> None:
    config = SeedConfig(methods=("random_groups",), fa_shares=(0.25, 0.5), random_maps=3)
    maps = [seed.head_map for seed in seed_maps(SHAPE, {}, config, seed=0)]
    assert len(set(maps)) == len(maps) == 6


def test_blend_of_equal_tables_is_the_table() -> None:
    same = {"causal": SCORES["causal"], "replacement_kl": SCORES["causal"]}
    assert seed_of("blend", 0.25, same) == seed_of("causal", 0.25)


def test_blend_is_blind_to_the_scale_of_a_table() -> None:
    damage = SCORES["replacement_kl"]
    heads, groups = (
        [[1e6 * value**3 for value in row] for row in table]
        for table in (damage.heads, damage.groups)
    )
    scores = SCORES | {"replacement_kl": ScoreTables(heads, groups)}
    for method in ("blend", "blend_groups"):
        assert seed_of(method, 0.25) == seed_of(method, 0.25, scores)


def test_random_depends_on_seed_and_nothing_else() -> None:
    config = SeedConfig(methods=("random",), fa_shares=(0.25,))
    draws = [seed_maps(SHAPE, {}, config, seed)[0].head_map for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_a_map_that_two_methods_choose_appears_once_with_both_names() -> None:
    scores = {"causal": SCORES["causal"], "replacement_kl": SCORES["causal"]}
    config = SeedConfig(methods=("causal", "replacement_kl", "blend"), fa_shares=(0.25,))
    [seed] = seed_maps(SHAPE, scores, config, seed=0)
    assert (seed.method, seed.also) == ("causal", ("replacement_kl", "blend"))


def test_maps_use_full_attention_and_gdn_only() -> None:
    for seed in seed_maps(SHAPE, SCORES, SeedConfig(), seed=0):
        assert set("".join(seed.head_map.layers)) <= {Operator.FULL.value, Operator.GDN.value}


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ({}, "no causal scores"),
        ({"causal": tables([[0.0] * 9] * 5)}, "not 6 x 9"),
        ({"causal": tables([[0.0] * 9] * 6, [[0.0] * 9] * 6)}, "group scores are not 6 x 3"),
        ({"causal": tables([[float("nan")] * 9] * 6)}, "not finite"),
    ],
)
def test_unusable_scores_are_refused(scores: dict[str, ScoreTables], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        seed_maps(SHAPE, scores, SeedConfig(methods=("causal",)), seed=0)


def test_tied_heads_spread_over_the_layers() -> None:
    flat = [[0.0] * SHAPE.num_heads for _ in range(SHAPE.num_layers)]
    assert {layer for layer, _ in top_heads(flat, SHAPE.num_layers)} == set(range(SHAPE.num_layers))


def test_tied_heads_share_their_mean_rank() -> None:
    assert ranks([[3.0, 1.0], [1.0, 2.0]]) == {(0, 0): 3.0, (0, 1): 0.5, (1, 0): 0.5, (1, 1): 2.0}


def search_seeds(trials: int, **seeds: object) -> list[Seed]:
    config = SearchConfig.model_validate({"trials": trials, "seeds": seeds})
    return seeds_of_search(SHAPE, SCORES, config, seed=0)


def names_of(seeds: list[Seed]) -> set[str]:
    return {name for seed in seeds for name in (seed.method, *seed.also)}


def test_every_selector_that_has_scores_is_a_seed_where_there_is_room() -> None:
    asked: dict[str, object] = {"methods": ["all_full", "causal"], "fa_shares": [0.5, 0.25]}
    assert names_of(search_seeds(1000, **asked)) == set(SELECTORS) | {"all_full"}
    only = {**asked, "every_selector": False}
    assert names_of(search_seeds(1000, **only)) == {"all_full", "causal"}
    two = SearchConfig.model_validate({"trials": 1000, "seeds": asked})
    some = seeds_of_search(SHAPE, {"causal": SCORES["causal"]}, two, seed=0)
    assert "program" not in names_of(some)
    assert {"causal_groups", "even_layers"} <= names_of(some)


def test_half_of_the_trials_are_left_to_the_sampler_but_what_is_named_is_kept() -> None:
    named: dict[str, object] = {"methods": ["causal", "even_layers"], "fa_shares": [0.5, 0.25]}
    seeds = search_seeds(20, **named)
    assert len(seeds) == 10
    assert {seed.method for seed in seeds[:4]} == {"causal", "even_layers"}
    assert [seed.method for seed in seeds[4:6]] == ["program", "program"]
    assert [seed.method for seed in search_seeds(6, **named)] == [s.method for s in seeds[:4]]


@pytest.mark.parametrize("trials", [6, 20, 41, 1000])
def test_seeds_are_never_more_than_foretold(trials: int) -> None:
    asked = {"methods": ["all_full", "causal", "random"], "fa_shares": [0.5], "random_maps": 3}
    config = SearchConfig.model_validate({"trials": trials, "seeds": asked})
    for scored in (SCORES, {"causal": SCORES["causal"]}):
        most = most_seeds_of_search(config, scored.keys())
        assert 5 <= len(seeds_of_search(SHAPE, scored, config, seed=0)) <= most
        assert most <= max(5, trials // 2)


@pytest.mark.parametrize("share", [0.03, 0.125, 0.25, 1.0])
def test_a_share_allows_as_many_heads_as_its_seeds_have(share: float) -> None:
    heads = [(layer, head) for layer in range(SHAPE.num_layers) for head in range(SHAPE.num_heads)]
    most = num_full_heads(SHAPE, share)
    assert within_share(HeadMap.from_full_heads(SHAPE, heads[:most]), share)
    if share < 1:
        assert not within_share(HeadMap.from_full_heads(SHAPE, heads[: most + 1]), share)
        assert not within_share(HeadMap.from_full_heads(SHAPE, heads[:1]), 0.0)
    assert within_share(HeadMap.from_full_heads(SHAPE, []), 0.0)
