"""Leave-one-in: what a single head, or KV group, of full attention gives a model whose other heads are all twins.

Legend: N sequences, T tokens, S swaps.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..headmap import HeadMap, Operator
from ..models.cut import cut
from ..models.supernet import Supernet
from ..models.teacher import Teacher
from ..progress import Progress, ignore_progress
from .head_scores import HeadScores
from .inputs import ScoreInputs
from .swaps import MEMORY_BYTES, Swap, Sweep, heads_and_groups, scores_of


def leave_one_in(inputs: ScoreInputs) -> HeadScores:
    """KL(all GDN) less KL(all GDN but one head, or KV group, of full attention), from the teacher, nats a token.

    Higher is more worth keeping; negative where full attention does harm among twins. Spread is over sequences.
    """
    swaps = heads_and_groups(inputs.teacher.shape)
    gain_SN = restored_kl(
        inputs.teacher,
        inputs.supernet(),
        inputs.heldout_NT,
        swaps,
        memory_bytes=inputs.memory_bytes,
        progress=inputs.progress,
    )
    return scores_of("leave_one_in", inputs.teacher.shape, swaps, gain_SN)


def restored_kl(
    teacher: Teacher,
    supernet: Supernet,
    tokens_NT: Tensor,
    swaps: Sequence[Swap],
    *,
    memory_bytes: int = MEMORY_BYTES,
    progress: Progress = ignore_progress,
) -> Tensor:
    """Fall of the all-GDN model's KL from the teacher when the heads of a swap are full attention, fp64 [S, N].

    On each sequence, in nats a token. Full attention reads the all-GDN model's stream, as in a model cut with those
    heads, and costs about half a forward a swap. Raises ValueError where tokens are not [N, T] or empty, or a swap
    spans layers.
    """
    student = cut(teacher, supernet, HeadMap.uniform(teacher.shape, Operator.GDN))
    full = [layer.self_attn.full for layer in teacher.model.model.layers]
    sweep = Sweep(student, full, swaps, memory_bytes, progress)
    base_N, restored_SN = sweep.kl(teacher, tokens_NT)
    return base_N - restored_SN
