"""What tests of selectors share: inputs of given pairs, attention written out, and a model with one copying head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from archsearch.attention.full import FullHeads
from archsearch.config import ScoringConfig
from archsearch.data.niah import Probe
from archsearch.models.supernet import Supernet
from archsearch.models.teacher import Teacher
from archsearch.progress import Progress, ignore_progress
from archsearch.scoring.inputs import ScoreInputs, SubProbe
from tests.random_models import random_teacher, random_tokens

FIRST, SECOND, THIRD, FOURTH, ASK = 20, 21, 22, 23, 30


def no_supernet() -> Supernet:
    raise AssertionError("this method needs no supernet")


def inputs_of(
    teacher: Teacher,
    capabilities: Mapping[str, Mapping[str, Sequence[Probe]]],
    progress: Progress = ignore_progress,
    **config: Any,
) -> ScoreInputs:
    """ScoreInputs of these pairs, each sub-probe drawn twice as often as it was kept."""
    probes = {
        name: {kind: SubProbe(tuple(pairs), 2 * len(pairs)) for kind, pairs in kinds.items()}
        for name, kinds in capabilities.items()
    }
    return ScoreInputs(
        teacher, probes, random_tokens(1, 8), no_supernet, ScoringConfig(**config), 0, progress
    )


def attention_logits(full: FullHeads, x_TC: Tensor, head: int) -> tuple[Tensor, Tensor]:
    """Causal logits [T, T] of one query head, pair by pair of rotated dimensions, and its values [T, D]."""
    dim, group = full.head_dim, head // (len(full.heads) // len(full.kv_heads))
    rows, kv_rows = (slice(place * dim, (place + 1) * dim) for place in (head, group))
    q_TD, k_TD, v_TD = (
        x_TC @ linear.weight[part].T + (0 if linear.bias is None else linear.bias[part])
        for linear, part in (
            (full.q_proj, rows),
            (full.k_proj, kv_rows),
            (full.v_proj, kv_rows),
        )
    )
    for vectors_TD, norm in ((q_TD, full.q_norm), (k_TD, full.k_norm)):
        if norm is not None:
            scale_T = (vectors_TD.square().mean(-1, keepdim=True) + norm.eps).sqrt()
            vectors_TD.copy_(vectors_TD / scale_T * norm.weight)
    tokens = len(x_TC)
    theta = full.config.rope_parameters["rope_theta"]
    logits_TT = torch.full((tokens, tokens), -math.inf)
    for query in range(tokens):
        for key in range(query + 1):
            total = 0.0
            for low in range(dim // 2):
                q = complex(q_TD[query, low], q_TD[query, low + dim // 2])
                k = complex(k_TD[key, low], k_TD[key, low + dim // 2])
                angle = (query - key) * theta ** (-2 * low / dim)
                total += (q * complex(math.cos(angle), math.sin(angle)) * k.conjugate()).real
            logits_TT[query, key] = total / math.sqrt(dim)
    return logits_TT, v_TD


def copying_teacher() -> Teacher:
    """One layer in which head 0 copies both tokens of an answer, head 2 only the first, heads 1 and 3 none.

    ASK asks for FIRST, and FIRST for SECOND: by features 0 and 1 of the embedding, while 2 and 3 are what the keys
    show. Head 0 alone writes what it attends to into the stream.
    """
    teacher = random_teacher(num_layers=1)
    layer = teacher.model.model.layers[0]
    full, strength = layer.self_attn.full, 6.0
    with torch.no_grad():
        noise = torch.randn(300, 16, generator=torch.Generator().manual_seed(5))
        embedding = teacher.model.model.embed_tokens.weight.zero_()
        embedding[:, 16:] = 0.5 * noise
        embedding[ASK, 0] = embedding[FIRST, 1] = 3
        embedding[FIRST, 2] = embedding[SECOND, 3] = 3
        for weight in (full.q_proj.weight, full.k_proj.weight, full.v_proj.weight):
            weight.zero_()
        for head, signs in enumerate(((1, 1), (-1, -1), (1, -1), (-1, -1))):
            for feature, sign in enumerate(signs):
                # Dimensions 2 and 3 of 8 turn slowest, so that distance hardly matters.
                full.q_proj.weight[head * 8 + 2 + feature, feature] = sign * strength
        for group in range(2):
            for feature in range(2):
                full.k_proj.weight[group * 8 + 2 + feature, 2 + feature] = strength
        full.v_proj.weight[:8, 16:24] = torch.eye(8)
        layer.self_attn.o_proj.weight.zero_()[8:16, :8] = torch.eye(8)
        layer.mlp.down_proj.weight.zero_()
        layer.input_layernorm.weight.fill_(1)
        teacher.model.model.norm.weight.fill_(1)
    return teacher


def copying_probe(length: int = 60, at: int = 30) -> Probe:
    """A prompt of copying_teacher: FIRST SECOND among filler, then ASK."""
    filler = [index % 10 for index in range(length - 1)]
    prompts = []
    for value in ((FIRST, SECOND), (THIRD, FOURTH)):
        tokens = list(filler)
        tokens[at : at + 2] = value
        prompts.append((*tokens, ASK))
    clean, corrupt = prompts
    return Probe("single", length, clean, (FIRST, SECOND), corrupt, (THIRD, FOURTH))
