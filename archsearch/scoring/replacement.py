"""Damage of replacing one head, or one KV group, alone by its twins: KL on text, NLL of answers.

Legend: N sequences, P pairs, T tokens, S swaps.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..data.niah import Probe
from ..models.supernet import Supernet
from ..models.teacher import Teacher
from ..progress import Progress, ignore_progress
from .head_scores import HeadScores
from .inputs import ScoreInputs
from .retrieval_heads import retrieval_pairs
from .swaps import MEMORY_BYTES, Swap, Sweep, heads_and_groups, scores_of


def replacement_kl(inputs: ScoreInputs) -> HeadScores:
    """Mean KL(teacher || teacher with a head, or a whole KV group, as twins) on held-out text, nats a token.

    Spread is over sequences.
    """
    swaps = heads_and_groups(inputs.teacher.shape)
    damage_SN = kl_damage(
        inputs.teacher,
        inputs.supernet(),
        inputs.heldout_NT,
        swaps,
        memory_bytes=inputs.memory_bytes,
        progress=inputs.progress,
    )
    return scores_of("replacement_kl", inputs.teacher.shape, swaps, damage_SN)


def replacement_nll(inputs: ScoreInputs) -> HeadScores:
    """Mean rise of the answer's NLL when a head, or a whole KV group, becomes its twins, nats an answer token.

    Over the clean prompts of retrieval, else of the user's capability, else of all; every pair counts the same.
    Slightly negative where a twin helps. Spread is over pairs. Raises ValueError where there are no pairs.
    """
    swaps = heads_and_groups(inputs.teacher.shape)
    damage_SP = nll_damage(
        inputs.teacher,
        inputs.supernet(),
        retrieval_pairs(inputs),
        swaps,
        memory_bytes=inputs.memory_bytes,
        progress=inputs.progress,
    )
    return scores_of("replacement_nll", inputs.teacher.shape, swaps, damage_SP)


def kl_damage(
    teacher: Teacher,
    supernet: Supernet,
    tokens_NT: Tensor,
    swaps: Sequence[Swap],
    *,
    memory_bytes: int = MEMORY_BYTES,
    progress: Progress = ignore_progress,
) -> Tensor:
    """KL(teacher || teacher with the heads of a swap as their twins) on each sequence, nats a token, fp64 [S, N].

    Costs about half a forward a swap. Raises ValueError where tokens are not [N, T] or empty, or a swap spans layers.
    """
    sweep = Sweep(teacher.model, list(supernet.twins), swaps, memory_bytes, progress)
    return sweep.kl(teacher, tokens_NT)[1]


def nll_damage(
    teacher: Teacher,
    supernet: Supernet,
    probes: Sequence[Probe],
    swaps: Sequence[Swap],
    *,
    memory_bytes: int = MEMORY_BYTES,
    progress: Progress = ignore_progress,
) -> Tensor:
    """Rise of the teacher-forced NLL of each probe's answer under a swap, nats an answer token, fp64 [S, P].

    Raises ValueError for no probes, or a swap that spans layers.
    """
    sweep = Sweep(teacher.model, list(supernet.twins), swaps, memory_bytes, progress)
    base_P, swapped_SP = sweep.answer_nll(probes)
    return swapped_SP - base_P
