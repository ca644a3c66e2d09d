"""Retrieval heads: the share of the answer that a head copies, in that it attends most to the token to come.

Source: Wu et al. 2024, Retrieval Head Mechanistically Explains Long-Context Factuality (arXiv 2404.15574), with
the answer teacher-forced instead of generated, and the needle's value as the needle.

Legend: P pairs, T tokens, A answer tokens, L layers, H query heads, G KV heads, R query heads a KV head, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..attention.full import FullHeads
from ..attention.rotary import PositionEmbeddings, rotate
from ..data.niah import Probe
from ..models.teacher import Teacher
from .head_scores import HeadScores, groups_of
from .inputs import ScoreInputs


def retrieval_heads(inputs: ScoreInputs) -> HeadScores:
    """Mean copy score over the retrieval pairs; spread is its standard error, a group's score its best head's."""
    pairs, rows = retrieval_pairs(inputs), []
    for pair in pairs:
        rows.append(copy_scores(inputs.teacher, pair))
        inputs.progress(len(rows), len(pairs))
    scores_PLH = torch.stack(rows).double()
    mean_LH = scores_PLH.mean(0)
    groups_LG = groups_of(mean_LH, inputs.teacher.shape.num_kv_heads)
    error_LH = scores_PLH.std(0, correction=min(1, len(rows) - 1)) / math.sqrt(len(rows))
    return HeadScores.of("retrieval_heads", mean_LH, groups_LG, error_LH)


def retrieval_pairs(inputs: ScoreInputs) -> Sequence[Probe]:
    """The pairs whose answer stands in the prompt: of retrieval, else the user's own, else all there are.

    Raises ValueError where there are none.
    """
    for capability in ("retrieval", "user", None):
        pairs = inputs.pairs(capability=capability)
        if pairs:
            return pairs
    raise ValueError("scores: no pair to score heads by")


def copy_scores(teacher: Teacher, probe: Probe) -> Tensor:
    """Share of the answer tokens that each head copies, fp32 [L, H] on the CPU.

    A head copies answer token j where, at the position that predicts it, the key that it attends to most lies in
    the needle's value and is that same token. Costs one forward and A rows of each head's attention.
    """
    num_answers = len(probe.answer)
    ids_1T = torch.tensor([probe.clean_row], device=teacher.device)
    copied_AT = copied_tokens(probe).to(teacher.device)
    rows: list[Tensor] = []

    def score(full: FullHeads, args: tuple[Any, ...]) -> None:
        x_1TC, embeddings, _, _, (k_1TGD, _) = args
        top_AH = most_attended(full, x_1TC, embeddings, k_1TGD, num_answers)
        rows.append(copied_AT.gather(1, top_AH).float().mean(0))

    handles = [
        layer.self_attn.full.register_forward_pre_hook(score)
        for layer in teacher.model.model.layers
    ]
    try:
        with torch.inference_mode():
            teacher.model.model(input_ids=ids_1T, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(rows).cpu().clone()


def copied_tokens(probe: Probe) -> Tensor:
    """Which key positions give each answer token away, bool [A, T]: same token, and in the needle's value.

    The needle's value is where clean and corrupt prompts differ, and the tokens beside it that go on as the
    answer does: two values may share some of theirs (the last digit of 1234 and 5634).
    """
    prompt, answer = probe.prompt, probe.answer
    inside: set[int] = set()
    for position, (token, other) in enumerate(zip(prompt, probe.corrupt_prompt, strict=True)):
        if token != other:
            for start, found in enumerate(answer):
                if found == token:
                    inside.update(_shared_run(prompt, answer, position, start))
    ids_T = torch.tensor(probe.clean_row)
    inside_T = torch.zeros(len(ids_T), dtype=torch.bool)
    inside_T[sorted(inside)] = True
    return (ids_T == torch.tensor(answer)[:, None]) & inside_T


def _shared_run(prompt: Sequence[int], answer: Sequence[int], position: int, start: int) -> range:
    """The longest run of positions through `position` at which prompt goes as answer does around `start`."""
    first = last = 0
    while (
        min(position, start) > first and prompt[position - first - 1] == answer[start - first - 1]
    ):
        first += 1
    while (
        position + last + 1 < len(prompt)
        and start + last + 1 < len(answer)
        and prompt[position + last + 1] == answer[start + last + 1]
    ):
        last += 1
    return range(position - first, position + last + 1)


def most_attended(
    full: FullHeads,
    x_1TC: Tensor,
    embeddings: PositionEmbeddings,
    k_1TGD: Tensor,
    num_last: int,
) -> Tensor:
    """The key that each head attends to most from each of the last num_last positions, int64 [A, H].

    x_1TC and k_1TGD (normed, not rotated) are what FullHeads reads. No softmax is needed for a maximum.
    """
    last_1AC = x_1TC[:, -num_last:]
    q_1AHD = full.q_proj(last_1AC).unflatten(-1, (-1, full.head_dim))
    if full.q_norm is not None:
        q_1AHD = full.q_norm(q_1AHD)
    cos_1TD, sin_1TD = embeddings
    q_1AHD = rotate(q_1AHD, (cos_1TD[:, -num_last:], sin_1TD[:, -num_last:]))
    k_TGD = rotate(k_1TGD, embeddings)[0].float()
    q_AGRD = q_1AHD[0].float().unflatten(1, (k_TGD.shape[1], -1))
    logits_AGRT = torch.einsum("agrd,tgd->agrt", q_AGRD, k_TGD)
    future_AT = torch.ones(num_last, len(k_TGD), dtype=torch.bool, device=k_TGD.device)
    future_AT = future_AT.triu(len(k_TGD) - num_last + 1)
    logits_AGRT = logits_AGRT.masked_fill(future_AT[:, None, None], float("-inf"))
    return logits_AGRT.argmax(-1).flatten(1)
