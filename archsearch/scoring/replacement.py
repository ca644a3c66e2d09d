"""Damage of replacing one head alone by its twin: KL from the teacher, for every head.

Twins read what the teacher's attention block reads, so one pass of each layer's twins over the teacher's
own hidden states gives the output of all its heads; each swap then adds a difference to the residual
stream, and only the layers from there on have to run again.

Legend: N sequences, T tokens, C hidden size, L layers, H query heads, D head dim, K swaps at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..evaluation.divergence import divergence_at, head_weight, target_of
from ..models.supernet import Supernet
from ..models.teacher import Teacher
from ..progress import Progress, ignore_progress
from .patching import feed_forward, head_deltas

BATCH_TOKENS = 8192
"""Tokens that run through the later layers at once, over all swaps of a batch."""


def replacement_kl(
    teacher: Teacher,
    supernet: Supernet,
    tokens_NT: Tensor,
    progress: Progress = ignore_progress,
    *,
    batch_tokens: int = BATCH_TOKENS,
) -> Tensor:
    """Mean KL(teacher || teacher with head (l, h) as its twin) in nats a token, fp32 [L, H] on the CPU.

    Costs about half a forward over the tokens a head. progress counts heads, sequence by sequence.
    Raises ValueError where tokens are not [N, T] or empty.
    """
    if tokens_NT.ndim != 2 or tokens_NT.numel() == 0:
        raise ValueError(f"tokens have shape {tuple(tokens_NT.shape)}, not [N, T]")
    shape = teacher.shape
    sums_LH = torch.zeros(shape.num_layers, shape.num_heads, dtype=torch.float64)
    total, done = len(tokens_NT) * shape.total_heads, 0
    with torch.inference_mode():
        for ids_1T in torch.split(tokens_NT.long().to(teacher.device), 1):
            for layer, head, kl_sum in _sequence_sums(teacher, supernet, ids_1T, batch_tokens):
                sums_LH[layer, head] += kl_sum
                done += 1
                progress(done, total)
    return (sums_LH / tokens_NT.numel()).float()


@dataclass
class LayerTrace:
    """One layer of the teacher on one sequence."""

    heads_THD: Tensor
    """Head outputs before o_proj."""
    twins_THD: Tensor
    """The twins' outputs on the same input."""
    middle_TC: Tensor
    """The residual stream after the attention block."""


def _sequence_sums(
    teacher: Teacher, supernet: Supernet, ids_1T: Tensor, batch_tokens: int
) -> Iterator[tuple[int, int, float]]:
    """Yields (layer, head, sum of KL over the tokens) for every head."""
    model = teacher.model
    traces, hidden_TC = _trace_twins(model, supernet, ids_1T)
    weight_VC = head_weight(model)
    target = target_of(hidden_TC, weight_VC, weight_VC)
    step = max(1, batch_tokens // ids_1T.shape[1])
    for index, kept in enumerate(traces):
        layer = model.model.layers[index]
        deltas_HTC = head_deltas(
            layer.self_attn.o_proj.weight, (kept.twins_THD - kept.heads_THD).to(kept.heads_THD)
        )
        for start in range(0, len(deltas_HTC), step):
            middle_KTC = kept.middle_TC + deltas_HTC[start : start + step]
            out_KTC = model.model.run_layers(
                feed_forward(layer, middle_KTC), index + 1, len(traces)
            )
            kl_KT, _ = divergence_at(target, weight_VC, model.model.norm(out_KTC))
            for offset, kl_sum in enumerate(kl_KT.sum(-1, dtype=torch.float64).tolist()):
                yield index, start + offset, kl_sum


def _trace_twins(
    model: HydraHeadForCausalLM, supernet: Supernet, ids_1T: Tensor
) -> tuple[list[LayerTrace], Tensor]:
    """Runs the teacher and every twin once; also returns the final normed hidden states, [T, C]."""
    found: list[dict[str, Tensor]] = [{} for _ in model.model.layers]
    handles = []
    for layer, twins, kept in zip(model.model.layers, supernet.twins, found, strict=True):
        handles += [
            layer.self_attn.register_forward_pre_hook(_keep_twins(twins, kept)),
            layer.self_attn.o_proj.register_forward_pre_hook(_keep_input("heads", kept)),
            layer.post_attention_layernorm.register_forward_pre_hook(_keep_input("middle", kept)),
        ]
    try:
        hidden_1TC = model.model(input_ids=ids_1T, use_cache=False).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    traces = [
        LayerTrace(kept["heads"].view_as(kept["twins"])[0], kept["twins"][0], kept["middle"][0])
        for kept in found
    ]
    return traces, hidden_1TC[0]


def _keep_twins(twins: nn.Module, kept: dict[str, Tensor]) -> Callable[..., None]:
    """A pre-hook of an attention block that runs its twins on the block's own input."""

    dtype = next(twins.parameters()).dtype

    def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
        x_1TC, (cos, sin) = args[0], args[1]
        kept["twins"] = twins(x_1TC.to(dtype), (cos.to(dtype), sin.to(dtype)))

    return hook


def _keep_input(name: str, kept: dict[str, Tensor]) -> Callable[..., None]:
    """A pre-hook that keeps a module's first argument."""

    def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
        kept[name] = args[0]

    return hook
