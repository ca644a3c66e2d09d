"""Native Hybrid Attention heads (arXiv 2510.07019): a sliding window and compressed slots under one softmax.

A token enters the slots of its KV head when it leaves the window (j = t - W):
HK <- HK diag(exp g_j) + k_j s_j^T, HV <- diag(exp g_j) HV + s_j v_j^T, g = logsigmoid(W_g x) / 8, s = 1 - exp(g).
Slots see keys without RoPE, the window with it; slots that no token has entered yet are masked.

A KV head that an FA head of the layer reads too is `shared`: its keys and values are the FullHeads' own, and its
window is read from their cache, so that it is kept once.

Shapes: B batch, T new tokens, P tokens of the window held from before, S = P + T, W window, M slots,
C hidden size, n query heads here, m KV heads here (o of them own, s shared), D head_dim.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cache import NativeHybridState
from .configuration_hydrahead import HydraHeadConfig
from .fusion import HeadIndex, RMSNorm, head_rows
from .rotary import PositionEmbeddings, Rotary, rotate
from .window_slots import SlotState, WindowTokens, attend

GATE_DIVISOR = 8.0


class Lent(NamedTuple):
    """Keys and values of shared KV heads: the new ones, not rotated, and the window's as the cache has them.

    rotated: whether those have RoPE.
    """

    k_BTsD: Tensor
    v_BTsD: Tensor
    held_k_BsPD: Tensor | None = None
    held_v_BsPD: Tensor | None = None
    rotated: bool = True


class NativeHybridHeads(nn.Module):
    """The query heads `heads` of a layer as NHA, with the KV heads that they read and those heads' slot gates.

    `window` may be changed between sequences without retraining; with W >= T the heads are full attention.
    """

    def __init__(
        self,
        config: HydraHeadConfig,
        heads: Sequence[int],
        window: int,
        slots: int,
        shared: Collection[int] = (),
    ) -> None:
        super().__init__()
        group = config.num_attention_heads // config.num_key_value_heads
        self.config, self.head_dim = config, config.head_dim
        self.window, self.slots = window, slots
        self.heads = tuple(heads)
        self.kv_heads = tuple(sorted({head // group for head in heads}))
        self.shared = tuple(head for head in self.kv_heads if head in shared)
        self.own = tuple(head for head in self.kv_heads if head not in shared)
        joined = self.own + self.shared
        self._readers = HeadIndex([self.kv_heads.index(head // group) for head in heads])
        self._order = HeadIndex([joined.index(head) for head in self.kv_heads])
        self._own_places = HeadIndex([self.kv_heads.index(head) for head in self.own])
        self._rotary = Rotary(config)
        self._build(config.hidden_size)

    def _build(self, size: int) -> None:
        bias, dim, eps = self.config.qkv_bias, self.head_dim, self.config.rms_norm_eps
        own_width = len(self.own) * dim
        self.q_proj = nn.Linear(size, len(self.heads) * dim, bias=bias)
        self.k_proj = nn.Linear(size, own_width, bias=bias) if self.own else None
        self.v_proj = nn.Linear(size, own_width, bias=bias) if self.own else None
        self.slot_proj = nn.Linear(size, len(self.kv_heads) * self.slots, bias=False)
        self.q_norm = RMSNorm(dim, eps) if self.config.qk_norm else None
        self.k_norm = RMSNorm(dim, eps) if self.config.qk_norm and self.own else None

    @classmethod
    def of_layer(cls, config: HydraHeadConfig, layer: int) -> NativeHybridHeads:
        """The NHA heads that config's head map gives to a layer."""
        window, slots = config.window[layer], config.slots[layer]
        assert window is not None
        assert slots is not None
        return cls(config, config.heads(layer, "N"), window, slots, config.kv_heads(layer, "F"))

    def select(self, indices: Sequence[int], shared: Collection[int] = ()) -> NativeHybridHeads:
        """A new module of the heads at places `indices` (ascending) of self.heads, with copied parameters.

        KV heads in `shared` leave their keys and values to the layer's FA heads from then on.
        """
        heads = [self.heads[place] for place in indices]
        shared = {*shared, *self.shared}
        with torch.device("meta"):
            chosen = NativeHybridHeads(self.config, heads, self.window, self.slots, shared)
        own = [self.own.index(head) for head in chosen.own]
        places = {"q_proj": list(indices), "k_proj": own, "v_proj": own}
        kept = set(chosen.state_dict())
        parameters = {name: x for name, x in self.state_dict().items() if name in kept}
        slot_gates = {"slot_proj.weight": parameters.pop("slot_proj.weight")}
        kv_places = [self.kv_heads.index(head) for head in chosen.kv_heads]
        rows = head_rows(parameters, places, self.head_dim)
        rows |= head_rows(slot_gates, {"slot_proj": kv_places}, self.slots)
        chosen.load_state_dict(rows, assign=True)
        return chosen.train(self.training)

    def forward(
        self,
        x_BTC: Tensor,
        rope: PositionEmbeddings,
        valid_BT: Tensor | None = None,
        state: NativeHybridState | None = None,
        lent: Lent | None = None,
    ) -> Tensor:
        """Head outputs [B, T, n, D]; reads and replaces state. Padding must be on the left.

        RoPE sees distances only, and these are counted within the window; rope, the tables at the tokens' positions,
        serves to take the rotation off shared keys.
        """
        q_BnTD = self._queries(x_BTC)
        tokens, slots = self._new_tokens(x_BTC, valid_BT, lent), None
        if state is not None and state.held:
            tokens = self._held_tokens(state, rope, lent).followed_by(tokens)
            slots = _slots(state)
        device = x_BTC.device
        places_1S = torch.arange(tokens.count, device=device)[None]
        window_rope = self._rotary.tables(places_1S, q_BnTD.dtype)
        with torch.autocast(device.type, enabled=False):
            readers = self._readers.on(device)
            o_BnTD, slots = attend(q_BnTD, tokens, slots, window_rope, readers, self.window)
        if state is not None:
            self._keep(state, tokens.last(self.window), slots)
        return o_BnTD.transpose(1, 2)

    def _queries(self, x_BTC: Tensor) -> Tensor:
        q_BTnD: Tensor = self.q_proj(x_BTC).view(*x_BTC.shape[:2], -1, self.head_dim)
        return (q_BTnD if self.q_norm is None else self.q_norm(q_BTnD)).transpose(1, 2)

    def _new_tokens(
        self, x_BTC: Tensor, valid_BT: Tensor | None, lent: Lent | None
    ) -> WindowTokens:
        k_parts, v_parts = [], []
        if self.k_proj is not None and self.v_proj is not None:
            shape = (*x_BTC.shape[:2], -1, self.head_dim)
            k, v = self.k_proj(x_BTC).view(shape), self.v_proj(x_BTC).view(shape)
            k_parts, v_parts = [k if self.k_norm is None else self.k_norm(k)], [v]
        if lent is not None:
            k_parts, v_parts = [*k_parts, lent.k_BTsD], [*v_parts, lent.v_BTsD]
        gates = self.slot_proj(x_BTC).float().view(*x_BTC.shape[:2], -1, self.slots)
        g_BmTM = (F.logsigmoid(gates) / GATE_DIVISOR).transpose(1, 2)
        if valid_BT is None:
            valid_BT = torch.ones(x_BTC.shape[:2], dtype=torch.bool, device=x_BTC.device)
        k_BmTD, v_BmTD = (
            self._ordered(torch.cat(x, 2).transpose(1, 2)) for x in (k_parts, v_parts)
        )
        return WindowTokens(k_BmTD, v_BmTD, g_BmTM, valid_BT)

    def _held_tokens(
        self, state: NativeHybridState, embeddings: PositionEmbeddings, lent: Lent | None
    ) -> WindowTokens:
        assert state.g_BmPM is not None
        assert state.valid_BP is not None
        k_parts = [] if state.k_BoPD is None else [state.k_BoPD]
        v_parts = [] if state.v_BoPD is None else [state.v_BoPD]
        if lent is not None and lent.held_k_BsPD is not None and lent.held_v_BsPD is not None:
            held = lent.held_k_BsPD
            k_parts.append(self._unrotated(held, embeddings) if lent.rotated else held)
            v_parts.append(lent.held_v_BsPD)
        k_BmPD, v_BmPD = (self._ordered(torch.cat(parts, 1)) for parts in (k_parts, v_parts))
        return WindowTokens(k_BmPD, v_BmPD, state.g_BmPM, state.valid_BP)

    def _ordered(self, x_BmTD: Tensor) -> Tensor:
        """From own, then shared KV heads to the order of self.kv_heads."""
        return x_BmTD.index_select(1, self._order.on(x_BmTD.device)) if self.shared else x_BmTD

    def _unrotated(self, k_BsPD: Tensor, embeddings: PositionEmbeddings) -> Tensor:
        """Takes RoPE off the P keys before the first new token: back by its position, then forward by the distance."""
        count = k_BsPD.shape[2]
        distances = torch.arange(count, 0, -1, device=k_BsPD.device)[None]
        first_cos, first_sin = (table[:, :1].float() for table in embeddings)
        k_BPsD = rotate(k_BsPD.transpose(1, 2).float(), (first_cos, -first_sin))
        k_BPsD = rotate(k_BPsD, self._rotary.tables(distances, torch.float32))
        scaling = self._rotary.scaling(k_BsPD.device)
        return (k_BPsD / scaling**3).transpose(1, 2).to(k_BsPD.dtype)

    def _keep(self, state: NativeHybridState, tokens: WindowTokens, slots: SlotState) -> None:
        if self.own:
            places = self._own_places.on(tokens.k_BmSD.device)
            state.k_BoPD = tokens.k_BmSD.index_select(1, places)
            state.v_BoPD = tokens.v_BmSD.index_select(1, places)
        state.g_BmPM, state.valid_BP = tokens.g_BmSM, tokens.valid_BS
        state.slot_keys_BmDM, state.slot_values_BmMD, state.open_B = slots


def _slots(state: NativeHybridState) -> SlotState:
    assert state.slot_keys_BmDM is not None
    assert state.slot_values_BmMD is not None
    assert state.open_B is not None
    return SlotState(state.slot_keys_BmDM, state.slot_values_BmMD, state.open_B)
