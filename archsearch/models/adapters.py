"""The model families that can be a teacher, a row each, and what is read off a Hugging Face config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..headmap import ModelShape

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Family:
    """How one model family differs from the common decoder (RMSNorm, SwiGLU, RoPE, GQA).

    required: config fields that must have the given value, where the config has them at all.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    required: dict[str, Any] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    "llama": Family(required={"attention_bias": False, "mlp_bias": False}),
    "qwen2": Family(qkv_bias=True, required={"use_sliding_window": False}),
    "qwen3": Family(qk_norm=True, required={"attention_bias": False, "use_sliding_window": False}),
}
"""Keyed by the config's model_type. Module and parameter names are the same in every row."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Kinds of RoPE whose frequencies do not depend on the length of the input."""


def family_of(hf_config: PretrainedConfig) -> Family:
    """The row of a config's family. Raises ConfigError for a family that has none."""
    family = FAMILIES.get(hf_config.model_type)
    if family is None:
        raise ConfigError(
            f"teacher: model family {hf_config.model_type!r} is not supported; "
            f"allowed: {', '.join(FAMILIES)}"
        )
    return family


def rope_of(hf_config: PretrainedConfig) -> dict[str, Any]:
    """The RoPE parameters as a dict with rope_theta and rope_type. Raises ConfigError for other kinds."""
    rope = dict(getattr(hf_config, "rope_parameters", None) or {})
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", getattr(hf_config, "default_theta", 10_000.0))
    if rope["rope_type"] not in ROPE_TYPES:
        raise ConfigError(
            f"teacher: rope_type {rope['rope_type']!r} is not supported; "
            f"allowed: {', '.join(ROPE_TYPES)}"
        )
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("teacher: partial_rotary_factor other than 1 is not supported")
    return rope


def check_supported(hf_config: PretrainedConfig) -> None:
    """Raises ConfigError naming the first feature of the config that the hybrid model cannot keep."""
    required = {"hidden_act": "silu"} | family_of(hf_config).required
    for name, wanted in required.items():
        found = getattr(hf_config, name, wanted)
        if found != wanted:
            raise ConfigError(f"teacher: {name} = {found!r} is not supported; allowed: {wanted!r}")
    kinds = set(getattr(hf_config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise ConfigError(
            f"teacher: layers of type {', '.join(sorted(kinds))} are not supported; "
            "allowed: full_attention"
        )
    quantisation = getattr(hf_config, "quantization_config", None) or {"quant_method": "gguf"}
    if isinstance(quantisation, dict):
        method = quantisation.get("quant_method")
    else:
        method = getattr(quantisation, "quant_method", None)
    if method != "gguf":  # transformers reads GGUF as plain weights
        raise ConfigError(
            "teacher: quantised weights are not supported; allowed: fp32, bf16, fp16, or GGUF"
        )
    rope_of(hf_config)


def shape_of(hf_config: PretrainedConfig, revision: str | None = None) -> ModelShape:
    """The attention geometry of a config, checked.

    Raises ConfigError for an unknown family, an unsupported feature, query heads that the KV heads do not
    divide, or an odd head_dim (RoPE rotates pairs).
    """
    check_supported(hf_config)
    num_heads = hf_config.num_attention_heads
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // num_heads
    if head_dim % 2:
        raise ConfigError(f"teacher: head_dim {head_dim} is not supported; allowed: even numbers")
    try:
        return ModelShape(
            family=hf_config.model_type,
            num_layers=hf_config.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=getattr(hf_config, "num_key_value_heads", None) or num_heads,
            head_dim=head_dim,
            revision=revision,
        )
    except ValueError as error:
        raise ConfigError(f"teacher: {error}") from error


def count_parameters(hf_config: PretrainedConfig) -> int:
    """Parameters of the model that a config describes, tied embeddings counted once."""
    family, shape = family_of(hf_config), shape_of(hf_config)
    hidden, dim = hf_config.hidden_size, shape.head_dim
    rows_qkv = (shape.num_heads + 2 * shape.num_kv_heads) * dim
    layer = hidden * (rows_qkv + shape.num_heads * dim) + 3 * hidden * hf_config.intermediate_size
    layer += 2 * hidden + family.qkv_bias * rows_qkv + family.qk_norm * 2 * dim
    embeddings = 1 if hf_config.tie_word_embeddings else 2
    total: int = shape.num_layers * layer + embeddings * hf_config.vocab_size * hidden + hidden
    return total
