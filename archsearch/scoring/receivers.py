"""Receiver effects of every query head and KV group by activation patching (HydraHead, arXiv 2606.20097).

A head's output O is replaced by its output on a corrupt prompt while every later attention block keeps
its clean output. All that the patch changes is then local to a position, which gives an exact shortcut:
one clean and one corrupt forward a pair, and after that only the positions that predict the answer pass
through the later norms and MLPs, all heads of all layers batched.

Legend: P pairs, L layers, H query heads, G KV heads, D head dim, C hidden size, A answer tokens, S streams.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..data.niah import Probe
from ..models.teacher import Teacher
from ..progress import Progress, ignore_progress
from .inputs import GIB
from .pairs import MIN_GAP, PairBatch, forward_tokens, pair_batches
from .streams import feed_forward, head_deltas, tail_precision


@dataclass(frozen=True)
class Effects:
    """Effects of single heads [P, L, H] and of whole KV groups [P, L, G], fp32 on the CPU.

    Rows of NaN are pairs that say nothing: the model does not use what clean and corrupt prompt differ in.
    """

    heads_PLH: Tensor
    groups_PLG: Tensor


def receiver_effects(
    teacher: Teacher,
    probes: Sequence[Probe],
    *,
    decay: float,
    min_gap: float = MIN_GAP,
    memory_bytes: int = 4 * GIB,
    progress: Progress = ignore_progress,
) -> Effects:
    """IE_recv of every head and of every KV group patched as a whole, on every pair (HydraHead's direct effect).

    IE = [m(x) - m(x; O <- O(x'))] / [m(x) - m(x')], with m the mean over the answer tokens j, weighted
    by decay**j, of the clean answer's logit less the distractor's; both prompts are followed by the
    clean answer. A pair whose m(x) - m(x') is not above min_gap gives NaN. Batches of pairs take about
    memory_bytes beside the model. Raises ValueError where a pair's prompts or answers differ in length.
    """
    shape = teacher.shape
    heads_PLH = torch.empty(len(probes), shape.num_layers, shape.num_heads)
    groups_PLG = torch.empty(len(probes), shape.num_layers, shape.num_kv_heads)
    most, done = _most_pairs(teacher, probes, memory_bytes), 0
    with torch.inference_mode(), tail_precision(teacher.model.dtype):
        for indices in pair_batches(
            probes, most, forward_tokens(teacher, probes, memory_bytes // 2)
        ):
            batch = PairBatch.of([probes[i] for i in indices], decay, teacher.device)
            effects_PLX = _effects(teacher, batch, min_gap).float().cpu()
            heads_PLH[indices], groups_PLG[indices] = effects_PLX.split(
                [shape.num_heads, shape.num_kv_heads], -1
            )
            done += len(indices)
            progress(done, len(probes))
    return Effects(heads_PLH, groups_PLG)


def _most_pairs(teacher: Teacher, probes: Sequence[Probe], memory_bytes: int) -> int:
    """Pairs whose patched streams, twice, take half of memory_bytes."""
    shape, longest = teacher.shape, max((len(p.answer) for p in probes), default=1)
    streams = 2 + shape.num_layers * (shape.num_heads + shape.num_kv_heads)
    each = 8 * streams * longest * teacher.model.config.hidden_size
    return max(1, int(memory_bytes // (2 * each)))


@dataclass
class Trace:
    """One layer at the answer positions, clean rows first: head outputs, and what attention adds to the stream."""

    heads_2PAHD: Tensor | None = None
    attended_2PAC: Tensor | None = None


def trace(model: HydraHeadForCausalLM, batch: PairBatch) -> list[Trace]:
    """Runs both prompts of every pair at once and keeps each layer's trace."""
    traces = [Trace() for _ in model.model.layers]
    handles = []
    for layer, kept in zip(model.model.layers, traces, strict=True):

        def keep(_: Any, args: Any, output_2PTC: Tensor, kept: Trace = kept) -> None:
            heads_2PAX = batch.at_answers(args[0])
            kept.heads_2PAHD = heads_2PAX.unflatten(-1, (-1, model.config.head_dim))
            kept.attended_2PAC = batch.at_answers(output_2PTC)

        handles.append(layer.self_attn.o_proj.register_forward_hook(keep))
    try:
        model.model(input_ids=batch.ids_2PT, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return traces


def _effects(teacher: Teacher, batch: PairBatch, min_gap: float) -> Tensor:
    """IE of every head, then of every KV group: [P, L, H + G]."""
    model, shape = teacher.model, teacher.shape
    streams_SPAC = _patched_streams(model, batch, trace(model, batch))
    m_SP = torch.cat(
        [batch.readout(model, model.model.norm(part)) for part in streams_SPAC.split(256)]
    )
    clean_P, corrupt_P = m_SP[0], m_SP[1]
    gap_P = torch.where(clean_P - corrupt_P > min_gap, clean_P - corrupt_P, math.nan)
    effects_SP = (clean_P - m_SP[2:]) / gap_P
    effects_PLX: Tensor = effects_SP.T.reshape(len(gap_P), shape.num_layers, -1)
    return effects_PLX


def _patched_streams(
    model: HydraHeadForCausalLM, batch: PairBatch, traces: Sequence[Trace]
) -> Tensor:
    """The residual stream before the final norm: clean, corrupt, then layer by layer each patched head's and KV
    group's, [2 + L * (H + G), P, A, C].

    All in fp32, and all by one route, so that rounding cancels in their differences.
    """
    config = model.config
    embedded_2PAC = batch.at_answers(model.model.embed_tokens(batch.ids_2PT)).float()
    start_2PAC = embedded_2PAC.unflatten(0, (2, -1))
    each = config.num_attention_heads + config.num_key_value_heads
    size = (2 + len(traces) * each, *start_2PAC.shape[1:])
    streams_SPAC: Tensor = start_2PAC.new_empty(size)
    streams_SPAC[:2] = start_2PAC
    alive = 2
    for layer, kept in zip(model.model.layers, traces, strict=True):
        assert kept.heads_2PAHD is not None
        assert kept.attended_2PAC is not None
        clean_PAC, corrupt_PAC = kept.attended_2PAC.float().unflatten(0, (2, -1))
        streams_SPAC[1] += corrupt_PAC - clean_PAC
        streams_SPAC[:alive] += clean_PAC
        clean_PAHD, corrupt_PAHD = kept.heads_2PAHD.float().unflatten(0, (2, -1))
        deltas_HXC = head_deltas(
            layer.self_attn.o_proj.weight, (corrupt_PAHD - clean_PAHD).flatten(0, 1)
        )
        deltas_HPAC = deltas_HXC.unflatten(1, clean_PAC.shape[:2])
        whole_GPAC = deltas_HPAC.unflatten(0, (config.num_key_value_heads, -1)).sum(1)
        patched = streams_SPAC[alive : alive + each]
        torch.add(streams_SPAC[0], torch.cat([deltas_HPAC, whole_GPAC]), out=patched)
        alive += each
        streams_SPAC[:alive] = feed_forward(layer, streams_SPAC[:alive])
    return streams_SPAC
