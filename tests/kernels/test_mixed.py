"""The layer of mixed heads against its reference, and the composition that benches compare it to.

On a machine without a GPU: TRITON_INTERPRET=1 python -m pytest tests/kernels, with triton installed; without it, only what
needs no Triton runs. Errors are the norm of the difference over the norm of the reference, which computes in fp64.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from archsearch.lab.kernel_timing import (
    counted_compilations,
    forget_compilations,
    relative_errors,
    run_with_gradients,
    widened,
)
from archsearch_kernels.gdn import reference as gdn_reference
from archsearch_kernels.mixed import composition, reference
from archsearch_kernels.mixed.attention import attend
from archsearch_kernels.mixed.bench import draw_layer, gradients, plan_of
from archsearch_kernels.mixed.heads import BOTH_ROTATED, MixedPlan, Switches, plan_mixed
from archsearch_kernels.mixed.remade import Remade
from archsearch_kernels.prologue.reference import log_scale

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
needs_triton = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="needs a GPU or TRITON_INTERPRET=1"
)
if DEVICE != "cpu" or INTERPRETED:
    from archsearch_kernels.mixed.operator import mixed_heads
TOLERANCE = {
    torch.float32: 1e-4 if DEVICE == "cpu" else 1e-3,
    torch.bfloat16: 2e-2 if DEVICE == "cuda" else 1e-2,
}
OPTIONS = ("q_weight_D", "k_weight_D", "gamma_nD", "bias_nD", "gate_BTnD")

MAPS = {
    "all linear": ((), (0, 1, 2, 3, 4, 5)),
    "all full": ((0, 1, 2, 3, 4, 5), ()),
    "even": ((1, 4), (5, 0, 2, 3)),
    "every other group": ((0, 1, 4, 5), (2, 3)),
    "uneven": ((0, 1, 2, 5), (3, 4)),
    "one full": ((3,), (0, 1, 2, 4, 5)),
}
"""Of six query heads over three KV heads."""


@dataclass(frozen=True)
class Inputs:
    heads: str = "even"
    tokens: int = 5
    dtype: torch.dtype = torch.float32
    batch: int = 2
    dim: int = 16
    switches: Switches = BOTH_ROTATED
    bare: bool = False

    def plan(self) -> MixedPlan:
        return plan_mixed(*MAPS[self.heads], 3, DEVICE, self.switches)

    def arguments(self) -> dict[str, Any]:
        """Leaves, and tables and plan, which are none."""
        generator = torch.Generator().manual_seed(self.tokens)
        places, count = (self.batch, self.tokens), len(MAPS[self.heads][1])

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        tensors = {
            "q_BTHD": draw(*places, 6, self.dim),
            "k_BTGD": draw(*places, 3, self.dim),
            "v_BTGD": draw(*places, 3, self.dim),
            "a_BTn": draw(*places, count),
            "b_BTn": draw(*places, count),
            "gate_BTnD": draw(*places, count, self.dim),
        }
        tensors = {name: x.to(self.dtype) for name, x in tensors.items()}
        tensors |= {
            "A_log_n": 0.5 * draw(count),
            "dt_bias_n": draw(count) - 3,
            "q_weight_D": 1 + 0.3 * draw(self.dim),
            "k_weight_D": 1 + 0.3 * draw(self.dim),
            "gamma_nD": 1 + 0.3 * draw(count, self.dim),
            "bias_nD": draw(count, self.dim),
        }
        if self.bare:
            tensors = {name: x for name, x in tensors.items() if name not in OPTIONS}
        angles = torch.arange(self.tokens)[:, None] * 10.0 ** -torch.arange(self.dim // 2)
        angles = torch.cat((angles, angles), dim=-1)
        tables = {
            "cos_BTD": angles.cos(),
            "sin_BTD": angles.sin(),
            "factor_BT": log_scale(torch.arange(self.tokens), 8),
        }
        leaves = {name: x.to(DEVICE).requires_grad_() for name, x in tensors.items()}
        return leaves | {name: x.to(DEVICE) for name, x in tables.items()} | {"plan": self.plan()}


def errors(found: dict[str, Tensor], arguments: dict[str, Any]) -> dict[str, float]:
    """Relative to the reference in fp64; of tensors without entries there are none."""
    expected = run_with_gradients(reference.mixed_heads, widened(arguments))
    return relative_errors(found, expected)


def check(inputs: Inputs, **options: Any) -> None:
    arguments = inputs.arguments()
    found = errors(run_with_gradients(partial(mixed_heads, **options), arguments), arguments)
    worst = max(found.values())
    assert worst < TOLERANCE[inputs.dtype], found


@needs_triton
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("remake", [True, False])
@pytest.mark.parametrize("heads", list(MAPS))
def test_layer_equals_its_reference(heads: str, remake: bool) -> None:
    check(Inputs(heads), remake=remake, backward_parts=2 if remake else 1)


@needs_triton
@pytest.mark.parametrize(
    "switches",
    [Switches(full_rotary=False, full_log_scale=True), Switches(linear_rotary=False)],
)
def test_branches_may_differ_in_rotation(switches: Switches) -> None:
    check(Inputs(switches=switches))


@needs_triton
def test_without_norm_gamma_bias_and_gate() -> None:
    check(Inputs(bare=True))


@needs_triton
def test_more_tokens_than_a_chunk() -> None:
    check(Inputs(tokens=70, batch=1))


@pytest.mark.skipif(DEVICE == "cpu", reason="bf16 and streams are the GPU's")
@pytest.mark.parametrize("heads", ["even", "uneven"])
def test_bf16_and_streams(heads: str) -> None:
    check(Inputs(heads, 200, torch.bfloat16, dim=64))
    check(Inputs(heads, 200, torch.bfloat16, dim=64), side_stream=torch.cuda.Stream())


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter compiles nothing")
def test_one_compilation_serves_a_hundred_head_maps() -> None:
    rng, compiled = random.Random(0), []
    forget_compilations()
    for number in range(100):
        full = rng.sample(range(16), rng.randint(0, 16) if number else 2)
        arguments = draw_layer(1, 200, plan_of(tuple(full)), dim=64)
        with counted_compilations() as names:
            gradients(partial(mixed_heads, **arguments), arguments)
        compiled.append(len(names))
    assert compiled[0] > 0
    assert compiled[1:] == [0] * 99


@needs_triton
def test_backward_twice_and_not_at_all() -> None:
    arguments = Inputs().arguments()
    out = mixed_heads(**arguments)
    once, twice = (
        torch.autograd.grad(out.sum(), arguments["q_BTHD"], retain_graph=True)[0] for _ in range(2)
    )
    assert torch.equal(once, twice)
    with torch.no_grad():
        assert torch.equal(out.detach(), mixed_heads(**arguments))


@needs_triton
def test_plan_of_other_heads_is_refused() -> None:
    arguments = Inputs().arguments() | {"plan": Inputs("one full").plan()}
    with pytest.raises(ValueError, match="the plan has"):
        mixed_heads(**arguments)


@needs_triton
def test_wrong_inputs_are_refused() -> None:
    arguments = Inputs().arguments()
    for name, change, message in (
        ("q_BTHD", lambda x: x[0], "need 4, 4 and 3 dimensions"),
        ("a_BTn", lambda x: x.tolist(), "a must be a tensor; got list"),
        ("v_BTGD", lambda x: x[:, 1:], "v must be"),
        ("v_BTGD", lambda x: x.half(), "v must be"),
        ("plan", lambda _: None, "plan must be plan_mixed's result; got NoneType"),
        ("b_BTn", lambda x: x[:, :, 1:], "a, b must be"),
    ):
        with pytest.raises(ValueError, match=message):
            mixed_heads(**{**arguments, name: change(arguments[name])})


def by_reference(*inputs: Tensor) -> Tensor:
    q, *_ = inputs
    index = torch.arange(q.shape[2], dtype=torch.int32, device=q.device)
    return gdn_reference.gdn_forward(*inputs, index, index)[0].to(q.dtype)


@pytest.mark.parametrize("heads", list(MAPS))
def test_composition_equals_the_reference(heads: str) -> None:
    arguments = Inputs(heads).arguments()
    found = run_with_gradients(partial(composition.mixed_heads, delta_rule=by_reference), arguments)
    assert max(errors(found, arguments).values()) < 1e-4


@pytest.mark.parametrize(
    "switches",
    [Switches(full_rotary=False, full_log_scale=True), Switches(linear_rotary=False)],
)
def test_composition_rotates_what_the_switches_ask_for(switches: Switches) -> None:
    arguments = Inputs(switches=switches).arguments()
    found = run_with_gradients(partial(composition.mixed_heads, delta_rule=by_reference), arguments)
    assert max(errors(found, arguments).values()) < 1e-4


def test_keys_and_values_of_full_attention() -> None:
    even, uneven = (plan_mixed(*MAPS[name], 3, "cpu") for name in ("every other group", "uneven"))
    assert even.full_kv == (0, 2)
    assert even.kv_runs == ((slice(0, 2), slice(0, 3, 2)),)
    assert uneven.full_kv == (0, 0, 1, 2)
    assert uneven.kv_runs == (
        (slice(0, 1), slice(0, 1, 1)),
        (slice(1, 4), slice(0, 3, 1)),
    )
    assert plan_mixed((1, 4), (5, 0, 2, 3), 3, "cpu") is plan_mixed((4, 1), (5, 0, 2, 3), 3, "cpu")


@pytest.mark.parametrize(
    ("full", "linear", "num_kv_heads"),
    [((0, 1), (1, 2), 1), ((0,), (2,), 1), ((), (), 1), ((0, 1), (2,), 2), ((0, 1), (2, 3), 0)],
)
def test_head_maps_that_cannot_be(
    full: tuple[int, ...], linear: tuple[int, ...], num_kv_heads: int
) -> None:
    with pytest.raises(ValueError, match=r"must come once|no multiple"):
        plan_mixed(full, linear, num_kv_heads, "cpu")
    with pytest.raises(ValueError, match="whole numbers"):
        plan_mixed([*map(float, full), 0.5], linear, num_kv_heads, "cpu")


def test_attention_sees_no_later_token() -> None:
    q, k, v = torch.randn(3, 1, 6, 4, 16, device=DEVICE).bfloat16()
    before = attend(q, k[:, :, :2], v[:, :, :2])
    k[:, 4:], v[:, 4:] = 0, 0
    assert torch.equal(before[:, :4], attend(q, k[:, :, :2], v[:, :, :2])[:, :4])


def test_results_are_made_again_once_a_backward_pass() -> None:
    x, calls = torch.randn(4, 2, requires_grad=True), []

    def make() -> list[Tensor]:
        calls.append(1)
        return [x.detach() * 2]

    y = x * 2
    with Remade([y], make).hooks():
        out = (y.t()[:, 1:] * y.t()[:, 1:] * 3).sum()
    del y
    expected = torch.zeros(4, 2)
    expected[1:] = 24 * x.detach()[1:]
    for _ in range(2):
        torch.testing.assert_close(
            torch.autograd.grad(out, x, retain_graph=True)[0], expected, rtol=1e-5, atol=1e-6
        )
    assert len(calls) == 2
