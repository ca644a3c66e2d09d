"""From a Hugging Face model to the hybrid model: config mapping and, for full attention, the weights."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from ..attention.configuration_hydrahead import HydraHeadConfig
from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..config import GdnConfig
from ..headmap import HeadMap, Operator
from .adapters import family_of, rope_of, shape_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

KEPT_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "initializer_range",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
"""Config fields that mean the same in every family and in the hybrid model."""

FULL_HEAD_MODULES = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")
"""Modules of a Hugging Face attention layer that belong to the FA heads; o_proj belongs to all heads."""


def hydrahead_config(
    hf_config: PretrainedConfig, head_map: HeadMap | None = None, gdn: GdnConfig | None = None
) -> HydraHeadConfig:
    """The hybrid model's config for a teacher's; all heads FA where there is no head map.

    Raises ConfigError for a teacher that is not supported, ValueError for a head map of another geometry.
    """
    shape, family = shape_of(hf_config), family_of(hf_config)
    config = HydraHeadConfig(
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rope_parameters=rope_of(hf_config),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        base_model_type=hf_config.model_type,
        **{name: getattr(hf_config, name) for name in KEPT_FIELDS},
    )
    head_map = head_map or HeadMap.uniform(shape, Operator.FULL)
    return with_head_map(config, head_map, gdn or GdnConfig())


def with_head_map(
    config: HydraHeadConfig,
    head_map: HeadMap,
    gdn: GdnConfig,
    fa: dict[str, Any] | None = None,
) -> HydraHeadConfig:
    """A copy of config with another head map; fa: other switches of the full-attention heads.

    Raises ValueError for a map of another geometry.
    """
    model = head_map.model
    found = (model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim)
    wanted = (
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )
    if found != wanted:
        raise ValueError(
            f"head map is for (layers, heads, KV heads, head_dim) {found}, the model has {wanted}"
        )
    changed = deepcopy(config)
    changed.head_map = list(head_map.layers)
    changed.window = list(head_map.window)
    changed.slots = list(head_map.slots)
    changed.gdn = gdn.model_dump()
    changed.fa |= fa or {}
    return changed


def config_of(model: HydraHeadForCausalLM) -> HydraHeadConfig:
    """The model's config, which transformers types as any config."""
    config = model.config
    assert isinstance(config, HydraHeadConfig)
    return config


def empty_model(config: HydraHeadConfig) -> HydraHeadForCausalLM:
    """A hybrid model on the meta device: no memory, no initialisation; tensors are assigned afterwards."""
    with torch.device("meta"), no_init_weights():
        return HydraHeadForCausalLM(config)


def assign(model: HydraHeadForCausalLM, tensors: dict[str, Tensor]) -> None:
    """Makes tensors the parameters of an empty model, without a copy, and ties the embeddings where due."""
    model.load_state_dict(tensors, strict=True, assign=True)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight


def to_hydrahead(hf_model: PreTrainedModel) -> HydraHeadForCausalLM:
    """An all-FA hybrid model with the same function as hf_model, whose tensors it shares.

    Raises ConfigError for a model that is not supported.
    """
    model = empty_model(hydrahead_config(hf_model.config))
    tensors = {_renamed(name): tensor for name, tensor in hf_model.state_dict().items()}
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    assign(model, tensors)
    if hf_model.generation_config is not None:
        model.generation_config = deepcopy(hf_model.generation_config)
    model.train(hf_model.training)
    return model


def random_hydrahead(
    hf_config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device, seed: int
) -> HydraHeadForCausalLM:
    """An all-FA hybrid model of hf_config's shape with random weights; leaves the global generator as it was."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(device):
        torch.manual_seed(seed)
        model = HydraHeadForCausalLM(hydrahead_config(hf_config))
    nn.Module.to(model, dtype)
    return model


def _renamed(name: str) -> str:
    """The hybrid model's name of a parameter that Hugging Face calls `name`."""
    attention, found, rest = name.partition(".self_attn.")
    if found and rest.partition(".")[0] in FULL_HEAD_MODULES:
        return f"{attention}.self_attn.full.{rest}"
    return name
