"""Seeds: exactly as many full-attention heads as asked for, chosen by what the method names."""

from __future__ import annotations

import random
from typing import get_args

import pytest

from archsearch.config import SeedConfig, SeedMethod
from archsearch.headmap import ModelShape, Operator
from archsearch.search.seeds import SELECTORS, UNIFORM, num_full_heads, ranks, seed_maps, top_heads

SHAPE = ModelShape("llama", num_layers=6, num_heads=9, num_kv_heads=3, head_dim=8)
SHARES = (0.5, 0.25, 0.125, 0.03)


def draw_table(seed: int, shape: ModelShape = SHAPE) -> list[list[float]]:
    rng = random.Random(seed)
    return [[rng.random() for _ in range(shape.num_heads)] for _ in range(shape.num_layers)]


SCORES = {"causal": draw_table(1), "replacement_kl": draw_table(2)}


def seed_of(method: str, share: float, scores: dict[str, list[list[float]]] = SCORES) -> frozenset:
    config = SeedConfig(methods=(method,), fa_shares=(share,))
    [seed] = seed_maps(SHAPE, scores, config, seed=0)
    assert seed.method == method
    return seed.head_map.full_heads()


def test_every_method_of_the_config_has_a_selector() -> None:
    assert set(get_args(SeedMethod)) == set(SELECTORS) | set(UNIFORM)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("method", sorted(set(SELECTORS) - {"even_layers"}))
def test_seed_has_exactly_the_asked_number_of_full_heads(method: str, share: float) -> None:
    assert len(seed_of(method, share)) == num_full_heads(SHAPE, share)


@pytest.mark.parametrize(("share", "layers"), [(0.5, [1, 3, 5]), (0.25, [1, 4]), (0.03, [3])])
def test_even_layers_are_whole_and_evenly_spaced(share: float, layers: list[int]) -> None:
    full = seed_of("even_layers", share)
    assert full == {(layer, head) for layer in layers for head in range(SHAPE.num_heads)}


def test_uniform_methods_ignore_shares() -> None:
    config = SeedConfig(methods=("all_full", "all_gdn"), fa_shares=SHARES)
    maps = [seed.head_map for seed in seed_maps(SHAPE, {}, config, seed=0)]
    assert [head_map.fa_share for head_map in maps] == [1.0, 0.0]


@pytest.mark.parametrize("method", ["causal", "replacement_kl"])
def test_ranked_methods_keep_the_highest_scores(method: str) -> None:
    full = seed_of(method, 0.25)
    kept = [SCORES[method][layer][head] for layer, head in full]
    rest = [SCORES[method][layer][head] for layer, head in set(SHAPE.heads()) - full]
    assert min(kept) > max(rest)


def test_causal_per_layer_keeps_a_head_in_each_layer() -> None:
    by_layer = [[float(10 - layer)] * SHAPE.num_heads for layer in range(SHAPE.num_layers)]
    scores = {"causal": by_layer}
    assert {layer for layer, _ in seed_of("causal", 0.25, scores)} == {0, 1}
    full = seed_of("causal_per_layer", 0.25, scores)
    assert {layer for layer, _ in full} == set(range(SHAPE.num_layers))
    assert len(full) == num_full_heads(SHAPE, 0.25)


def test_causal_per_layer_with_fewer_heads_than_layers_takes_the_best_layers() -> None:
    table = [[float(layer)] * SHAPE.num_heads for layer in range(SHAPE.num_layers)]
    assert seed_of("causal_per_layer", 0.03, {"causal": table}) == {(5, 0), (4, 0)}


def test_blend_of_equal_tables_is_the_table() -> None:
    same = {"causal": SCORES["causal"], "replacement_kl": SCORES["causal"]}
    assert seed_of("blend", 0.25, same) == seed_of("causal", 0.25)


def test_blend_is_blind_to_the_scale_of_a_table() -> None:
    scaled = [[1e6 * value**3 for value in row] for row in SCORES["replacement_kl"]]
    assert seed_of("blend", 0.25) == seed_of("blend", 0.25, SCORES | {"replacement_kl": scaled})


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
        ({"causal": [[0.0] * 9] * 5}, "not 6 x 9"),
        ({"causal": [[float("nan")] * 9] * 6}, "not finite"),
    ],
)
def test_unusable_scores_are_refused(scores: dict[str, list[list[float]]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        seed_maps(SHAPE, scores, SeedConfig(methods=("causal",)), seed=0)


def test_tied_heads_spread_over_the_layers() -> None:
    flat = [[0.0] * SHAPE.num_heads for _ in range(SHAPE.num_layers)]
    assert {layer for layer, _ in top_heads(flat, SHAPE.num_layers)} == set(range(SHAPE.num_layers))


def test_tied_heads_share_their_mean_rank() -> None:
    assert ranks([[3.0, 1.0], [1.0, 2.0]]) == {(0, 0): 3.0, (0, 1): 0.5, (1, 0): 0.5, (1, 1): 2.0}
