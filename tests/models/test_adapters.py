"""Reading teachers' configs: geometry, parameter counts, and what is refused."""

from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from archsearch.errors import ConfigError
from archsearch.models.adapters import count_parameters, shape_of

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("config_class", "model_class"),
    [
        (LlamaConfig, LlamaForCausalLM),
        (Qwen2Config, Qwen2ForCausalLM),
        (Qwen3Config, Qwen3ForCausalLM),
    ],
)
def test_count_parameters(config_class: Any, model_class: Any, tied: bool) -> None:
    config = config_class(**SIZES, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = model_class(config)
    if tied:
        model.tie_weights()
    assert count_parameters(config) == sum(p.numel() for p in model.parameters())


def test_shape_of() -> None:
    shape = shape_of(Qwen3Config(**SIZES), "main")
    assert (shape.family, shape.num_layers, shape.num_heads) == ("qwen3", 3, 4)
    assert (shape.num_kv_heads, shape.head_dim, shape.revision) == (2, 16, "main")


def test_shape_of_derives_head_dim() -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    assert shape_of(Qwen2Config(**sizes)).head_dim == 8


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(), "family 'gpt2' is not supported; allowed: llama, qwen2, qwen3"),
        (LlamaConfig(**SIZES, attention_bias=True), "attention_bias = True"),
        (LlamaConfig(**SIZES, mlp_bias=True), "mlp_bias = True"),
        (LlamaConfig(**SIZES, hidden_act="gelu"), "hidden_act = 'gelu' .* allowed: 'silu'"),
        (Qwen3Config(**SIZES, attention_bias=True), "attention_bias"),
        (
            Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1),
            "use_sliding_window",
        ),
        (
            Qwen3Config(**SIZES, layer_types=["full_attention"] * 2 + ["sliding_attention"]),
            "layers of type sliding_attention",
        ),
        (LlamaConfig(**SIZES | {"num_key_value_heads": 3}), "no multiple of num_kv_heads 3"),
        (
            LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
            "rope_type 'dynamic' .* allowed: default, linear, llama3, yarn",
        ),
        (LlamaConfig(**SIZES, quantization_config={"quant_method": "awq"}), "quantised"),
    ],
)
def test_shape_of_refuses(config: PretrainedConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape_of(config)


def test_shape_of_refuses_odd_head_dim() -> None:
    config = LlamaConfig(**SIZES)
    config.head_dim = 7  # newer versions of transformers refuse it in the constructor
    with pytest.raises(ConfigError, match="head_dim 7"):
        shape_of(config)
