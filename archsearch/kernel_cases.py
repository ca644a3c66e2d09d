"""Inputs on which backends are proven, and the references that they must equal: code of its own, in fp64 on the same inputs.

Inputs are random and small, of lengths that are no multiple of a chunk, with grouped heads, a state and masked tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from archsearch_kernels.fusion import reference as fusion_reference
from archsearch_kernels.fusion.heads import Head, plan_fusion
from archsearch_kernels.gdn.reference import gdn_forward
from archsearch_kernels.prologue import reference as prologue_reference
from archsearch_kernels.prologue.heads import Part, plan_heads

from .attention.backends import INFERENCE, STEP, TRAINING, Situation
from .attention.full_backends import AttentionCall
from .attention.fusion import HeadIndex
from .attention.fusion_backends import FusionCall
from .attention.gdn_backends import GatedDeltaCall
from .attention.prologue_backends import PrologueCall

TOKENS, PADDING = 130, 5


def _draw(situation: Situation) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = situation.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(situation.device, dtype)

    return draw


def _gdn_case(situation: Situation) -> tuple[GatedDeltaCall, Callable[[Any], Any]]:
    """Three of four query heads over two KV heads, with a state; the second sequence begins with padding."""
    draw, dim, wide = _draw(situation), situation.head_dim, torch.float32
    tokens = 1 if situation.purpose == STEP else TOKENS
    a, b = draw(2, tokens, 4), draw(2, tokens, 4)
    if tokens > 1:
        a[1, :PADDING] = b[1, :PADDING] = float("-inf")

    def index(*heads: int) -> Tensor:
        return torch.tensor(heads, dtype=torch.int32, device=situation.device)

    call = GatedDeltaCall(
        draw(2, tokens, 4, dim),
        draw(2, tokens, 2, dim),
        draw(2, tokens, 2, dim),
        a,
        b,
        0.5 * draw(4, dtype=wide),
        # Half-lives of some ten tokens.
        draw(4, dtype=wide) - 3,
        index(3, 0, 2),
        index(1, 0, 1),
        initial_state=draw(2, 3, dim, dim, dtype=wide) / dim**0.5,
        cu_seqlens=None,
        output_final_state=True,
    )
    return call, _gdn_reference


def _gdn_reference(call: GatedDeltaCall) -> tuple[Tensor, Tensor | None]:
    wide: dict[str, Any] = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in call._asdict().items()
    }
    return gdn_forward(**wide)


def _full_case(situation: Situation) -> tuple[AttentionCall, Callable[[Any], Any]]:
    """Four query heads over two KV heads; masked: with padding before the second sequence, a query always sees itself."""
    draw, dim = _draw(situation), situation.head_dim
    tokens = 1 if situation.purpose == STEP else TOKENS
    pairs = None
    if situation.masked:
        causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=situation.device).tril()
        pairs = causal.expand(2, 1, TOKENS, TOKENS).clone()
        pairs[1, :, :, :PADDING] = False
        pairs |= torch.eye(TOKENS, dtype=torch.bool, device=situation.device)
    # As the model has them: heads behind tokens in memory.
    q = draw(2, tokens, 4, dim).transpose(1, 2)
    k, v = (draw(2, TOKENS, 2, dim).transpose(1, 2) for _ in range(2))
    return AttentionCall(q, k, v, pairs), _full_reference


def _full_reference(call: AttentionCall) -> Tensor:
    q = call.q_BnTD.double()
    readers = q.shape[1] // call.k_BmSD.shape[1]
    k, v = (x.double().repeat_interleave(readers, 1) for x in (call.k_BmSD, call.v_BmSD))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    pairs = call.pairs_B1TS
    if pairs is None and call.causal:
        pairs = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if pairs is not None:
        scores = scores.masked_fill(~pairs, float("-inf"))
    output: Tensor = scores.softmax(-1) @ v
    return output


def _prologue_case(situation: Situation) -> tuple[PrologueCall, Callable[[Any], Any]]:
    """Four query heads and two KV heads, normed and rotated; both sequences share their positions."""
    draw, dim = _draw(situation), situation.head_dim
    tokens = 1 if situation.purpose == STEP else TOKENS
    angles = 3 * draw(1, tokens, dim // 2, dtype=torch.float32).repeat(1, 1, 2)
    call = PrologueCall(
        draw(2, tokens, 4, dim),
        draw(2, tokens, 2, dim),
        1 + 0.1 * draw(dim),
        1 + 0.1 * draw(dim),
        norm_eps=1e-6,
        embeddings=(angles.cos().to(situation.dtype), angles.sin().to(situation.dtype)),
    )
    return call, _prologue_reference


def _prologue_reference(call: PrologueCall) -> tuple[Tensor, ...]:
    q, k = call.q_BTnD.double(), call.k_BTmD.double()
    parts = [Part("q", tuple(range(q.shape[2])), rotary=True)]
    parts += [Part("k", tuple(range(k.shape[2])), rotary=True)]
    cos, sin = call.embeddings or (None, None)
    return prologue_reference.prologue(
        q,
        k,
        plan_heads(parts, q.shape[2], k.shape[2], q.device),
        q_weight_D=call.q_weight_D,
        k_weight_D=call.k_weight_D,
        norm_eps=call.norm_eps,
        cos_BTD=cos,
        sin_BTD=sin,
    )


ORDER, NUM_FULL = (3, 0, 2, 1, 4), 2
"""Places of five heads, full attention's two first."""


