"""Low-rank factors and small integers give matrices back, as closely as they should."""

import pytest
import torch

from archsearch.models.compression import dequantise, factorise, multiply, quantise


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("length", [1, 7, 64])
def test_quantise_error_is_below_half_a_step(bits: int, length: int) -> None:
    rows = torch.randn(3, 5, length, generator=torch.Generator().manual_seed(0))
    rows[1, 2] = 0
    stored = quantise(rows, bits)
    back = dequantise(stored[""], stored[":scale"], length)
    step = rows.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert ((back - rows).abs() <= step / 2 + 1e-6).all()
    assert (back[1, 2] == 0).all()
    if bits == 4:
        assert stored[""].shape[-1] == (length + 1) // 2


def test_quantise_refuses_other_bits() -> None:
    with pytest.raises(ValueError, match="bits 3"):
        quantise(torch.ones(2, 2), 3)


@pytest.mark.parametrize(("bits", "tolerance"), [(8, 0.02), (4, 0.3)])
def test_factorise_gives_low_rank_matrices_back(bits: int, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randn(2, 40, 5, generator=generator),
        torch.randn(2, 5, 33, generator=generator),
    )
    delta = left @ right
    stored = {"w" + key: value for key, value in factorise(delta, 5, bits=bits).items()}
    back = multiply(stored, "w", delta.shape)
    assert (back - delta).norm() < tolerance * delta.norm()


def test_factorise_is_the_best_approximation() -> None:
    delta = torch.randn(1, 24, 24, generator=torch.Generator().manual_seed(1))
    stored = {"w" + key: value for key, value in factorise(delta, 8).items()}
    error = (multiply(stored, "w", delta.shape) - delta).norm()
    best = torch.linalg.svdvals(delta[0])[8:].norm()
    assert best <= error < 1.02 * best


def test_factorise_follows_the_inputs() -> None:
    generator = torch.Generator().manual_seed(2)
    delta = torch.randn(1, 16, 16, generator=generator)
    inputs = torch.randn(200, 16, generator=generator) * torch.logspace(0, -2, 16)
    gram = (inputs.T @ inputs)[None]
    errors = []
    for weighting in (None, gram):
        stored = factorise(delta, 3, input_gram_LII=weighting)
        back = multiply({"w" + key: value for key, value in stored.items()}, "w", delta.shape)
        errors.append((inputs @ (back - delta)[0].T).norm())
    assert errors[1] < 0.8 * errors[0]
