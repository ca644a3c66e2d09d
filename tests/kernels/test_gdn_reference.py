"""The chunked gated delta rule against the sequential reference, on random data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from archsearch.attention.delta_rule import gated_delta, gated_delta_chunked
from archsearch_kernels.gdn.reference import gated_delta_reference

LENGTHS = (1, 7, 63, 64, 65, 130)
SCALE = 0.25


def draw(tokens: int, decay: float, *, heads: int = 3, dim: int = 16) -> list[Tensor]:
    """q, k, v, g, beta of two sequences; decay is the largest |g|."""
    generator = torch.Generator().manual_seed(tokens)
    shape = (2, tokens, heads)
    q, k, v = (torch.randn(*shape, dim, generator=generator) for _ in range(3))
    g, beta = (
        -decay * torch.rand(shape, generator=generator),
        torch.rand(shape, generator=generator),
    )
    return [F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, g, beta]


def draw_state(heads: int = 3, dim: int = 16) -> Tensor:
    return torch.randn(2, heads, dim, dim, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("decay", [0.001, 1.0, 30.0])
@pytest.mark.parametrize("with_state", [False, True])
def test_chunked_equals_reference(tokens: int, decay: float, with_state: bool) -> None:
    inputs = draw(tokens, decay)
    state = draw_state() if with_state else None
    expected = gated_delta_reference(*inputs, SCALE, state)
    for compute in (gated_delta_chunked, gated_delta):
        found = compute(*inputs, scale=SCALE, initial_state=state)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("decay", [0.01, 20.0])
def test_chunked_gradients_equal_reference(tokens: int, decay: float) -> None:
    inputs = [*draw(tokens, decay), draw_state()]
    gradients = []
    for compute in (gated_delta_reference, gated_delta_chunked):
        leaves = [x.clone().requires_grad_() for x in inputs]
        o, state = compute(*leaves[:5], scale=SCALE, initial_state=leaves[5])
        ((o * torch.linspace(-1, 1, o.numel()).view_as(o)).sum() + state.square().sum()).backward()
        gradients.append([leaf.grad for leaf in leaves])
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("chunk", [1, 5, 16, 128])
def test_chunk_size_does_not_matter(chunk: int) -> None:
    inputs = draw(65, 0.5)
    expected = gated_delta_reference(*inputs, SCALE)[0]
    found = gated_delta_chunked(*inputs, scale=SCALE, chunk=chunk)[0]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_a_sequence_may_be_cut_anywhere() -> None:
    inputs = draw(130, 0.3)
    whole = gated_delta(*inputs, scale=SCALE)
    state, outputs = None, []
    for start, stop in ((0, 33), (33, 34), (34, 130)):
        piece = [x[:, start:stop] for x in inputs]
        o, state = gated_delta(*piece, scale=SCALE, initial_state=state)
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, 1), whole[0], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(state, whole[1], atol=2e-5, rtol=1e-4)


def test_half_precision_in_half_out_with_fp32_state() -> None:
    inputs = [x.bfloat16() for x in draw(65, 0.5)[:3]] + draw(65, 0.5)[3:]
    o, state = gated_delta_chunked(*inputs, scale=SCALE)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(
        o.float(), gated_delta_reference(*inputs, SCALE)[0], atol=1e-2, rtol=1e-2
    )