def _fusion_case(situation: Situation) -> tuple[FusionCall, Callable[[Any], Any]]:
    """Two full-attention heads between three linear ones with norm, gamma, bias and gate."""
    draw, dim = _draw(situation), situation.head_dim
    tokens, linear = 1 if situation.purpose == STEP else TOKENS, len(ORDER) - NUM_FULL
    call = FusionCall(
        # As attention leaves them: tokens behind heads in memory.
        draw(2, NUM_FULL, tokens, dim).transpose(1, 2),
        draw(2, tokens, linear, dim),
        1 + 0.3 * draw(linear, dim),
        0.3 * draw(linear, dim),
        draw(2, tokens, linear, dim),
        norm_eps=1e-6,
        order=HeadIndex(ORDER),
    )
    return call, _fusion_reference


def _fusion_reference(call: FusionCall) -> Tensor:
    assert call.full_BTFD is not None
    heads = [
        Head(True, place, norm=False)
        if place < NUM_FULL
        else Head(False, place - NUM_FULL, row=place - NUM_FULL, gate=place - NUM_FULL)
        for place in ORDER
    ]
    output = fusion_reference.fusion(
        call.full_BTFD.double(),
        call.linear_BTnD.double(),
        plan_fusion(heads, call.linear_BTnD.device),
        gamma_RD=call.gamma_nD,
        bias_RD=call.bias_nD,
        gate_BTED=call.gate_BTnD,
        norm_eps=1e-6,
    )
    return output.view(*call.linear_BTnD.shape[:2], len(ORDER), -1)


CASES: dict[str, Callable[[Situation], tuple[Any, Callable[[Any], Any]]]] = {
    "gdn": _gdn_case,
    "full": _full_case,
    "prologue": _prologue_case,
    "fusion": _fusion_case,
}
EVERY_PURPOSE = (
    ("training", TRAINING, False),
    ("inference", INFERENCE, False),
    ("step", STEP, False),
)
KINDS: dict[str, tuple[tuple[str, str, bool], ...]] = {
    "gdn": EVERY_PURPOSE,
    "full": (*EVERY_PURPOSE, ("masked", INFERENCE, True)),
    "prologue": EVERY_PURPOSE,
    "fusion": EVERY_PURPOSE,
}
"""What is computed of each operator: a word for it, the purpose, and whether pairs are masked."""
