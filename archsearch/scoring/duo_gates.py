"""Learned gates: which KV groups need more than the first and the latest tokens, after DuoAttention.

Source: Xiao et al. 2024, DuoAttention (arXiv 2410.10819). Every KV group has a gate a in [0, 1]; its heads give
a * full attention + (1 - a) * streaming attention. The gates are trained, all weights frozen, to keep the final
hidden states at the answers of passkey prompts, under an L1 penalty.

Legend: T tokens, A answer tokens, C hidden size, L layers, G KV heads, R query heads a KV head, n query heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..attention.full import FullHeads, Mask
from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..data.niah import Probe
from ..models.teacher import Teacher
from ..progress import Progress, ignore_progress
from .head_scores import HeadScores
from .inputs import GIB, ScoreInputs
from .retrieval_heads import retrieval_pairs

SINK_SHARE, LEAST_SINK = 1 / 64, 4
RECENT_SHARE, LEAST_RECENT = 1 / 16, 16
"""What streaming attention sees, as a share of the prompt: 16 first and 64 latest tokens of 1024. DuoAttention
trains with 128 and 256 of up to 32K, which would see far too much of prompts as short as ours."""

PENALTY = 0.05
"""Weight of the mean gate. The paper writes sums, of gates and of squared errors; with the mean error and the sum of
gates, 17 of the tiny teacher's 24 gates end at exactly 0, so that nothing ranks their groups."""

LEARNING_RATE = 0.02
RAMP_SHARE, LEAST_RATE = 0.2, 0.1
"""The learning rate rises over the first and falls over the last fifth of the steps, from and to a tenth."""


def duo_gates(inputs: ScoreInputs) -> HeadScores:
    """The gate of its KV group is each head's score; spread is not measured.

    Prompts are the clean ones of the retrieval pairs, one a step, gone over in random order.
    """
    teacher = inputs.teacher
    learned = learn_gates(
        teacher,
        retrieval_pairs(inputs),
        steps=inputs.config.gate_steps,
        seed=inputs.seed,
        memory_bytes=inputs.memory_bytes,
        progress=inputs.progress,
    )
    readers = teacher.shape.num_heads // teacher.shape.num_kv_heads
    scores_LH = learned.gates_LG.repeat_interleave(readers, dim=-1)
    return HeadScores.of("duo_gates", scores_LH, learned.gates_LG)


class Learned(NamedTuple):
    """Trained gates, fp32 on the CPU, and of each step the mean squared error and the penalty."""

    gates_LG: Tensor
    losses: list[tuple[float, float]]


def learn_gates(
    teacher: Teacher,
    probes: Sequence[Probe],
    *,
    steps: int,
    seed: int = 0,
    memory_bytes: int = 4 * GIB,
    progress: Progress = ignore_progress,
) -> Learned:
    """Trains a gate a KV group on the clean prompts of probes, answers teacher-forced.

    The loss is the squared error of the final normed hidden states at the positions that predict the answer, mean
    over positions and C, plus PENALTY times the mean gate.
    """
    model, shape = teacher.model, teacher.shape
    rows = [torch.tensor([p.clean_row], device=teacher.device) for p in probes]
    sizes = [len(probe.answer) for probe in probes]
    with torch.no_grad():
        targets = [
            _final_states(model, ids_1T, size) for ids_1T, size in zip(rows, sizes, strict=True)
        ]
    gates_LG = torch.ones(shape.num_layers, shape.num_kv_heads, device=teacher.device)
    gates_LG.requires_grad_()
    optimiser = torch.optim.Adam([gates_LG], lr=LEARNING_RATE)
    losses = []
    with gated(model, gates_LG), torch.enable_grad():
        for step, place in zip(range(steps), _order(len(rows), seed), strict=False):
            optimiser.param_groups[0]["lr"] = LEARNING_RATE * rate_factor(step, steps)
            fits = _graph_bytes(model, rows[place].shape[1]) <= memory_bytes
            states_AC = _final_states(model, rows[place], sizes[place], recompute=not fits)
            error = (states_AC - targets[place]).square().mean()
            penalty = PENALTY * gates_LG.abs().mean()
            optimiser.zero_grad()
            (error + penalty).backward()
            optimiser.step()
            with torch.no_grad():
                gates_LG.clamp_(0, 1)
            losses.append((error.item(), penalty.item()))
            progress(step + 1, steps)
    return Learned(gates_LG.detach().cpu(), losses)


