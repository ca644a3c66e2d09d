"""The core of Native Hybrid Attention: one softmax over the tokens of a window and the slots behind it.

Query t sees the W tokens up to itself; the token W places back enters the slots as t arrives. With W empty places in
front of the first query, query t's leaver stands at place t and its window at places t + 1 to t + W, for any T and P.

Shapes: B batch, T new tokens (queries), P tokens held from before, S = P + T, W window, M slots, n query heads,
m KV heads, D head_dim; N blocks of K queries, E = K - 1 + W places that a block's queries see between them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .rotary import PositionEmbeddings, rotate

BLOCK = 32
"""Queries worked on together; within a block the decay between every two tokens is held for every slot."""


@dataclass(frozen=True)
class WindowTokens:
    """Tokens of a window and after: keys not rotated, g the log decay that a token brings when it leaves."""

    k_BmSD: Tensor
    v_BmSD: Tensor
    g_BmSM: Tensor
    valid_BS: Tensor

    @property
    def count(self) -> int:
        """S."""
        return self.valid_BS.shape[1]

    def followed_by(self, new: WindowTokens) -> WindowTokens:
        """These tokens, then the new ones."""
        return WindowTokens(
            torch.cat((self.k_BmSD, new.k_BmSD), dim=2),
            torch.cat((self.v_BmSD, new.v_BmSD), dim=2),
            torch.cat((self.g_BmSM, new.g_BmSM), dim=2),
            torch.cat((self.valid_BS, new.valid_BS), dim=1),
        )

    def last(self, count: int) -> WindowTokens:
        """The last `count` tokens, or all where there are fewer; g copied, so that the rest can be freed."""
        start = max(self.count - count, 0)
        return WindowTokens(
            self.k_BmSD[:, :, start:],
            self.v_BmSD[:, :, start:],
            self.g_BmSM[:, :, start:].clone(),
            self.valid_BS[:, start:].clone(),
        )

    def placed(self, front: int, back: int) -> WindowTokens:
        """Empty places before and after (a negative number takes places away)."""
        k, v, g = (F.pad(x, (0, 0, front, back)) for x in (self.k_BmSD, self.v_BmSD, self.g_BmSM))
        return WindowTokens(k, v, g, F.pad(self.valid_BS, (front, back), value=False))


class SlotState(NamedTuple):
    """Slots of each KV head, fp32, and whether any token has entered them."""

    keys_BmDM: Tensor
    values_BmMD: Tensor
    open_B: Tensor

    @classmethod
    def empty(cls, tokens: WindowTokens) -> SlotState:
        """The slots before the first token."""
        batch, heads, _, slots = tokens.g_BmSM.shape
        dim = tokens.k_BmSD.shape[-1]
        keys = tokens.g_BmSM.new_zeros(batch, heads, dim, slots)
        return cls(keys, keys.transpose(2, 3).contiguous(), tokens.valid_BS.new_zeros(batch))


class _Reading(NamedTuple):
    """What the queries of all blocks need to read the slots.

    within: share of entry j in slot m as query i reads it [B, m, N, K, K, M]; decay: of the block's first state up to
    query i [B, m, N, K, M]; the first states; the entries' keys and values [B, m, N, K, D]; open_BT.
    """

    within: Tensor
    decay: Tensor
    first_keys: Tensor
    first_values: Tensor
    k: Tensor
    v: Tensor
    open_BT: Tensor


def attend(
    q_BnTD: Tensor,
    tokens: WindowTokens,
    slots: SlotState | None,
    rope: PositionEmbeddings,
    readers_n: Tensor,
    window: int,
) -> tuple[Tensor, SlotState]:
    """Outputs [B, n, T, D] in q's dtype, and the slots after the last query.

    tokens: those held from before, at most `window`, then the new ones; rope: tables for positions 0 to S - 1;
    readers_n: the KV head of each query head. fp32 inside.
    """
    num_new, held = q_BnTD.shape[2], tokens.count - q_BnTD.shape[2]
    width, block = min(window, tokens.count), min(BLOCK, num_new)
    back = -num_new % block
    slots = SlotState.empty(tokens) if slots is None else slots
    q_BnTD = q_BnTD * q_BnTD.shape[-1] ** -0.5
    rotated = _rotate(q_BnTD, (rope[0][:, held:], rope[1][:, held:]))
    seen = replace(tokens, k_BmSD=_rotate(tokens.k_BmSD, rope)).placed(width - held, back)
    logits, v_BnNED = _window(_blocks(rotated, block), seen, readers_n, width)
    q_BnNKD, reading = _blocks(q_BnTD, block), None
    if tokens.count > window:
        leavers = tokens.placed(width - held, -width)
        reading, slots = _enter(leavers, slots, block)
        logits = torch.cat((logits, _slot_logits(q_BnNKD, reading, readers_n)), dim=-1)
    weights = logits.softmax(-1)
    places = v_BnNED.shape[-2]
    o_BnNKD = weights[..., :places] @ v_BnNED
    if reading is not None:
        o_BnNKD = o_BnNKD + _slot_outputs(weights[..., places:], reading, readers_n)
    return o_BnNKD.flatten(2, 3)[:, :, :num_new].to(q_BnTD.dtype), slots


def _rotate(x_BhTD: Tensor, rope: PositionEmbeddings) -> Tensor:
    return rotate(x_BhTD.transpose(1, 2), rope).transpose(1, 2)


def _blocks(x_BhTX: Tensor, block: int) -> Tensor:
    """[B, h, T, X] to fp32 [B, h, N, K, X], zeros after the end."""
    padded = F.pad(x_BhTX.float(), (0, 0, 0, -x_BhTX.shape[2] % block))
    return padded.view(*x_BhTX.shape[:2], -1, block, x_BhTX.shape[-1])


def _window(
    q_BnNKD: Tensor, seen: WindowTokens, readers_n: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Logits [B, n, N, K, E] of each query for the places its block sees, and those places' values."""
    block = q_BnNKD.shape[3]
    places = block - 1 + width
    k, v = (
        x[:, :, 1:].float().unfold(2, places, block).transpose(-1, -2).index_select(1, readers_n)
        for x in (seen.k_BmSD, seen.v_BmSD)
    )
    valid_BNE = seen.valid_BS[:, 1:].unfold(1, places, block)
    query = torch.arange(block, device=k.device)[:, None]
    place = torch.arange(places, device=k.device)
    near_KE = (place >= query) & (place < query + width)
    # A query always sees itself, so that rows of padding stay finite.
    own_KE = place == query + width - 1
    allowed = (near_KE & valid_BNE[:, :, None]) | own_KE
    logits = q_BnNKD @ k.transpose(-1, -2)
    return logits.masked_fill(~allowed[:, None], float("-inf")), v


