"""Starts each twin from statistics of its head, before any gradient step.

Decay from how far back the head looks, write strength from how sharply it looks (after Taylor-Calibrate),
then the gamma and bias that fit the head's output best, in closed form; supernet.init has the other choices.

Shapes: L layers, N sequences, T tokens, C hidden size, H query heads, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import cast

import torch
from torch import Tensor, nn

from ..attention.full import FullHeads
from ..attention.fusion import RMSNorm
from ..attention.gdn import GatedDeltaHeads
from ..attention.rotary import PositionEmbeddings
from ..config import HalfLifeName, TwinInitConfig, WriteName
from ..models.supernet import Supernet
from ..models.teacher import Teacher
from .attention_statistics import AttentionStatistics, attention_statistics
from .loop import full_precision, mixed_precision
from .output_fit import OutputFit
from .taps import visit_layers
from .twin_error import output_roots

STATISTICS_SEQUENCES = 4
"""Sequences whose attention is looked at."""

SHORTEST_DISTANCE_TOKENS = 1.0
WRITE_FLOOR, WRITE_SPAN = 0.3, 0.4
"""Write strength of a head that attends evenly, and what a head that attends to one token has on top."""

MIGRATED = ("q_proj", "k_proj", "v_proj")


def calibrate(
    teacher: Teacher,
    supernet: Supernet,
    tokens_NT: Tensor,
    init: TwinInitConfig | None = None,
    *,
    seed: int = 0,
    layers: Collection[int] | None = None,
) -> None:
    """Sets dt_bias, the bias of b, gamma and (where twins have one) bias, in place; projections too where init says so.

    Two passes of the teacher over tokens, best a few thousand of them. The twins must be freshly
    migrated: A_log, a_proj and the weight of b_proj zero, the gate the identity. seed draws random projections.
    Statistics are taken in layers alone, where given.
    """
    init = init or TwinInitConfig()
    layers = range(len(supernet.twins)) if layers is None else layers
    tokens_NT = tokens_NT.long().to(teacher.device)
    with torch.no_grad():
        if init.projections == "random":
            _redraw(teacher, supernet, seed)
        if init.qk_norm == "ones":
            _reset_norms(supernet)
        _set_memory(teacher, supernet, tokens_NT[:STATISTICS_SEQUENCES], init, layers)
        _fit_outputs(teacher, supernet, tokens_NT, init, layers)


def _redraw(teacher: Teacher, supernet: Supernet, seed: int) -> None:
    """Random q, k and v, as the model's own initialisation would draw them; biases zero."""
    # On the CPU, so that all devices draw the same.
    generator = torch.Generator().manual_seed(seed)
    std = teacher.model.config.initializer_range
    for twin in supernet.twins:
        for name in MIGRATED:
            linear = twin.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            linear.weight.copy_(std * torch.randn(linear.weight.shape, generator=generator))
            if linear.bias is not None:
                linear.bias.zero_()


def _reset_norms(supernet: Supernet) -> None:
    for twin in supernet.twins:
        for norm in (twin.q_norm, twin.k_norm):
            if isinstance(norm, RMSNorm):
                norm.weight.fill_(1)


def _set_memory(
    teacher: Teacher,
    supernet: Supernet,
    tokens_NT: Tensor,
    init: TwinInitConfig,
    layers: Collection[int],
) -> None:
    def visit(layer: int, x: Tensor, rope: PositionEmbeddings, _: Tensor) -> None:
        full, twin = teacher.model.model.layers[layer].self_attn.full, supernet.twins[layer]
        assert isinstance(full, FullHeads)
        assert isinstance(twin, GatedDeltaHeads)
        found = attention_statistics(full, x, rope)
        half_life_H = HALF_LIVES[init.half_life](found, init)
        # softplus(dt_bias) = ln 2 / half-life, as A_log and a_proj are zero; log(e^rate - 1) without overflow.
        rate_H = math.log(2) / half_life_H
        twin.dt_bias.copy_(rate_H + (-(-rate_H).expm1()).log())
        twin.b_proj.bias.copy_(WRITES[init.write](found, init).logit())

    visit_layers(teacher.model, tokens_NT, visit, layers)


def _half_life_of_attention(found: AttentionStatistics, init: TwinInitConfig) -> Tensor:
    return init.half_life_share * found.distance_H.clamp(min=SHORTEST_DISTANCE_TOKENS)


def _fixed_half_life(found: AttentionStatistics, init: TwinInitConfig) -> Tensor:
    return torch.full_like(found.distance_H, init.half_life_tokens)


def _spread_half_lives(found: AttentionStatistics, init: TwinInitConfig) -> Tensor:
    first, last = (math.log(tokens) for tokens in init.half_life_span)
    heads = len(found.distance_H)
    return torch.linspace(first, last, heads, device=found.distance_H.device).exp()


HALF_LIVES: dict[HalfLifeName, Callable[[AttentionStatistics, TwinInitConfig], Tensor]] = {
    "attention": _half_life_of_attention,
    "fixed": _fixed_half_life,
    "spread": _spread_half_lives,
}
"""Half-life in tokens [H] of the memory of a layer's twins."""


def _write_by_entropy(found: AttentionStatistics, init: TwinInitConfig) -> Tensor:
    return WRITE_FLOOR + WRITE_SPAN * (1 - found.entropy_H)


def _constant_write(found: AttentionStatistics, init: TwinInitConfig) -> Tensor:
    return torch.full_like(found.entropy_H, init.write_strength)


WRITES: dict[WriteName, Callable[[AttentionStatistics, TwinInitConfig], Tensor]] = {
    "entropy": _write_by_entropy,
    "constant": _constant_write,
}
"""Writing strength b [H] of a layer's twins, between 0 and 1."""


def _fit_outputs(
    teacher: Teacher,
    supernet: Supernet,
    tokens_NT: Tensor,
    init: TwinInitConfig,
    layers: Collection[int],
) -> None:
    twins = {layer: cast("GatedDeltaHeads", supernet.twins[layer]) for layer in layers}
    for twin in twins.values():
        twin.gamma.fill_(1)
        if twin.bias is not None:
            twin.bias.zero_()
    fits = {layer: OutputFit() for layer in layers}

    def visit(layer: int, x: Tensor, rope: PositionEmbeddings, o: Tensor) -> None:
        twin_BTHD = twins[layer](x, rope)
        with full_precision(x.device):
            fits[layer].add(twin_BTHD, o)

    with mixed_precision(teacher.device, teacher.model.dtype):
        for ids_BT in tokens_NT.split(max(1, 8192 // tokens_NT.shape[1])):
            visit_layers(teacher.model, ids_BT, visit, layers)
    roots_LHDD = output_roots(teacher.model)
    for layer, twin in twins.items():
        fitted = twin.bias is not None and init.bias == "fitted"
        gamma_HD, bias_HD = fits[layer].solve(roots_LHDD[layer], with_bias=fitted, scale=init.scale)
        twin.gamma.copy_(gamma_HD)
        if twin.bias is not None:
            twin.bias.copy_(bias_HD)
