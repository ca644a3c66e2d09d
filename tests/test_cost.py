"""Costs of head maps, counted by hand."""

from __future__ import annotations

from archsearch.cost import attention_flops, cache_bytes, kv_cache_bytes, state_bytes
from archsearch.headmap import HeadMap, ModelShape, Operator

SHAPE = ModelShape("qwen3", num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)


def full(*heads: tuple[int, int]) -> HeadMap:
    return HeadMap.from_full_heads(SHAPE, heads)


def test_one_query_head_keeps_the_cache_of_its_whole_group() -> None:
    one_kv_head = 2 * 100 * 8 * 2
    assert kv_cache_bytes(full((0, 0)), 100) == one_kv_head
    assert kv_cache_bytes(full((0, 0), (0, 1)), 100) == one_kv_head
    assert kv_cache_bytes(full((0, 0), (0, 2)), 100) == 2 * one_kv_head
    assert kv_cache_bytes(full((0, 0)), 100, element_bytes=4) == 2 * one_kv_head


def test_state_is_kept_in_fp32_for_every_gdn_head() -> None:
    assert state_bytes(full((0, 0))) == 7 * 8 * 8 * 4
    assert cache_bytes(full((0, 0)), 100) == 2 * 100 * 8 * 2 + 7 * 8 * 8 * 4


def test_nha_heads_keep_a_window_and_slots_a_kv_head() -> None:
    nha = HeadMap(SHAPE, ("NNGG", "GGGG"), window=(16, None), slots=(5, None))
    assert kv_cache_bytes(nha, 100) == 2 * 16 * 8 * 2
    assert kv_cache_bytes(nha, 10) == 2 * 10 * 8 * 2
    assert state_bytes(nha) == (6 * 8 * 8 + 2 * 5 * 8) * 4
    shared = HeadMap(SHAPE, ("FNGG", "GGGG"), window=(16, None), slots=(5, None))
    assert kv_cache_bytes(shared, 100) == 2 * 100 * 8 * 2


def test_flops_of_attention_grow_with_the_square_of_the_context_for_fa_heads_only() -> None:
    everywhere = HeadMap.uniform(SHAPE, Operator.FULL)
    nowhere = HeadMap.uniform(SHAPE, Operator.GDN)
    assert attention_flops(everywhere, 200) == 8 * 2 * 200 * 200 * 8
    assert attention_flops(nowhere, 256) == 2 * attention_flops(nowhere, 128)
