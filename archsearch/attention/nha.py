"""Native Hybrid Attention heads (arXiv 2510.07019): a sliding window and compressed slots under one softmax.

A token enters the slots of its KV head when it leaves the window (j = t - W):
HK <- HK diag(exp g_j) + k_j s_j^T, HV <- diag(exp g_j) HV + s_j v_j^T, g = logsigmoid(W_g x) / 8, s = 1 - exp(g).
Slots see keys without RoPE, the window with it; slots that no token has entered yet are masked.

Shapes: B batch, T new tokens, P tokens of the window held from before, S = P + T, W window, M slots,
C hidden size, n query heads here, m KV heads here, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cache import NativeHybridState
from .configuration_hydrahead import HydraHeadConfig
from .fusion import HeadIndex, RMSNorm, head_rows
from .rotary import PositionEmbeddings, Rotary
from .window_slots import SlotState, WindowTokens, attend

GATE_DIVISOR = 8.0


class NativeHybridHeads(nn.Module):
    """The query heads `heads` of a layer as NHA, with the KV heads that they read and those heads' slot gates.

    `window` may be changed between sequences without retraining; with W >= T the heads are full attention.
    """

    def __init__(
        self, config: HydraHeadConfig, heads: Sequence[int], window: int, slots: int
    ) -> None:
        super().__init__()
        group = config.num_attention_heads // config.num_key_value_heads
        self.config, self.head_dim = config, config.head_dim
        self.window, self.slots = window, slots
        self.heads = tuple(heads)
        self.kv_heads = tuple(sorted({head // group for head in heads}))
        self._readers = HeadIndex([self.kv_heads.index(head // group) for head in heads])
        self._rotary = Rotary(config)
        size, bias, num_kv = config.hidden_size, config.qkv_bias, len(self.kv_heads)
        self.q_proj = nn.Linear(size, len(self.heads) * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(size, num_kv * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(size, num_kv * self.head_dim, bias=bias)
        self.slot_proj = nn.Linear(size, num_kv * slots, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None

    @classmethod
    def of_layer(cls, config: HydraHeadConfig, layer: int) -> NativeHybridHeads:
        """The NHA heads that config's head map gives to a layer."""
        return cls(config, config.heads(layer, "N"), config.window[layer], config.slots[layer])

    def select(self, indices: Sequence[int]) -> NativeHybridHeads:
        """A new module of the heads at places `indices` (ascending) of self.heads, with copied parameters."""
        heads = [self.heads[place] for place in indices]
        with torch.device("meta"):
            chosen = NativeHybridHeads(self.config, heads, self.window, self.slots)
        kv_places = [self.kv_heads.index(head) for head in chosen.kv_heads]
        places = {"q_proj": list(indices), "k_proj": kv_places, "v_proj": kv_places}
        parameters = self.state_dict()
        slot_gates = {"slot_proj.weight": parameters.pop("slot_proj.weight")}
        rows = head_rows(parameters, places, self.head_dim)
        rows |= head_rows(slot_gates, {"slot_proj": kv_places}, self.slots)
        chosen.load_state_dict(rows, assign=True)
        return chosen.train(self.training)

    def forward(
        self,
        x_BTC: Tensor,
        position_embeddings: PositionEmbeddings,
        valid_BT: Tensor | None = None,
        state: NativeHybridState | None = None,
    ) -> Tensor:
        """Head outputs [B, T, n, D]; reads and replaces state. Padding must be on the left.

        position_embeddings is not used: RoPE sees distances only, and these are counted within the window.
        """
        q_BnTD, new = self._project(x_BTC, valid_BT)
        tokens, slots = new, None
        if state is not None and state.k_BmPD is not None:
            tokens, slots = _held(state).followed_by(new), _slots(state)
        rope = self._rotary.tables(torch.arange(tokens.count, device=x_BTC.device)[None], q_BnTD.dtype)
        o_BnTD, slots = attend(q_BnTD, tokens, slots, rope, self._readers.on(x_BTC.device), self.window)
        if state is not None:
            _store(state, tokens.last(self.window), slots)
        return o_BnTD.transpose(1, 2)

    def _project(self, x_BTC: Tensor, valid_BT: Tensor | None) -> tuple[Tensor, WindowTokens]:
        shape = (*x_BTC.shape[:2], -1, self.head_dim)
        q, k, v = (p(x_BTC).view(shape) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        gates = self.slot_proj(x_BTC).float().view(*x_BTC.shape[:2], -1, self.slots)
        g = F.logsigmoid(gates) / GATE_DIVISOR
        if valid_BT is None:
            valid_BT = torch.ones(x_BTC.shape[:2], dtype=torch.bool, device=x_BTC.device)
        return q.transpose(1, 2), WindowTokens(*(x.transpose(1, 2) for x in (k, v, g)), valid_BT)


def _held(state: NativeHybridState) -> WindowTokens:
    assert state.k_BmPD is not None and state.v_BmPD is not None
    assert state.g_BmPM is not None and state.valid_BP is not None
    return WindowTokens(state.k_BmPD, state.v_BmPD, state.g_BmPM, state.valid_BP)


def _slots(state: NativeHybridState) -> SlotState:
    assert state.slot_keys_BmDM is not None and state.slot_values_BmMD is not None
    assert state.open_B is not None
    return SlotState(state.slot_keys_BmDM, state.slot_values_BmMD, state.open_B)


def _store(state: NativeHybridState, tokens: WindowTokens, slots: SlotState) -> None:
    state.k_BmPD, state.v_BmPD, state.g_BmPM, state.valid_BP = tokens
    state.slot_keys_BmDM, state.slot_values_BmMD, state.open_B = slots
