"""One contract for every operator of a head map, F, G and N: written once, run on each.

Shapes: B batch, T tokens, C hidden size, n heads of the operator, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from archsearch.attention.cache import GatedDeltaState, KeyValueStore, NativeHybridState
from archsearch.attention.configuration_hydrahead import HydraHeadConfig
from archsearch.attention.full import FullHeads, build_mask
from archsearch.attention.gdn import GatedDeltaHeads
from archsearch.attention.nha import NativeHybridHeads
from archsearch.attention.positions import full_positions
from archsearch.attention.rotary import Rotary

TOKENS = 70
HEADS = 4
CONFIG = HydraHeadConfig(
    hidden_size=32,
    num_attention_heads=HEADS,
    num_key_value_heads=2,
    head_dim=8,
    qk_norm=True,
    qkv_bias=True,
)


def config_of(gdn: dict[str, bool] | None = None, **fa: Any) -> HydraHeadConfig:
    return HydraHeadConfig(
        hidden_size=32,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=8,
        gdn=gdn or {},
        fa=fa,
    )


BARE = dict.fromkeys(("rope", "norm", "gate", "bias"), False)
CONFIGS = {
    "gdn_conv": config_of({"conv": True}),
    "gdn_no_rope": config_of({"rope": False}),
    "gdn_no_norm": config_of({"norm": False}),
    "gdn_no_gate": config_of({"gate": False}),
    "gdn_no_bias": config_of({"bias": False}),
    "gdn_bare": config_of(BARE),
    "full_norm": config_of(norm=True),
    "full_gate": config_of(gate=True),
    "full_all": config_of(rope_share=0.0, log_scale=True, log_scale_tokens=9, norm=True, gate=True),
}


@dataclass
class Case:
    """How to build an operator over all heads of a layer, and its empty state."""

    build: Callable[[], nn.Module]
    state: Callable[[], Any]


CASES = {
    "full": Case(lambda: FullHeads(CONFIG, range(HEADS)), KeyValueStore),
    "gdn": Case(lambda: GatedDeltaHeads(CONFIG, HEADS), GatedDeltaState),
    "nha": Case(lambda: NativeHybridHeads(CONFIG, range(HEADS), 10, 4), NativeHybridState),
    "nha_wide": Case(lambda: NativeHybridHeads(CONFIG, range(HEADS), 40, 4), NativeHybridState),
}
for name, config in CONFIGS.items():
    if name.startswith("gdn"):
        CASES[name] = Case(partial(GatedDeltaHeads, config, HEADS), GatedDeltaState)
    else:
        CASES[name] = Case(partial(FullHeads, config, range(HEADS)), KeyValueStore)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def operator(case: Case) -> nn.Module:
    """The operator with every parameter drawn at random, so that none is at an identity start."""
    torch.manual_seed(0)
    built = case.build().eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return built


@pytest.fixture
def x_BTC() -> Tensor:
    return torch.randn(2, TOKENS, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1))


def run(
    operator: nn.Module,
    x_BTC: Tensor,
    attention_mask: Tensor | None = None,
    state: Any = None,
    past: int = 0,
) -> Tensor:
    """The operator on x after `past` tokens; attention_mask covers past and new tokens."""
    tokens = x_BTC.shape[1]
    mask = build_mask(attention_mask, tokens, past, x_BTC.device)
    positions = torch.arange(past, past + tokens)[None]
    if attention_mask is not None:
        positions = (attention_mask.cumsum(-1) - 1).clamp_min(0)[:, past:]
    rope = Rotary(CONFIG).tables(positions, x_BTC.dtype)
    if isinstance(operator, FullHeads):
        own = full_positions(Rotary(operator.config), positions, x_BTC.dtype, training=False)
        attended: Tensor = operator(x_BTC, rope, mask, state, own_positions=own)
        return attended
    output: Tensor = operator(x_BTC, rope, mask.valid_BT, state)
    return output


def test_shape(operator: nn.Module, x_BTC: Tensor) -> None:
    assert run(operator, x_BTC).shape == (2, TOKENS, HEADS, CONFIG.head_dim)


def test_later_tokens_change_nothing_before_them(operator: nn.Module, x_BTC: Tensor) -> None:
    changed = x_BTC.clone()
    changed[:, 50:] += 1
    before, after = run(operator, x_BTC), run(operator, changed)
    torch.testing.assert_close(before[:, :50], after[:, :50])
    assert not torch.allclose(before[:, 50:], after[:, 50:])


def test_earlier_tokens_matter(operator: nn.Module, x_BTC: Tensor) -> None:
    changed = x_BTC.clone()
    changed[:, 45] += 1
    assert not torch.allclose(run(operator, x_BTC)[:, -1], run(operator, changed)[:, -1], atol=1e-6)


@pytest.mark.parametrize("chosen", [[0], [1, 3], [2, 3], [0, 1, 2, 3]])
def test_select_equals_the_heads_taken_from_all(
    operator: nn.Module, x_BTC: Tensor, chosen: list[int]
) -> None:
    part = operator.select(chosen)
    torch.testing.assert_close(
        run(part, x_BTC), run(operator, x_BTC)[:, :, chosen], atol=1e-5, rtol=1e-4
    )
    originals = {parameter.data_ptr() for parameter in operator.parameters()}
    assert all(parameter.data_ptr() not in originals for parameter in part.parameters())
    assert all(parameter.requires_grad for parameter in part.parameters())


@pytest.mark.parametrize(
    "pieces", [[1, 69], [33, 37], [64, 1, 5], [9, 1, 1, 1, 58], [8, *[1] * 8, 54]]
)
def test_state_round_trip(
    case: Case, operator: nn.Module, x_BTC: Tensor, pieces: list[int]
) -> None:
    state, outputs, past = case.state(), [], 0
    for piece in pieces:
        outputs.append(run(operator, x_BTC[:, past : past + piece], state=state, past=past))
        past += piece
    torch.testing.assert_close(torch.cat(outputs, 1), run(operator, x_BTC), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("padding", [3, 35])
def test_left_padding_changes_nothing(
    case: Case, operator: nn.Module, x_BTC: Tensor, padding: int
) -> None:
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, :padding] = 0
    expected = run(operator, x_BTC[1:, padding:])
    padded = run(operator, x_BTC, mask)
    assert padded.isfinite().all()
    torch.testing.assert_close(padded[1:, padding:], expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(padded[:1], run(operator, x_BTC[:1]), atol=1e-5, rtol=1e-4)
    state, cut = case.state(), 67
    run(operator, x_BTC[:, :cut], mask[:, :cut], state)
    steps = [
        run(operator, x_BTC[:, t : t + 1], mask[:, : t + 1], state, past=t)
        for t in range(cut, TOKENS)
    ]
    torch.testing.assert_close(torch.cat(steps, 1), padded[:, cut:], atol=1e-5, rtol=1e-4)


def test_every_parameter_and_the_input_get_a_gradient(operator: nn.Module, x_BTC: Tensor) -> None:
    x_BTC.requires_grad_()
    output = run(operator, x_BTC)
    (
        output * torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    ).sum().backward()
    for name, tensor in [("x", x_BTC), *operator.named_parameters()]:
        assert tensor.grad is not None, name
        assert tensor.grad.isfinite().all(), name
        assert (tensor.grad != 0).any(), name


def test_gradients_equal_finite_differences(case: Case, x_BTC: Tensor) -> None:
    """Along one random direction of all parameters: no detach, no wrong branch."""
    torch.manual_seed(0)
    operator = case.build()
    x_BTC = x_BTC[:1, :45]
    with torch.no_grad():
        for parameter in operator.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    weights = torch.randn(run(operator, x_BTC).shape)
    parameters = list(operator.parameters())
    directions = [torch.randn_like(parameter) for parameter in parameters]
    gradients = torch.autograd.grad((run(operator, x_BTC) * weights).sum(), parameters)
    expected = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True))

    def moved(step: float) -> float:
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.add_(direction, alpha=step)
            value = float((run(operator, x_BTC).double() * weights).sum())
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.add_(direction, alpha=-step)
        return value

    measured = (moved(4e-4) - moved(-4e-4)) / 8e-4
    assert measured == pytest.approx(expected, rel=2e-2, abs=0.2)