def _enter(leavers: WindowTokens, slots: SlotState, block: int) -> tuple[_Reading, SlotState]:
    """Lets the leavers into the slots, one a query, and says what each query reads."""
    valid_B1T1 = leavers.valid_BS[:, None, :, None]
    g = leavers.g_BmSM.masked_fill(~valid_B1T1, 0.0)
    k, v, g, s = (_blocks(x, block) for x in (leavers.k_BmSD, leavers.v_BmSD, g, 1 - g.exp()))
    total = g.cumsum(-2)
    later = torch.ones(block, block, dtype=torch.bool, device=g.device).triu(1)
    between = (total.unsqueeze(-2) - total.unsqueeze(-3)).masked_fill(
        later[..., None], float("-inf")
    )
    share = s * (total[..., -1:, :] - total).exp()
    added_keys, added_values = k.transpose(-1, -2) @ share, share.transpose(-1, -2) @ v
    decay = total[..., -1, :].exp()
    keys, values = slots.keys_BmDM, slots.values_BmMD
    first_keys, first_values = [], []
    for n in range(g.shape[2]):
        first_keys.append(keys)
        first_values.append(values)
        keys = keys * decay[:, :, n, None, :] + added_keys[:, :, n]
        values = values * decay[:, :, n, :, None] + added_values[:, :, n]
    open_BT = slots.open_B[:, None] | (leavers.valid_BS.cumsum(1) > 0)
    reading = _Reading(
        within=between.exp() * s.unsqueeze(-3),
        decay=total.exp(),
        first_keys=torch.stack(first_keys, dim=2),
        first_values=torch.stack(first_values, dim=2),
        k=k,
        v=v,
        open_BT=open_BT,
    )
    return reading, SlotState(keys, values, open_BT[:, -1])


def _slot_logits(q_BnNKD: Tensor, reading: _Reading, readers_n: Tensor) -> Tensor:
    """Logits [B, n, N, K, M] of the slots as they stand when each query arrives; -inf where none is open."""
    k, within, decay, first = (
        x.index_select(1, readers_n)
        for x in (reading.k, reading.within, reading.decay, reading.first_keys)
    )
    scores = q_BnNKD @ k.transpose(-1, -2)
    logits = torch.einsum("bhnij,bhnijm->bhnim", scores, within) + (q_BnNKD @ first) * decay
    block = q_BnNKD.shape[3]
    closed = ~_blocks(reading.open_BT[:, None, :, None], block).bool()
    return logits.masked_fill(closed, float("-inf"))


def _slot_outputs(weights_BnNKM: Tensor, reading: _Reading, readers_n: Tensor) -> Tensor:
    """The slots' part of the outputs, [B, n, N, K, D]."""
    v, within, decay, first = (
        x.index_select(1, readers_n)
        for x in (reading.v, reading.within, reading.decay, reading.first_values)
    )
    by_entry = torch.einsum("bhnim,bhnijm->bhnij", weights_BnNKM, within)
    return by_entry @ v + (weights_BnNKM * decay) @ first
