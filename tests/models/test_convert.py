"""The all-FA hybrid model is the teacher: same logits for every family, tied or not, scaled RoPE or not."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from archsearch.config import GdnConfig
from archsearch.headmap import HeadMap, ModelShape, Operator
from archsearch.models.convert import (
    hydrahead_config,
    random_hydrahead,
    to_hydrahead,
    with_head_map,
)

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 36,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def assert_same_logits(hf_config: Any, num_tokens: int = 90) -> None:
    torch.manual_seed(0)
    hf_model = AutoModelForCausalLM.from_config(hf_config).eval()
    with torch.no_grad():
        for parameter in hf_model.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    ids = torch.randint(SIZES["vocab_size"], (2, num_tokens))
    model = to_hydrahead(hf_model)
    assert not model.training
    with torch.no_grad():
        difference = model(ids).logits - hf_model(ids).logits
    assert difference.abs().max() < 1e-4


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_to_hydrahead_keeps_logits(config_class: Any, tied: bool) -> None:
    assert_same_logits(config_class(**SIZES, tie_word_embeddings=tied))


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_to_hydrahead_keeps_scaled_rope(rope: dict[str, Any]) -> None:
    assert_same_logits(LlamaConfig(**SIZES, rope_parameters=rope), num_tokens=200)


@pytest.mark.parametrize("num_kv_heads", [1, 3, 6])
def test_to_hydrahead_grouped_queries(num_kv_heads: int) -> None:
    assert_same_logits(Qwen3Config(**SIZES | {"num_key_value_heads": num_kv_heads}))


def test_to_hydrahead_shares_tensors() -> None:
    hf_model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, tie_word_embeddings=True))
    model = to_hydrahead(hf_model)
    full = model.model.layers[0].self_attn.full
    assert (
        full.q_proj.weight.data_ptr() == hf_model.model.layers[0].self_attn.q_proj.weight.data_ptr()
    )
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_hydrahead_config_fields() -> None:
    hf_config = Qwen3Config(**SIZES, bos_token_id=5, eos_token_id=6, rms_norm_eps=1e-5)
    shape = ModelShape("qwen3", 2, 6, 2, 8)
    head_map = HeadMap(shape, ("FGFGFG", "FFFNNN"), (None, 16), (None, 4))
    config = hydrahead_config(hf_config, head_map, GdnConfig(rope=False))
    assert config.head_map == ["FGFGFG", "FFFNNN"]
    assert (config.window, config.slots) == ([None, 16], [None, 4])
    assert config.gdn["rope"] is False
    assert (config.qk_norm, config.qkv_bias, config.base_model_type) == (True, False, "qwen3")
    assert (config.bos_token_id, config.eos_token_id, config.rms_norm_eps) == (5, 6, 1e-5)


def test_with_head_map_refuses_another_geometry() -> None:
    config = hydrahead_config(LlamaConfig(**SIZES))
    other = HeadMap.uniform(ModelShape("llama", 2, 4, 2, 8), Operator.FULL)
    with pytest.raises(ValueError, match=r"\(2, 4, 2, 8\), the model has \(2, 6, 2, 8\)"):
        with_head_map(config, other, GdnConfig())


def test_random_hydrahead_is_seeded() -> None:
    arguments: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "seed": 3}
    before = torch.random.get_rng_state()
    first, second = (random_hydrahead(LlamaConfig(**SIZES), **arguments) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
