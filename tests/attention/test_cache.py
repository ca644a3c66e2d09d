"""What the cache holds is what the cost model prices."""

from __future__ import annotations

import pytest
import torch

from archsearch.attention.modeling_hydrahead import (
    CACHE_FIELD,
    HydraHeadConfig,
    HydraHeadForCausalLM,
)
from archsearch.cost import cache_bytes
from archsearch.headmap import HeadMap, ModelShape

SHAPE = ModelShape("qwen3", 3, 4, 2, 8)
MAPS = {
    "full": ("FFFF", "FFFF", "FFFF"),
    "gdn": ("GGGG", "GGGG", "GGGG"),
    "one head keeps its KV head": ("FGGG", "GGGF", "GGGG"),
    "both KV heads": ("FGGF", "GFFG", "FFGG"),
    "windows": ("NNNN", "NNGG", "GGGN"),
    "all three": ("FFNN", "GGNG", "FGNN"),
    "FA and NHA share KV heads": ("FNNN", "NFNF", "FNGG"),
}


def build(layers: tuple[str, ...], window: int) -> tuple[HeadMap, HydraHeadForCausalLM]:
    sizes = [tuple(size if "N" in row else None for row in layers) for size in (window, 4)]
    head_map = HeadMap(SHAPE, layers, *sizes)
    config = HydraHeadConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        head_map=list(layers),
        window=list(head_map.window),
        slots=list(head_map.slots),
    )
    return head_map, HydraHeadForCausalLM(config).eval()


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("context", [1, 9, 33])
@torch.no_grad()
def test_cache_holds_what_the_cost_model_prices(name: str, context: int) -> None:
    head_map, model = build(MAPS[name], window=12)
    cache = model(torch.randint(50, (1, context)), use_cache=True)[CACHE_FIELD]
    assert cache.num_bytes() == cache_bytes(head_map, context, element_bytes=4)
    for _ in range(2):
        model(torch.randint(50, (1, 1)), past_key_values=cache)
    assert cache.num_bytes() == cache_bytes(head_map, context + 2, element_bytes=4)


@torch.no_grad()
def test_a_layer_without_full_heads_keeps_no_keys() -> None:
    _, model = build(("GGGG", "FFFF", "NNNN"), window=12)
    cache = model(torch.randint(50, (1, 40)), use_cache=True)[CACHE_FIELD]
    assert [layer.full.num_bytes() > 0 for layer in cache.layers] == [False, True, False]
    assert cache.get_seq_length() == 40


def test_keys_grow_under_autograd_without_writing_in_place() -> None:
    _, model = build(("FGGF", "GFFG", "FFGG"), window=12)
    ids = torch.randint(50, (1, 10))
    cache = model(ids[:, :6], use_cache=True)[CACHE_FIELD]
    first = model(ids[:, 6:8], past_key_values=cache).logits
    second = model(ids[:, 8:], past_key_values=cache).logits
    (first.sum() + second.sum()).backward()
    model.zero_grad()
    torch.testing.assert_close(second, model(ids).logits[:, 8:], atol=1e-5, rtol=1e-4)
