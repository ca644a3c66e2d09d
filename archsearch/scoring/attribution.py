"""Attribution patching: the effects of all heads to first order, from one backward a batch of pairs.

Source: Nanda 2023, Attribution Patching; Syed, Rager and Conmy 2023 (arXiv 2310.10348); here of head outputs.
m(x; O <- O(x')) is expanded around the clean run, so that the effect of head (l, h) is about the sum over positions
of dm/dO . (O(x) - O(x')), over m(x) - m(x'). Unlike the receiver effects, nothing is frozen: the gradient also flows
through later attention blocks and from earlier positions. It estimates a head's total effect, of which the receiver
effect is the part that takes no later attention.

Legend: P pairs, T tokens, A answer tokens, C hidden size, L layers, H query heads, D head dim, Y = H * D.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..data.niah import Probe
from ..models.teacher import Teacher
from ..progress import Progress, ignore_progress
from .composite import Evidence, head_scores
from .head_scores import HeadScores
from .inputs import GIB, ScoreInputs
from .pairs import MIN_GAP, PairBatch, forward_tokens, pair_batches

_MOST_PAIRS = 64
"""Pairs of a batch, however short they are."""

_LOG = logging.getLogger(__name__)


def attribution(inputs: ScoreInputs) -> HeadScores:
    """Mean estimated effect a capability over the range among heads, mean over capabilities: 0 is no effect.

    Consistency is told but does not weigh, and the smallest effect, which may be negative, is not made 0. To first order effects add up: a KV group's effect is the sum of its heads', signs included. Capabilities keep
    the estimates as recv. inputs' pairs are usable ones: only one whose prompts change nothing at all is left out.
    Raises ValueError where no pair is left.
    """
    heads: dict[str, dict[str, Evidence]] = {}
    groups: dict[str, dict[str, Evidence]] = {}
    effects = iter(
        attribution_effects(
            inputs.teacher,
            inputs.pairs(),
            decay=inputs.config.decay,
            min_gap=-math.inf,
            memory_bytes=inputs.memory_bytes,
            progress=inputs.progress,
        )
    )
    for name, probes in inputs.capabilities.items():
        heads[name], groups[name] = {}, {}
        for probe, found in probes.items():
            rows = [row for row in (next(effects) for _ in found.pairs) if row.isfinite().all()]
            if not rows:
                _LOG.warning("attribution: no pair of %s is usable, so that it is left out", probe)
                continue
            effects_PLH = torch.stack(rows)
            by_group = effects_PLH.unflatten(-1, (inputs.teacher.shape.num_kv_heads, -1))
            heads[name][probe] = Evidence(effects_PLH)
            groups[name][probe] = Evidence(by_group.sum(-1))
    heads, groups = ({n: p for n, p in each.items() if p} for each in (heads, groups))
    return head_scores(
        "attribution", heads, groups, inputs.config.threshold, inputs.counts(), signed=True
    )


def attribution_effects(
    teacher: Teacher,
    pairs: Sequence[Probe],
    *,
    decay: float,
    min_gap: float = MIN_GAP,
    memory_bytes: int = 4 * GIB,
    progress: Progress = ignore_progress,
) -> Tensor:
    """First-order effect of every head on every pair, fp32 [P, L, H] on the CPU, in the unit of receiver effects.

    A row is NaN where m(x) - m(x') is not above min_gap. Batches take about memory_bytes: each layer is run once
    more for its backward, so that the graph of one layer alone is held. Costs about four forwards. Raises
    ValueError where a pair's prompts or answers differ in length.
    """
    shape, done = teacher.shape, 0
    effects_PLH = torch.empty(len(pairs), shape.num_layers, shape.num_heads)
    # A forward is counted as well as the graph, for what fp32 attention keeps on a GPU.
    max_tokens = min(
        max(1, memory_bytes // _token_bytes(teacher.model)),
        forward_tokens(teacher, pairs, memory_bytes),
    )
    for places in pair_batches(pairs, _MOST_PAIRS, max_tokens):
        batch = PairBatch.of([pairs[place] for place in places], decay, teacher.device)
        effects_PLH[places] = _batch_effects(teacher.model, batch, min_gap).cpu()
        done += len(places)
        progress(done, len(pairs))
    return effects_PLH


def _token_bytes(model: HydraHeadForCausalLM) -> int:
    """About what a token of a clean or corrupt row takes.

    A layer keeps two tensors a pair; one layer's graph is held, and about as much again while it is walked back.
    """
    config = model.config
    heads = config.num_attention_heads * config.head_dim
    kept = config.num_hidden_layers * (config.hidden_size + heads) / 2
    graph = 8 * config.hidden_size + 8 * heads + 6 * config.intermediate_size
    return int((kept + graph) * model.dtype.itemsize)


@dataclass(frozen=True)
class Record:
    """A clean and a corrupt forward."""

    streams: list[Tensor]
    """The clean residual stream [P, T, C] before each layer."""
    changes: list[Tensor]
    """Of each layer, clean less corrupt head outputs before o_proj, [P, T, Y]."""
    last_2PTC: Tensor
    """The residual stream after all layers, clean rows first."""


def _batch_effects(model: HydraHeadForCausalLM, batch: PairBatch, min_gap: float) -> Tensor:
    """The effects of a batch's pairs, [P, L, H]."""
    with torch.no_grad():
        record = _record(model, batch.ids_2PT)
        m_2P = _readout(model, batch, record.last_2PTC)
    gap_P = m_2P[0] - m_2P[1]
    stream_PTC = record.last_2PTC[: len(gap_P)].clone().requires_grad_()
    with torch.enable_grad():
        clean = _readout(model, batch, stream_PTC).sum()
        [grad_PTC] = torch.autograd.grad(clean, stream_PTC)
    effects: list[Tensor] = []
    for index in reversed(range(len(record.streams))):
        grad_PTC, grad_PTY = _layer_gradients(model, index, record.streams.pop(), grad_PTC)
        product_PTY = grad_PTY.float() * record.changes.pop().float()
        effects.append(product_PTY.sum(1).unflatten(-1, (-1, model.config.head_dim)).sum(-1))
    effects_PLH = torch.stack(effects[::-1], 1) / gap_P[:, None, None]
    return effects_PLH.masked_fill(~(gap_P > min_gap)[:, None, None], math.nan)


def _record(model: HydraHeadForCausalLM, ids_2PT: Tensor) -> Record:
    half = len(ids_2PT) // 2
    streams, changes = [], []
    stream_2PTC = model.model.embed_tokens(ids_2PT)
    for index in range(len(model.model.layers)):
        streams.append(stream_2PTC[:half].clone())
        with _head_outputs(model, index) as kept:
            stream_2PTC = model.model.run_layers(stream_2PTC, index, index + 1)
        changes.append(kept[0][:half] - kept[0][half:])
    return Record(streams, changes, stream_2PTC)


def _readout(model: HydraHeadForCausalLM, batch: PairBatch, stream_RTC: Tensor) -> Tensor:
    """m from the residual stream after all layers: [2, P] of clean and corrupt rows, [1, P] of clean rows."""
    hidden_RAC = model.model.norm(batch.at_answers(stream_RTC))
    return batch.readout(model, hidden_RAC.unflatten(0, (-1, len(batch.columns_PA))))


def _layer_gradients(
    model: HydraHeadForCausalLM, index: int, stream_PTC: Tensor, grad_PTC: Tensor
) -> tuple[Tensor, Tensor]:
    """From the gradient at a layer's output, those at its input [P, T, C] and at its head outputs [P, T, Y]."""
    # The weights are frozen, so that the input has to be what asks for gradients.
    stream_PTC.requires_grad_()
    with torch.enable_grad(), _head_outputs(model, index) as kept:
        output_PTC = model.model.run_layers(stream_PTC, index, index + 1)
        grad_in_PTC, grad_PTY = torch.autograd.grad(output_PTC, (stream_PTC, kept[0]), grad_PTC)
    return grad_in_PTC, grad_PTY


@contextmanager
def _head_outputs(model: HydraHeadForCausalLM, index: int) -> Iterator[list[Tensor]]:
    """Keeps what o_proj of a layer reads, in a list that is filled when the layer runs."""
    kept: list[Tensor] = []

    def keep(_: Any, args: tuple[Any, ...]) -> None:
        kept.append(args[0])

    handle = model.model.layers[index].self_attn.o_proj.register_forward_pre_hook(keep)
    try:
        yield kept
    finally:
        handle.remove()
