"""The ways of scoring heads, a row each: what it needs, and the function that does it.

A method reads ScoreInputs and answers HeadScores; higher means that a head needs full attention more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..config import ScoreMethod
from .attribution import attribution
from .causal import causal
from .duo_gates import duo_gates
from .head_scores import HeadScores
from .inputs import ScoreInputs
from .leave_one_in import leave_one_in
from .replacement import replacement_kl, replacement_nll
from .restoration import restoration
from .retrieval_heads import retrieval_heads


@dataclass(frozen=True)
class Method:
    """One way of scoring: needs_supernet tells whether it reads the twins, needs_text whether it reads held-out text."""

    score: Callable[[ScoreInputs], HeadScores]
    title: str
    needs_supernet: bool = False
    needs_text: bool = False


METHODS: Mapping[ScoreMethod, Method] = {
    "causal": Method(causal, "causal score"),
    "attribution": Method(attribution, "attribution patching"),
    "retrieval_heads": Method(retrieval_heads, "retrieval-head copy score"),
    "duo_gates": Method(duo_gates, "learned gates (DuoAttention)"),
    "replacement_kl": Method(
        replacement_kl, "single-replacement KL", needs_supernet=True, needs_text=True
    ),
    "replacement_nll": Method(
        replacement_nll, "single-replacement retrieval NLL", needs_supernet=True
    ),
    "leave_one_in": Method(leave_one_in, "leave-one-in", needs_supernet=True, needs_text=True),
    "restoration": Method(
        restoration, "layer-restoration KL", needs_supernet=True, needs_text=True
    ),
}
