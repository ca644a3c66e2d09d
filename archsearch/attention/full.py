"""Full-attention heads: causal softmax attention of a subset of a layer's query heads.

Order of work: project -> q/k norm of the teacher (where it has one) -> RoPE, or the share of it that is left -> queries
times a factor of their position (optional) -> attention -> RMSNorm per head without weight, times gamma (optional) ->
times 2 sigmoid(W_g x) (optional), against attention sinks; it starts at 1, so that the heads start as the teacher's.

Shapes: B batch, T new tokens, S cached plus new tokens, C hidden size, n query heads here, m KV heads here, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .cache import KeyValueStore
from .configuration_hydrahead import HydraHeadConfig
from .dispatch import attend, fuse_and_scatter, norm_and_rotate
from .fusion import HeadIndex, LinearHeads, RMSNorm, head_rows
from .packing import Documents
from .positions import FullPositions
from .rotary import PositionEmbeddings


class Mask(NamedTuple):
    """What attention may look at, beyond plain causality from an empty cache.

    valid_BT: which of the new tokens are no padding; None where all are. pairs_B1TS: which key each query may see;
    None for plain causality over the new tokens (or, with one new token, everything). documents: those that are packed
    into the rows.
    """

    valid_BT: Tensor | None = None
    pairs_B1TS: Tensor | None = None
    documents: Documents | None = None


def build_mask(
    attention_mask: Tensor | None,
    num_new: int,
    num_past: int,
    device: torch.device,
    documents: Documents | None = None,
) -> Mask:
    """The Mask for num_new tokens after num_past cached ones, from a 2D mask [B, past + new] or None.

    Every query may see itself, so that rows of padding stay finite. Raises ValueError for other mask shapes, and for
    packed documents with padding or after cached tokens.
    """
    if documents is not None:
        if attention_mask is not None or num_past:
            raise ValueError("packed documents (cu_seqlens) take neither attention_mask nor cache")
        return Mask(pairs_B1TS=documents.pairs(), documents=documents)
    total = num_past + num_new
    if attention_mask is not None:
        if attention_mask.dim() != 2 or attention_mask.shape[1] != total:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; it needs [batch, {total}], "
                f"cached tokens included"
            )
        attention_mask = attention_mask.to(device).bool()
        if bool(attention_mask.all()):
            attention_mask = None
    if attention_mask is None:
        if num_new == 1 or num_past == 0:
            return Mask()
        return Mask(pairs_B1TS=_causal(num_new, num_past, device)[None, None])
    causal_TS = _causal(num_new, num_past, device)
    own_TS = torch.eye(total, dtype=torch.bool, device=device)[num_past:]
    pairs_BTS = (causal_TS & attention_mask[:, None]) | own_TS
    return Mask(attention_mask[:, num_past:], pairs_BTS[:, None])


def _causal(num_new: int, num_past: int, device: torch.device) -> Tensor:
    ones = torch.ones(num_new, num_past + num_new, dtype=torch.bool, device=device)
    return ones.tril(num_past)


class KeysValues:
    """Keys as they are projected and values of KV heads, [B, T, m, D] each.

    Unpacks to (keys, values) with the keys normed, not rotated, for those who look at them: FullHeads norms in the
    launch that rotates, and needs no such tensor.
    """

    def __init__(self, k_BTmD: Tensor, v_BTmD: Tensor, norm: RMSNorm | None) -> None:
        self.k_BTmD, self.v_BTmD, self._norm = k_BTmD, v_BTmD, norm

    def __iter__(self) -> Iterator[Tensor]:
        yield self.k_BTmD if self._norm is None else self._norm(self.k_BTmD)
        yield self.v_BTmD


class FullHeads(nn.Module):
    """The query heads `heads` of a layer as softmax attention, with only the KV heads that they read.

    Rows of q_proj, gate_proj and gamma follow `heads` (ascending), rows of k_proj and v_proj follow `kv_heads` (ascending).
    """

    def __init__(self, config: HydraHeadConfig, heads: Sequence[int]) -> None:
        super().__init__()
        group = config.num_attention_heads // config.num_key_value_heads
        self.config, self.head_dim = config, config.head_dim
        self.heads = tuple(heads)
        self.kv_heads = tuple(sorted({head // group for head in heads}))
        readers = [self.kv_heads.index(head // group) for head in heads]
        counts = {readers.count(place) for place in range(len(self.kv_heads))}
        self._even = len(counts) == 1
        self._readers = HeadIndex(readers)
        size, bias = config.hidden_size, config.qkv_bias
        self.q_proj = nn.Linear(size, len(self.heads) * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(size, len(self.kv_heads) * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(size, len(self.kv_heads) * self.head_dim, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self._order = HeadIndex(range(len(self.heads)))
        width, options = len(self.heads) * self.head_dim, config.fa
        self.gate_proj = nn.Linear(size, width, bias=False) if options["gate"] else None
        self.gamma: Tensor | None = None
        if options["norm"]:
            self.gamma = nn.Parameter(torch.empty(len(self.heads), self.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets what the teacher has not: the gate starts as the identity, gamma at 1."""
        if self.gate_proj is not None:
            nn.init.zeros_(self.gate_proj.weight)
        if self.gamma is not None:
            nn.init.ones_(self.gamma)

    def select(self, indices: Sequence[int]) -> FullHeads:
        """A new module of the heads at places `indices` (ascending) of self.heads, with copies of their parameters."""
        with torch.device("meta"):
            chosen = FullHeads(self.config, [self.heads[place] for place in indices])
        kv_places = [self.kv_heads.index(head) for head in chosen.kv_heads]
        places = {"q_proj": list(indices), "gate_proj": list(indices)}
        places |= {"k_proj": kv_places, "v_proj": kv_places}
        parameters = self.state_dict()
        gamma = {name: parameters.pop(name) for name in ("gamma",) if name in parameters}
        rows = head_rows(parameters, places, self.head_dim)
        rows |= head_rows(gamma, {"gamma": list(indices)}, 1)
        chosen.load_state_dict(rows, assign=True)
        return chosen.train(self.training)

    def keys_values(self, x_BTC: Tensor) -> KeysValues:
        """Keys and values of the KV heads."""
        shape = (*x_BTC.shape[:2], -1, self.head_dim)
        return KeysValues(
            self.k_proj(x_BTC).view(shape), self.v_proj(x_BTC).view(shape), self.k_norm
        )

    def forward(
        self,
        x_BTC: Tensor,
        rope: PositionEmbeddings,
        mask: Mask | None = None,
        store: KeyValueStore | None = None,
        keys_values: KeysValues | None = None,
        *,
        own_positions: FullPositions | None = None,
    ) -> Tensor:
        """Head outputs [B, T, n, D]; appends the new keys (rotated where there is RoPE) and values to store.

        rope: the teacher's tables at the tokens' positions. own_positions: what these heads have in its place, where
        config.fa changes how they see positions. keys_values: what the method of that name gave for x, where the
        caller has it already.
        """
        kv = self.keys_values(x_BTC) if keys_values is None else keys_values
        q_BTnD = self.q_proj(x_BTC).view(*x_BTC.shape[:2], -1, self.head_dim)
        seen = own_positions or FullPositions(rope, factor_BT=None)
        q_BTnD, k_BTmD = norm_and_rotate(
            q_BTnD, kv.k_BTmD, self.q_norm, self.k_norm, seen.rope, seen.factor_BT
        )
        q_BnTD, k_BmSD, v_BmSD = (x.transpose(1, 2) for x in (q_BTnD, k_BTmD, kv.v_BTmD))
        if store is not None:
            k_BmSD, v_BmSD = store.append(k_BmSD, v_BmSD)
        o_BTnD = self._attend(q_BnTD, k_BmSD, v_BmSD, mask or Mask()).transpose(1, 2)
        return self._fuse(o_BTnD, x_BTC)

    def _attend(self, q_BnTD: Tensor, k_BmSD: Tensor, v_BmSD: Tensor, mask: Mask) -> Tensor:
        if not self._even:
            # Grouped kernels need equally many readers of each KV head: repeat by index instead.
            index = self._readers.on(k_BmSD.device)
            k_BmSD, v_BmSD = k_BmSD.index_select(1, index), v_BmSD.index_select(1, index)
        return attend(q_BnTD, k_BmSD, v_BmSD, mask.pairs_B1TS)

    def _fuse(self, o_BTnD: Tensor, x_BTC: Tensor) -> Tensor:
        """Norm, gamma and gate, where the heads have them."""
        if self.gamma is None and self.gate_proj is None:
            return o_BTnD
        gate_BTnD = None if self.gate_proj is None else self.gate_proj(x_BTC).view(o_BTnD.shape)
        if self.gamma is None:
            heads = LinearHeads(o_BTnD, o_BTnD.new_ones(o_BTnD.shape[2:]), None, gate_BTnD, None)
        else:
            heads = LinearHeads(o_BTnD, self.gamma, None, gate_BTnD, self.config.rms_norm_eps)
        return fuse_and_scatter(None, heads, self._order)
