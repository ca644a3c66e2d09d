"""The factor of the queries of full-attention heads, alone and on the way through norm and RoPE.

Shapes: B batch, T tokens, n heads, D head_dim.
"""

from __future__ import annotations

import math

import pytest
import torch

from archsearch.attention.configuration_hydrahead import (
    FA_CHOICES,
    HydraHeadConfig,
)
from archsearch.attention.dispatch import norm_and_rotate
from archsearch.attention.full import FullHeads
from archsearch.attention.fusion import RMSNorm
from archsearch.attention.positions import LOG_SCALES, full_positions
from archsearch.attention.rotary import FADES, Rotary
from archsearch_kernels.prologue import reference
from archsearch_kernels.prologue.heads import Part, plan_heads
from tests.attention.test_full_switches import WINDOW, all_full
from tests.attention.test_modeling_hydrahead import draw


def test_every_form_is_one_that_a_config_may_name() -> None:
    assert {name: set(names) for name, names in FA_CHOICES.items()} == {
        "rope_fade": set(FADES),
        "log_scale_form": set(LOG_SCALES),
    }


@pytest.mark.parametrize("form", LOG_SCALES)
def test_forms_are_what_they_say(form: str) -> None:
    found = LOG_SCALES[form](torch.arange(3000), 100)
    assert found.dtype == torch.float32
    assert bool((found.diff() >= 0).all())
    for t in (0, 1, 50, 98, 99, 100, 101, 2999):
        expected = {
            "shifted": math.log(t + 100) / math.log(100),
            "clipped": max(1.0, math.log(t + 1) / math.log(100)),
        }[form]
        assert float(found[t]) == pytest.approx(expected, rel=1e-6)


def test_the_shifted_form_is_the_kernels() -> None:
    positions = torch.arange(500)
    assert torch.equal(LOG_SCALES["shifted"](positions, 64), reference.log_scale(positions, 64))


def test_the_factor_is_of_the_length_that_is_given_or_of_the_window() -> None:
    ids = draw(1, 40)
    given = all_full(log_scale=True, log_scale_tokens=WINDOW)(ids).logits
    assert torch.equal(all_full(log_scale=True)(ids).logits, given)
    other = all_full(log_scale=True, log_scale_tokens=9)(ids).logits
    assert not torch.allclose(other, given, atol=1e-4)


def test_the_factor_scales_attention_logits() -> None:
    """As if q_proj of each token alone were larger by it."""
    rotary = Rotary(HydraHeadConfig(hidden_size=32, head_dim=8, fa={"log_scale": True}))
    heads = FullHeads(rotary.config, range(4)).eval()
    x = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0))
    tables = rotary.tables(torch.arange(9)[None], x.dtype)
    positions = full_positions(rotary, torch.arange(9)[None], x.dtype, training=False)
    assert positions is not None
    assert positions.factor_BT is not None
    found = heads(x, tables, own_positions=positions)
    for t in range(9):
        with torch.no_grad():
            heads.q_proj.weight.mul_(positions.factor_BT[0, t])
        torch.testing.assert_close(found[:, t], heads(x, tables)[:, t], atol=1e-5, rtol=1e-4)
        with torch.no_grad():
            heads.q_proj.weight.div_(positions.factor_BT[0, t])


def test_the_factor_may_wait_for_inference() -> None:
    ids = draw(1, 40)
    plain, always = all_full(), all_full(log_scale=True)
    later = all_full(log_scale=True, log_scale_training=False)
    assert torch.equal(later(ids).logits, always(ids).logits)
    assert torch.equal(later.train()(ids).logits, plain(ids).logits)
    assert torch.equal(always.train()(ids).logits, always.eval()(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.4, 0.0])
@pytest.mark.parametrize("form", [None, *LOG_SCALES])
def test_the_torch_path_is_the_kernels_reference(
    dtype: torch.dtype, normed: bool, share: float, form: str | None
) -> None:
    generator = torch.Generator().manual_seed(4)
    q, k = (torch.randn(2, 33, n, 16, generator=generator).to(dtype) for n in (3, 2))
    positions_BT = torch.stack((torch.arange(33), torch.arange(33) + 70))
    tables = Rotary(HydraHeadConfig(head_dim=16)).tables(positions_BT, torch.float32, share)
    factor = None if form is None else LOG_SCALES[form](positions_BT, 40)
    norms = [RMSNorm(16, 1e-5) for _ in range(2)]
    with torch.no_grad():
        for norm in norms:
            norm.weight.copy_(1 + 0.3 * torch.randn(16, generator=generator))
    rope = tables if share > 0 else None
    parts = (
        Part("q", (0, 1, 2), rotary=rope is not None, log_scale=factor is not None),
        Part("k", (0, 1), rotary=rope is not None),
    )
    expected = reference.prologue(
        q.float(),
        k.float(),
        plan_heads(parts, 3, 2, "cpu"),
        q_weight_D=norms[0].weight if normed else None,
        k_weight_D=norms[1].weight if normed else None,
        norm_eps=1e-5,
        cos_BTD=tables[0],
        sin_BTD=tables[1],
        factor_BT=factor,
    )
    given = norms if normed else [None, None]
    found = norm_and_rotate(q, k, *given, rope, factor)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.float(), other, atol=tolerance, rtol=tolerance)


def test_the_factor_alone_is_a_call_and_reaches_gradients() -> None:
    q = torch.randn(1, 5, 2, 16, requires_grad=True)
    k = torch.randn(1, 5, 2, 16)
    factor = 1 + torch.rand(1, 5)
    found_q, found_k = norm_and_rotate(q, k, None, None, None, factor)
    torch.testing.assert_close(found_q, q * factor[..., None, None])
    assert torch.equal(found_k, k)
    (gradient,) = torch.autograd.grad(found_q.sum(), q)
    torch.testing.assert_close(gradient, factor[..., None, None].expand_as(q))