def rate_factor(step: int, steps: int) -> float:
    """The learning rate of a step as a share of the highest."""
    ramp = max(1, round(RAMP_SHARE * steps))
    return min(1.0, max(LEAST_RATE, min(step + 1, steps - step) / ramp))


@contextmanager
def gated(model: HydraHeadForCausalLM, gates_LG: Tensor) -> Iterator[None]:
    """Runs every layer's heads as full and as streaming attention, mixed by its row of gates."""
    handles = [
        layer.self_attn.full.register_forward_hook(_mixing(gates_LG, index))
        for index, layer in enumerate(model.model.layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def streaming_mask(tokens: int, device: torch.device) -> Tensor:
    """Which keys a query of streaming attention may see, bool [1, 1, T, T]: sink and recent ones, causally."""
    sink = max(LEAST_SINK, round(SINK_SHARE * tokens))
    recent = max(LEAST_RECENT, round(RECENT_SHARE * tokens))
    places_T = torch.arange(tokens, device=device)
    distance_TT = places_T[:, None] - places_T
    seen_TT = (distance_TT >= 0) & ((distance_TT < recent) | (places_T < sink))
    return seen_TT[None, None]


def _mixing(gates_LG: Tensor, index: int) -> Any:
    """A forward hook of FullHeads that mixes in streaming attention."""

    def mix(full: FullHeads, args: tuple[Any, ...], full_1TnD: Tensor) -> Tensor:
        x_1TC, embeddings, _, _, keys_values = args
        tokens = x_1TC.shape[1]
        mask = Mask(pairs_B1TS=streaming_mask(tokens, x_1TC.device))
        stream_1TnD = full.forward(x_1TC, embeddings, mask, None, keys_values)
        readers = len(full.heads) // gates_LG.shape[1]
        gate_n1 = gates_LG[index].repeat_interleave(readers).unsqueeze(-1)
        # In fp32, so that a step of a gate is not lost to bf16.
        mixed_1TnD = gate_n1 * full_1TnD.float() + (1 - gate_n1) * stream_1TnD.float()
        return mixed_1TnD.to(full_1TnD.dtype)

    return mix


def _final_states(
    model: HydraHeadForCausalLM, ids_1T: Tensor, num_answers: int, *, recompute: bool = False
) -> Tensor:
    """Final normed hidden states at the last positions, fp32 [A, C]; with recompute, one layer's graph is held."""
    stream_1TC = model.model.embed_tokens(ids_1T)
    run = model.model.run_layers
    for index in range(len(model.model.layers)):
        if recompute:
            stream_1TC = checkpoint(
                run, stream_1TC, index, index + 1, use_reentrant=False, preserve_rng_state=False
            )
        else:
            stream_1TC = run(stream_1TC, index, index + 1)
    states_AC: Tensor = model.model.norm(stream_1TC[0, -num_answers:])
    return states_AC.float()


def _graph_bytes(model: HydraHeadForCausalLM, tokens: int) -> int:
    """About what the graph of a whole forward with both branches takes, where SDPA forms the masked matrix."""
    config = model.config
    heads = config.num_attention_heads * (14 * config.head_dim + 2 * tokens)
    numbers = 8 * config.hidden_size + heads + 5 * config.intermediate_size
    return int(config.num_hidden_layers * tokens * numbers * model.dtype.itemsize)


def _order(count: int, seed: int) -> Iterator[int]:
    """Places of prompts without end, each round in a new order."""
    rng = Random(f"gates/{seed}")
    while True:
        yield from rng.sample(range(count), count)
