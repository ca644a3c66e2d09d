"""The section of a config that says what becomes of the heads that a student keeps; config.py has the others."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .textconfig import NonNegative, Section


class FullConfig(Section):
    """The student's full-attention heads; by default they are the teacher's, untouched."""

    rope: bool = True
    """False: none in the end (NoPE). Distillation starts with all of it and takes it away over rope_fade_tokens."""
    rope_fade_tokens: NonNegative = 500_000
    """Without rope: the tokens of distillation, counted from its very start, in which it goes; 0 starts without."""
    rope_fade: Literal["slow_first", "angles", "mixed"] = "slow_first"
    """How it goes. slow_first: frequency by frequency, the slowest first; angles: all angles shrink together; mixed: rotated
    and unrotated queries and keys are mixed."""
    log_scale: bool = False
    """Queries times a factor that grows with the logarithm of their position."""
    log_scale_form: Literal["shifted", "clipped"] = "shifted"
    """Of position t from 0, with a = log_scale_tokens. shifted: log(t + a) / log(a); clipped: log(t + 1) / log(a), at least 1."""
    log_scale_tokens: Annotated[int, Field(ge=2)] | None = None
    """About the length trained at; the teacher's window (max_position_embeddings) where not given."""
    log_scale_training: bool = True
    """False: the factor comes at inference only."""
    norm: bool = False
    """RMSNorm of each head's output, then times gamma, which starts as the teacher's mean RMS."""
    gate: bool = False
    """Output gate 2 * sigmoid(W_g x), which starts as the identity."""


class StudentConfig(Section):
    """What a student has that neither teacher nor twins have."""

    full: FullConfig = FullConfig()
