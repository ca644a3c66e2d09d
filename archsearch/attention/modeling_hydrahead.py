"""The hybrid language model: a decoder of the Llama and Qwen families whose query heads each run their own operator.

Works with transformers 5.6.2 and later. From 5.2x on, transformers calls the cache argument and output `cache`
instead of `past_key_values`; both names are taken, and outputs carry the one that the installed version knows.

Shapes: B batch, T tokens, C hidden size, H query heads, D head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .backends import Operator as _Operator  # noqa: F401 - see below
from .cache import HydraHeadCache, LayerCache
from .configuration_hydrahead import HydraHeadConfig
from .delta_rule import gated_delta as _gated_delta  # noqa: F401 - see below
from .dispatch import fuse_and_scatter, set_backend
from .full import FullHeads, KeysValues, Mask, build_mask
from .full_backends import AttentionCall as _AttentionCall  # noqa: F401 - see below
from .fusion import HeadIndex, RMSNorm, scatter_heads
from .fusion_backends import FusionCall as _FusionCall  # noqa: F401 - see below
from .gdn import GatedDeltaHeads
from .gdn_backends import GatedDeltaCall as _GatedDeltaCall  # noqa: F401 - see below
from .nha import Lent, NativeHybridHeads
from .packing import Documents
from .positions import FullPositions, full_positions, set_rope_share
from .prologue_backends import PrologueCall as _PrologueCall  # noqa: F401 - see below
from .requirements import leaves_steps as _leaves_steps  # noqa: F401 - see below
from .rotary import PositionEmbeddings, Rotary
from .window_slots import attend as _attend  # noqa: F401 - see below

# transformers 5.6 copies only what this file imports itself, so every module of the folder is imported here.
__all__ = [
    "CACHE_FIELD",
    "HybridAttention",
    "HydraHeadConfig",
    "HydraHeadForCausalLM",
    "HydraHeadModel",
    "set_backend",
    "set_rope_share",
]

CACHE_FIELD = (
    "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
)


class HybridAttention(nn.Module):
    """All heads of one layer: a child module an operator that the layer uses, and o_proj over all heads."""

    def __init__(self, config: HydraHeadConfig, layer_index: int) -> None:
        super().__init__()
        full, gdn, nha = (config.heads(layer_index, letter) for letter in "FGN")
        self.full = FullHeads(config, full) if full else None
        self.gdn = GatedDeltaHeads(config, len(gdn)) if gdn else None
        self.nha = NativeHybridHeads.of_layer(config, layer_index) if nha else None
        self._shared: HeadIndex | None = None
        if self.full is not None and self.nha is not None and self.nha.shared:
            self._shared = HeadIndex([self.full.kv_heads.index(head) for head in self.nha.shared])
        joined = [*full, *gdn, *nha]
        self._order = HeadIndex([joined.index(head) for head in range(len(joined))])
        self.o_proj = nn.Linear(len(joined) * config.head_dim, config.hidden_size, bias=False)

    def heads(
        self,
        x_BTC: Tensor,
        rope: PositionEmbeddings,
        mask: Mask | None = None,
        cache: LayerCache | None = None,
        own_positions: FullPositions | None = None,
    ) -> Tensor:
        """Every head's output after fusion and before o_proj: [B, T, H, D], in the original order of heads.

        rope: the teacher's tables at the tokens' positions. own_positions: what full-attention heads have in its place,
        None where they have the same.
        """
        mask = mask or Mask()
        branches, lent = [], None
        if self.full is not None:
            keys_values = self.full.keys_values(x_BTC)
            store = None if cache is None else cache.full
            branches.append(
                self.full(x_BTC, rope, mask, store, keys_values, own_positions=own_positions)
            )
            lent = self._lend(keys_values, cache)
        if self.gdn is not None:
            state = None if cache is None else cache.gdn
            # NHA heads, which the fusion's kernel does not read, are put in their places after it.
            together = self.full is not None and self.nha is None
            own = self.gdn(
                x_BTC,
                rope,
                mask.valid_BT,
                state,
                documents=mask.documents,
                fused=not together,
            )
            if together:
                return fuse_and_scatter(branches[0], own, self._order)
            branches.append(own)
        if self.nha is not None:
            window = None if cache is None else cache.nha
            if mask.documents is not None:
                raise ValueError("NHA heads take no packed documents (cu_seqlens)")
            branches.append(self.nha(x_BTC, rope, mask.valid_BT, window, lent))
        return scatter_heads(branches, self._order)

    def _lend(self, keys_values: KeysValues, cache: LayerCache | None) -> Lent | None:
        """What the FA heads' KV heads give to NHA heads that read the same ones."""
        if self._shared is None or self.full is None:
            return None
        k_BTsD, v_BTsD = (x.index_select(2, self._shared.on(x.device)) for x in keys_values)
        if cache is None or not cache.nha.held:
            return Lent(k_BTsD, v_BTsD)
        share = self.full.config.fa["rope_share"]
        if 0 < share < 1:
            raise ValueError(
                f"fa.rope_share {share}: NHA heads that read the keys of FA heads decode at 0 and at 1 only"
            )
        held_k, held_v = (
            x.index_select(1, self._shared.on(x.device))
            for x in cache.full.before(k_BTsD.shape[1], cache.nha.held)
        )
        return Lent(k_BTsD, v_BTsD, held_k, held_v, rotated=share == 1)

    def forward(
        self,
        x_BTC: Tensor,
        rope: PositionEmbeddings,
        mask: Mask | None = None,
        cache: LayerCache | None = None,
        own_positions: FullPositions | None = None,
    ) -> Tensor:
        """The attention block's output [B, T, C]."""
        heads_BTHD = self.heads(x_BTC, rope, mask, cache, own_positions)
        output: Tensor = self.o_proj(heads_BTHD.flatten(-2))
        return output


