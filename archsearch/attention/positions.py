"""How full-attention heads see positions where that is not as the teacher's do: a share of RoPE, a factor on queries.

All other heads, and these by default, see them by the teacher's RoPE tables alone.

Shapes: B batch, T tokens, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .rotary import PositionEmbeddings, Rotary


def shifted(positions: Tensor, training_tokens: int) -> Tensor:
    """log(t + a) / log(a) at position t from 0: 1 at the start, and grows from there on (HypeNet, arXiv 2601.22156)."""
    return torch.log(positions.float() + training_tokens) / math.log(training_tokens)


def clipped(positions: Tensor, training_tokens: int) -> Tensor:
    """log(t + 1) / log(a) from position a - 1 on, before it 1: within the length trained at nothing changes."""
    scale = torch.log(positions.float() + 1) / math.log(training_tokens)
    return scale.clamp_min(1.0)


LOG_SCALES: dict[str, Callable[[Tensor, int], Tensor]] = {"shifted": shifted, "clipped": clipped}
"""Forms of the factor, fp32: a query that looks at more keys needs larger logits to stay as sharp."""


class FullPositions(NamedTuple):
    """What full-attention heads make of their tokens' positions."""

    rope: PositionEmbeddings | None
    """Tables of the share of RoPE that is left; None where none is."""
    factor_BT: Tensor | None
    """What each query is multiplied by; None for 1."""


def full_positions(
    rotary: Rotary, positions_BT: Tensor, dtype: torch.dtype, *, training: bool
) -> FullPositions | None:
    """What config.fa makes of integer positions; None where that is the teacher's RoPE and nothing else."""
    config = rotary.config
    options = config.fa
    share = float(options["rope_share"])
    scales = options["log_scale"] and (options["log_scale_training"] or not training)
    if share == 1 and not scales:
        return None
    factor_BT = None
    if scales:
        tokens = options["log_scale_tokens"] or config.max_position_embeddings
        factor_BT = LOG_SCALES[options["log_scale_form"]](positions_BT, tokens)
    rope = None
    if share > 0:
        rope = rotary.tables(positions_BT, dtype, share, options["rope_fade"])
    return FullPositions(rope, factor_BT)


def set_rope_share(model: PreTrainedModel, share: float) -> None:
    """Sets how much of RoPE the full-attention heads have from the next call on: 1 all of it, 0 none (NoPE).

    It is part of the config, so that a model is saved with what it has. A cache serves one share only.
    Raises ValueError for a share that is not within 0 and 1.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"the share of RoPE is {share}; allowed: 0 to 1")
    model.config.fa["rope_share"] = float(share)
