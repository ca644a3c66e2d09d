"""Receiver effects of every query head by activation patching (HydraHead, arXiv 2606.20097).

A head's output O is replaced by its output on a corrupt prompt while every later attention block keeps
its clean output. All that the patch changes is then local to a position, which gives an exact shortcut:
one clean and one corrupt forward a pair, and after that only the positions that predict the answer pass
through the later norms and MLPs, all heads of all layers batched.

Legend: P pairs, L layers, H query heads, D head dim, C hidden size, A answer tokens, S patched streams.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..data.niah import Probe
from ..models.teacher import Teacher
from ..progress import Progress, ignore_progress

MIN_GAP = 0.1
"""Least m(x) - m(x'), in logits, at which a pair says anything about heads."""

MLP_ROWS = 4096
"""Most positions that pass through an MLP at once; bounds its intermediate activations."""

_LOG = logging.getLogger(__name__)


def receiver_effects(
    teacher: Teacher,
    probes: Sequence[Probe],
    *,
    decay: float,
    min_gap: float = MIN_GAP,
    progress: Progress = ignore_progress,
) -> Tensor:
    """IE_recv of every head on every pair, fp32 [P, L, H] on the CPU (HydraHead's direct effect).

    IE = [m(x) - m(x; O <- O(x'))] / [m(x) - m(x')], with m the mean over the answer tokens j, weighted
    by decay**j, of the clean answer's logit less the distractor's; both prompts are followed by the
    clean answer. A pair whose m(x) - m(x') is not above min_gap (the model does not use the needle
    there) gives a row of NaN. Raises ValueError where a pair's prompts or answers differ in length.
    """
    shape = teacher.shape
    effects_PLH = torch.empty(len(probes), shape.num_layers, shape.num_heads)
    for index, probe in enumerate(probes):
        effects_PLH[index] = _pair_effects(teacher, probe, decay=decay, min_gap=min_gap)
        progress(index + 1, len(probes))
    unusable = int(effects_PLH.isnan().all(-1).all(-1).sum())
    if unusable:
        _LOG.warning("scores: the teacher does not use the needle in %d pairs", unusable)
    return effects_PLH


@dataclass(frozen=True)
class Readout:
    """m: the weighted mean logit difference, linear in the final normed hidden states."""

    contrast_AC: Tensor
    """lm_head row of each clean answer token less that of the distractor's token."""
    weight_A: Tensor
    """decay**j over its sum."""

    @classmethod
    def of(cls, model: HydraHeadForCausalLM, probe: Probe, decay: float) -> Readout:
        """The readout of a pair; the lm_head has no bias, so logits are never needed in full."""
        weight_VC = model.lm_head.weight
        answer = torch.tensor(probe.answer, device=weight_VC.device)
        distractor = torch.tensor(probe.distractor, device=weight_VC.device)
        weight_A = decay ** torch.arange(len(answer), device=weight_VC.device, dtype=torch.float64)
        contrast_AC = weight_VC[answer].float() - weight_VC[distractor].float()
        return cls(contrast_AC, (weight_A / weight_A.sum()).float())

    def __call__(self, hidden_SAC: Tensor) -> Tensor:
        """m of each stream, [S] in logits."""
        difference_SA = (hidden_SAC.float() * self.contrast_AC).sum(-1)
        readout_S: Tensor = difference_SA @ self.weight_A
        return readout_S


@dataclass
class Trace:
    """One layer at the answer positions, for the clean run (0) and the corrupt run (1)."""

    heads_2AHD: Tensor | None = None
    """Head outputs before o_proj."""
    attended_2AC: Tensor | None = None
    """The attention block's output, as added to the residual stream."""
    middle_2AC: Tensor | None = None
    """The residual stream after the attention block."""


def _pair_effects(teacher: Teacher, probe: Probe, *, decay: float, min_gap: float) -> Tensor:
    """The effects of one pair, [L, H]."""
    model, shape = teacher.model, teacher.shape
    ids_2T = pair_ids(probe).to(teacher.device)
    with torch.inference_mode():
        traces, hidden_2AC = trace(model, ids_2T, len(probe.answer))
        readout = Readout.of(model, probe, decay)
        readout_S = readout(model.model.norm(_patched_streams(model, traces))).cpu()
        clean, patched_LH = readout_S[0], readout_S[1:].view(shape.num_layers, shape.num_heads)
        gap = float(clean) - float(readout(hidden_2AC)[1])
        if not gap > min_gap:
            return torch.full_like(patched_LH, math.nan)
        return (clean - patched_LH) / gap


def pair_ids(probe: Probe) -> Tensor:
    """Clean and corrupt prompt, each followed by the clean answer but for its last token, [2, T]."""
    same_prompts = len(probe.prompt) == len(probe.corrupt_prompt)
    if not same_prompts or len(probe.answer) != len(probe.distractor) or not probe.answer:
        raise ValueError("a pair needs prompts of one length and answers of one length")
    forced = probe.answer[:-1]
    return torch.tensor([probe.prompt + forced, probe.corrupt_prompt + forced])


def trace(
    model: HydraHeadForCausalLM, ids_2T: Tensor, num_positions: int
) -> tuple[list[Trace], Tensor]:
    """Runs both prompts at once and keeps each layer's trace at the last `num_positions` positions.

    Also returns the final normed hidden states there, [2, A, C].
    """
    head_dim, last = model.config.head_dim, slice(-num_positions, None)
    traces = [Trace() for _ in model.model.layers]
    handles = []
    for layer, kept in zip(model.model.layers, traces, strict=True):

        def keep_heads(_: Any, args: Any, output_2TC: Tensor, kept: Trace = kept) -> None:
            kept.heads_2AHD = args[0][:, last].unflatten(-1, (-1, head_dim))
            kept.attended_2AC = output_2TC[:, last]

        def keep_middle(_: Any, args: Any, kept: Trace = kept) -> None:
            kept.middle_2AC = args[0][:, last]

        handles.append(layer.self_attn.o_proj.register_forward_hook(keep_heads))
        handles.append(layer.post_attention_layernorm.register_forward_pre_hook(keep_middle))
    try:
        hidden_2TC = model.model(input_ids=ids_2T, use_cache=False).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    return traces, hidden_2TC[:, last]


def _patched_streams(model: HydraHeadForCausalLM, traces: Sequence[Trace]) -> Tensor:
    """The residual stream before the final norm, [1 + L * H, A, C]: clean, then each patched head's.

    All in fp32. The clean stream takes the same route as the others, so that rounding cancels in
    their difference.
    """
    streams_SAC: Tensor | None = None
    for layer, kept in zip(model.model.layers, traces, strict=True):
        assert kept.heads_2AHD is not None
        assert kept.attended_2AC is not None
        assert kept.middle_2AC is not None
        clean_1AC = kept.middle_2AC[:1].float()
        change_AHD = kept.heads_2AHD[1].float() - kept.heads_2AHD[0].float()
        patched_HAC = clean_1AC + head_deltas(layer.self_attn.o_proj.weight, change_AHD)
        if streams_SAC is None:
            streams_SAC = torch.cat([clean_1AC, patched_HAC])
        else:
            streams_SAC = torch.cat([streams_SAC + kept.attended_2AC[0], patched_HAC])
        streams_SAC = feed_forward(layer, streams_SAC)
    assert streams_SAC is not None
    return streams_SAC


def head_deltas(weight_CX: Tensor, change_AHD: Tensor) -> Tensor:
    """What a change of each head's output alone adds to the residual stream, [H, A, C].

    weight_CX is o_proj's weight, its columns head after head (X = H * D); the result has change_AHD's dtype.
    """
    weight_CHD = weight_CX.to(change_AHD.dtype).view(len(weight_CX), *change_AHD.shape[-2:])
    return torch.einsum("ahd,chd->hac", change_AHD, weight_CHD)


def feed_forward(layer: Any, middle_SAC: Tensor) -> Tensor:
    """The second half of a layer (norm, MLP, residual) on any positions, in chunks of MLP_ROWS.

    Runs in the dtype of middle_SAC: in bf16 a small patch would vanish beside the residual stream.
    """
    weights = {name: p.to(middle_SAC.dtype) for name, p in layer.mlp.named_parameters()}
    parts = []
    for rows_MC in torch.split(middle_SAC.flatten(0, -2), MLP_ROWS):
        normed_MC = layer.post_attention_layernorm(rows_MC).to(rows_MC.dtype)
        parts.append(rows_MC + functional_call(layer.mlp, weights, (normed_MC,)))
    return torch.cat(parts).view_as(middle_SAC)