class GatedMLP(nn.Module):
    """SwiGLU feed-forward block."""

    def __init__(self, config: HydraHeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[.., C] to [.., C]."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class HydraHeadLayer(nn.Module):
    """Pre-norm decoder layer."""

    def __init__(self, config: HydraHeadConfig, layer_index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = HybridAttention(config, layer_index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def forward(
        self,
        hidden_BTC: Tensor,
        rope: PositionEmbeddings,
        mask: Mask | None = None,
        cache: LayerCache | None = None,
        own_positions: FullPositions | None = None,
    ) -> Tensor:
        """[B, T, C] to [B, T, C]."""
        x_BTC = self.input_layernorm(hidden_BTC)
        hidden_BTC = hidden_BTC + self.self_attn(x_BTC, rope, mask, cache, own_positions)
        output: Tensor = hidden_BTC + self.mlp(self.post_attention_layernorm(hidden_BTC))
        return output


class HydraHeadPreTrainedModel(PreTrainedModel):
    """What transformers wants to know of both models."""

    config_class = HydraHeadConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _no_split_modules = ["HydraHeadLayer"]  # noqa: RUF012 - declared so by transformers
    _supports_sdpa = True

    def _init_weights(self, module: nn.Module) -> None:
        # Only functions of nn.init: transformers makes them skip what a checkpoint has already filled.
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, FullHeads | GatedDeltaHeads):
            module.reset_parameters()


class HydraHeadModel(HydraHeadPreTrainedModel):
    """Embedding, layers and final norm."""

    def __init__(self, config: HydraHeadConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [HydraHeadLayer(config, index) for index in range(config.num_hidden_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: HydraHeadCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache: HydraHeadCache | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Final hidden states [B, T, C] after the last norm, as BaseModelOutputWithPast.

        attention_mask [B, past + T] is 1 for tokens and 0 for padding, which must be on the left once a cache is
        in use. Without position_ids, positions count the tokens that are no padding. A cache is made only with
        use_cache=True. cu_seqlens: bounds of documents that are packed into the rows and do not see each other, of all
        rows laid end to end, int32 [N + 1]; positions then count within a document. Raises ValueError for a foreign
        cache, for attention weights, for packed documents with padding, a cache or NHA heads, and where not exactly
        one of input_ids and inputs_embeds is given.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if output_attentions:
            raise ValueError(
                "output_attentions is not available: most heads form no attention matrix"
            )
        hidden_BTC = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache(cache if past_key_values is None else past_key_values, use_cache)
        past, tokens = 0 if cache is None else cache.get_seq_length(), hidden_BTC.shape[1]
        documents = None
        if cu_seqlens is not None:
            documents = Documents.of(cu_seqlens, *hidden_BTC.shape[:2])
            position_ids = documents.positions_BT if position_ids is None else position_ids
        mask = build_mask(attention_mask, tokens, past, hidden_BTC.device, documents)
        rope, own_positions = self._positions(position_ids, attention_mask, past, hidden_BTC)
        states = [hidden_BTC]
        for index, layer in enumerate(self.layers):
            own = None if cache is None else cache.layers[index]
            hidden_BTC = layer(hidden_BTC, rope, mask, own, own_positions)
            if output_hidden_states:
                states.append(hidden_BTC)
        if cache is not None:
            cache.advance(tokens)
        output = BaseModelOutputWithPast(
            last_hidden_state=self.norm(hidden_BTC),
            hidden_states=tuple(states) if output_hidden_states else None,
        )
        setattr(output, CACHE_FIELD, cache)
        return output.to_tuple() if return_dict is False else output

    def run_layers(
        self,
        hidden_BTC: Tensor,
        start: int,
        stop: int,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Layers start up to, not including, stop; no cache, no final norm."""
        mask = build_mask(attention_mask, hidden_BTC.shape[1], 0, hidden_BTC.device)
        rope, own_positions = self._positions(position_ids, attention_mask, 0, hidden_BTC)
        for layer in self.layers[start:stop]:
            hidden_BTC = layer(hidden_BTC, rope, mask, None, own_positions)
        return hidden_BTC

    def _cache(self, cache: HydraHeadCache | None, use_cache: bool | None) -> HydraHeadCache | None:
        # Unlike transformers' own models, none is made unasked: scoring and training would pay for it.
        if use_cache is False or (use_cache is None and cache is None):
            return None
        if cache is None:
            return HydraHeadCache(self.config.num_hidden_layers)
        if not isinstance(cache, HydraHeadCache):
            raise ValueError(
                f"the cache is a {type(cache).__name__}; this model needs the HydraHeadCache that it makes itself"
            )
        return cache

    def _positions(
        self,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        past: int,
        hidden_BTC: Tensor,
    ) -> tuple[PositionEmbeddings, FullPositions | None]:
        """The teacher's RoPE tables, and what full-attention heads have in their place; None where they have the same."""
        tokens, device = hidden_BTC.shape[1], hidden_BTC.device
        if position_ids is None and attention_mask is not None:
            counted = attention_mask.to(device).long().cumsum(-1) - 1
            position_ids = counted.clamp_min(0)[:, past:]
        elif position_ids is None:
            position_ids = torch.arange(past, past + tokens, device=device)[None]
        rope = self.rotary.tables(position_ids, hidden_BTC.dtype)
        own = full_positions(self.rotary, position_ids, hidden_BTC.dtype, training=self.training)
        return rope, own


class HydraHeadForCausalLM(HydraHeadPreTrainedModel, GenerationMixin):
    """HydraHeadModel with a language-model head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: HydraHeadConfig) -> None:
        super().__init__(config)
        self.model = HydraHeadModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        # Tells generate() that the model makes its own cache, at the first call with use_cache.
        return False

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: HydraHeadCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: HydraHeadCache | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Logits [B, T, vocabulary] as CausalLMOutputWithPast, with the next-token loss where labels are given.

        logits_to_keep: the number of last positions, or their indices; 0 keeps all. labels [B, T] equal the input,
        with -100 where there is no loss; of packed documents (cu_seqlens) the first token never has one. The rest is as in HydraHeadModel.forward.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cache=cache,
            cu_seqlens=cu_seqlens,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        if labels is not None and cu_seqlens is not None:
            documents = Documents.of(cu_seqlens, *labels.shape)
            labels = labels.masked_fill(documents.positions_BT == 0, -100)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, keep])
        output = CausalLMOutputWithPast(
            loss=None if labels is None else _next_token_loss(logits, labels),
            logits=logits,
            hidden_states=outputs.hidden_states,
        )
        setattr(output, CACHE_FIELD, getattr(outputs, CACHE_FIELD))
        return output.to_tuple() if return_dict is False else output


def _next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in fp32 of predicting labels[t + 1] at position t."""
    targets = labels[:, 1:].to(logits.device).flatten()
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), targets, ignore_index=-100)
