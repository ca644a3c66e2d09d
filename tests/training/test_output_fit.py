"""gamma and bias in closed form: exact solutions are found, and each scale is the best of its kind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from archsearch.training.output_fit import SCALES, OutputFit
from archsearch.training.twin_error import as_o_proj_sees

HEADS, DIM = 3, 4


@pytest.fixture
def outputs() -> tuple[Tensor, Tensor, Tensor]:
    """Twins' outputs and heads' [B, T, H, D], which resemble each other, and roots."""
    generator = torch.Generator().manual_seed(0)
    n_BTHD = torch.randn(2, 200, HEADS, DIM, generator=generator) + 0.5
    noise_BTHD = torch.randn(2, 200, HEADS, DIM, generator=generator)
    o_BTHD = n_BTHD * torch.tensor([1.0, 0.5, -0.8, 2.0]) + 0.3 * noise_BTHD + 0.7
    return n_BTHD, o_BTHD, torch.randn(HEADS, DIM, DIM, generator=generator)


def solved(
    n_BTHD: Tensor, o_BTHD: Tensor, root_HDD: Tensor, scale: str, *, with_bias: bool = True
) -> tuple[Tensor, Tensor]:
    fit = OutputFit()
    for n, o in zip(n_BTHD.split(1), o_BTHD.split(1), strict=True):
        fit.add(n, o)
    gamma_HD, bias_HD = fit.solve(root_HDD, with_bias=with_bias, scale=scale)
    return gamma_HD.float(), bias_HD.float()


def error(gamma_HD: Tensor, bias_HD: Tensor, outputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    n_BTHD, o_BTHD, root_HDD = outputs
    difference = as_o_proj_sees(n_BTHD * gamma_HD + bias_HD - o_BTHD, root_HDD)
    return difference.square().sum(-1).mean(-1)


@pytest.mark.parametrize("with_bias", [True, False])
def test_fit_finds_an_exact_solution(with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    n_BTHD = torch.randn(2, 200, HEADS, DIM, generator=generator) + 0.5
    gamma_HD, bias_HD = torch.randn(2, HEADS, DIM, generator=generator)
    bias_HD = bias_HD * with_bias
    root_HDD = torch.randn(HEADS, DIM, DIM, generator=generator)
    o_BTHD = n_BTHD * gamma_HD + bias_HD
    found = solved(n_BTHD, o_BTHD, root_HDD, "least_squares", with_bias=with_bias)
    torch.testing.assert_close(found[0], gamma_HD, atol=5e-3, rtol=5e-3)
    torch.testing.assert_close(found[1], bias_HD, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("scale", list(SCALES))
def test_every_scale_takes_the_best_bias(
    outputs: tuple[Tensor, Tensor, Tensor], scale: str
) -> None:
    gamma_HD, bias_HD = solved(*outputs, scale)
    assert gamma_HD.shape == bias_HD.shape == (HEADS, DIM)
    found_H = error(gamma_HD, bias_HD, outputs)
    for step in 0.05 * torch.eye(DIM):
        assert (error(gamma_HD, bias_HD + step, outputs) > found_H).all()
    without = solved(*outputs, scale, with_bias=False)
    assert not without[1].any()
    assert (error(*without, outputs) > found_H).all()


def test_least_squares_are_best_of_their_kind(outputs: tuple[Tensor, Tensor, Tensor]) -> None:
    errors = {}
    for scale in SCALES:
        gamma_HD, bias_HD = solved(*outputs, scale, with_bias=False)
        errors[scale] = error(gamma_HD, bias_HD, outputs)
        if scale.startswith("least_squares"):
            for factor in (0.97, 1.03):
                assert (error(factor * gamma_HD, bias_HD, outputs) > errors[scale]).all()
        if scale != "least_squares":
            assert bool((gamma_HD == gamma_HD[:, :1]).all())
    assert (errors["least_squares"] < errors["least_squares_by_head"]).all()
    assert (errors["least_squares_by_head"] < errors["rms"]).all()
    assert (errors["least_squares_by_head"] < errors["one"]).all()


def test_rms_gives_the_heads_size(outputs: tuple[Tensor, Tensor, Tensor]) -> None:
    n_BTHD, o_BTHD, root_HDD = outputs
    gamma_HD, _ = solved(*outputs, "rms", with_bias=False)
    ours_H, theirs_H = (
        as_o_proj_sees(values, root_HDD).square().sum(-1).mean(-1)
        for values in (n_BTHD * gamma_HD, o_BTHD)
    )
    torch.testing.assert_close(ours_H, theirs_H)
