"""Layer restoration: what a whole layer of full attention gives a model whose other heads are all twins.

The measure by which hybrid-distillation chooses the layers that it keeps.
"""

from __future__ import annotations

from itertools import groupby

from .head_scores import HeadScores
from .inputs import ScoreInputs
from .leave_one_in import restored_kl
from .swaps import standard_error


def restoration(inputs: ScoreInputs) -> HeadScores:
    """KL(all GDN) less KL(all GDN but one layer of full attention), from the teacher, nats a token.

    Each head and KV group has the gain of its whole layer, undivided: all of a layer tie, so that a ranking keeps or
    drops layers. Spread is over sequences.
    """
    shape = inputs.teacher.shape
    layers = [tuple(heads) for _, heads in groupby(shape.heads(), key=lambda head: head[0])]
    gain_LN = restored_kl(
        inputs.teacher,
        inputs.supernet(),
        inputs.heldout_NT,
        layers,
        memory_bytes=inputs.memory_bytes,
        progress=inputs.progress,
    )
    gain_L1, spread_L1 = gain_LN.mean(-1, keepdim=True), standard_error(gain_LN).unsqueeze(-1)
    return HeadScores.of(
        "restoration",
        gain_L1.expand(-1, shape.num_heads),
        gain_L1.expand(-1, shape.num_kv_heads),
        spread_L1.expand(-1, shape.num_heads),
    )
