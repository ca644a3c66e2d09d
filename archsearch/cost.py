"""Analytic costs of a head map: cache bytes under GQA, and attention FLOPs. No torch."""

from __future__ import annotations

from .headmap import HeadMap, Operator

STATE_BYTES = 4
"""Recurrent state is kept in fp32."""


def kv_cache_bytes(head_map: HeadMap, context: int, *, element_bytes: int = 2) -> int:
    """Bytes of K and V that one sequence of `context` tokens needs.

    A KV head is cached in full once if any FA query head of its group reads it; an NHA head whose KV head
    is not cached in full keeps a window of it.
    """
    dim, total = head_map.model.head_dim, 0
    for layer in range(head_map.model.num_layers):
        full = set(head_map.kv_heads(layer, Operator.FULL))
        windowed = set(head_map.kv_heads(layer, Operator.NHA)) - full
        tokens = len(full) * context + len(windowed) * min(head_map.window[layer] or 0, context)
        total += 2 * tokens * dim * element_bytes
    return total


def state_bytes(head_map: HeadMap) -> int:
    """Bytes of recurrent state: D x D a GDN head, 2 x slots x D a KV head with NHA heads, in fp32."""
    dim, elements = head_map.model.head_dim, 0
    for layer in range(head_map.model.num_layers):
        elements += len(head_map.heads(layer, Operator.GDN)) * dim * dim
        slots = head_map.slots[layer] or 0
        elements += len(head_map.kv_heads(layer, Operator.NHA)) * 2 * slots * dim
    return elements * STATE_BYTES


def cache_bytes(head_map: HeadMap, context: int, *, element_bytes: int = 2) -> int:
    """All that decoding keeps for one sequence at `context` tokens: KV bytes plus state bytes."""
    return kv_cache_bytes(head_map, context, element_bytes=element_bytes) + state_bytes(head_map)


def attention_flops(head_map: HeadMap, context: int, *, chunk: int = 64) -> int:
    """FLOPs of the attention cores of one forward over `context` tokens, projections not counted.

    FA: 2 T^2 D a head (causal half of QK^T and PV). GDN: chunkwise, about 2 T (5 C D + 4 D^2) a head.
    NHA: 4 T (W + 2 M) D a head.
    """
    dim, total = head_map.model.head_dim, 0
    for layer in range(head_map.model.num_layers):
        total += len(head_map.heads(layer, Operator.FULL)) * 2 * context * context * dim
        gdn = 2 * context * (5 * min(chunk, context) * dim + 4 * dim * dim)
        total += len(head_map.heads(layer, Operator.GDN)) * gdn
        width = min(head_map.window[layer] or 0, context) + 2 * (head_map.slots[layer] or 0)
        total += len(head_map.heads(layer, Operator.NHA)) * 4 * context * width * dim
    return total
