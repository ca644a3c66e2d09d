"""Gradients of the Triton gated delta rule against autograd through the reference: on a GPU, or in Triton's interpreter.

Inputs, fixtures and the way to run are test_gdn_kernel.py's; the reference computes in fp64 on the kernel's own inputs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from archsearch_kernels.gdn import reference
from tests.kernels.compilations import num_compilations
from tests.kernels.test_gdn_kernel import (  # noqa: F401 - a fixture of every test
    DEVICE,
    Inputs,
    true_bf16,
)

kernels = pytest.importorskip("archsearch_kernels.gdn.backward_kernels")
forward_kernels = pytest.importorskip("archsearch_kernels.gdn.forward_kernels")
gradient_kernels = pytest.importorskip("archsearch_kernels.gdn.gradient_kernels")
operator = pytest.importorskip("archsearch_kernels.gdn.operator")

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TOLERANCE = {torch.float32: 2e-4 if DEVICE == "cpu" else 5e-4, torch.bfloat16: 1e-2}
INDICES = ("q_index_n", "kv_index_n")
SUMS_OVER_TOKENS = ("A_log_H", "dt_bias_H")
"""One number a head, in which tokens' gradients of either sign cancel, but not the rounding of bf16 in each: twice the error."""


def gradients_of(function: Any, arguments: dict[str, Any], options: dict[str, Any], of: str) -> Any:
    """Gradients of each float argument, from random ones of the outputs `of`: o, state or both."""
    names = [name for name, x in arguments.items() if x is not None and name not in INDICES]
    leaves = {name: arguments[name].detach().requires_grad_() for name in names}
    o, state = function(**{**arguments, **leaves}, **options)
    generator = torch.Generator().manual_seed(1)
    batch, tokens, heads, dim = o.shape
    # Gradients of o as layers hand them back: heads before tokens.
    d_o = torch.randn(batch, heads, tokens, dim, generator=generator).to(DEVICE).transpose(1, 2)
    d_state = torch.randn(state.shape, generator=generator).to(DEVICE)
    pairs = {"o": (o, d_o.bfloat16()), "state": (state, d_state)}
    if of != "both":
        pairs = {of: pairs[of]}
    outputs = [output for output, _ in pairs.values()]
    gradients = torch.autograd.grad(
        outputs,
        list(leaves.values()),
        [d.to(x.dtype) for x, d in pairs.values()],
        materialize_grads=True,
    )
    return dict(zip(names, gradients, strict=True))


def check(
    inputs: Inputs,
    cu_seqlens: list[int] | None = None,
    chunks_per_segment: int | None = None,
    rate: float = 0.0,
    of: str = "both",
    backward_parts: int = 1,
) -> None:
    """rate: added to the log-odds of the writing rates."""
    arguments = inputs.arguments()
    arguments["b_BTH"] = arguments["b_BTH"] + rate
    bounds = None if cu_seqlens is None else torch.tensor(cu_seqlens, device=DEVICE)
    options = {"cu_seqlens": bounds, "output_final_state": True}
    cut = {"chunks_per_segment": chunks_per_segment, "backward_parts": backward_parts}
    found = gradients_of(operator.gated_delta_net, arguments, {**options, **cut}, of)
    wide = {
        name: x.double() if x is not None and x.is_floating_point() else x
        for name, x in arguments.items()
    }
    expected = gradients_of(reference.gdn_forward, wide, options, of)
    errors = {}
    for name, other in expected.items():
        assert found[name].shape == other.shape
        assert found[name].dtype == arguments[name].dtype
        difference = (found[name].double() - other).norm()
        errors[name] = float(difference / other.norm()) if other.any() else float(difference)
    bound = TOLERANCE[inputs.dtype]
    for name, error in errors.items():
        allowed = 2 * bound if name in SUMS_OVER_TOKENS else bound
        assert error < allowed, f"relative errors {errors}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 63, 64, 65, 129, 200])
def test_lengths(tokens: int, dtype: torch.dtype) -> None:
    # The gradient of a is a sum of large terms: among a few of them one may by chance be next to zero.
    batch = 8 if tokens < 8 else 1
    check(Inputs(tokens, dtype, batch, dim=32, num_states=batch))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 64, 128])
def test_head_dims(dim: int, dtype: torch.dtype) -> None:
    check(Inputs(70, dtype, dim=dim, q_index=(1,), kv_index=(0,)))


def test_largest_head_dim() -> None:
    check(Inputs(65, torch.bfloat16, dim=256, q_index=(1,), kv_index=(0,)))


@pytest.mark.parametrize(
    ("q_index", "kv_index"),
    [
        ((2, 0, 1), (0, 1, 2)),
        ((5, 4, 0, 1), (2, 2, 0, 0)),
        ((4, 2, 0, 5), (1, 1, 0, 1)),
        ((0,), (2,)),
    ],
)
def test_heads_that_share_keys(q_index: tuple[int, ...], kv_index: tuple[int, ...]) -> None:
    check(Inputs(70, dim=16, num_heads=6, num_kv_heads=3, q_index=q_index, kv_index=kv_index))


@pytest.mark.parametrize(
    ("num_states", "half_life"),
    [
        (0, 1.0),
        (2, 2000.0),
        *(
            pytest.param(*case, marks=pytest.mark.slow_interpreter)
            for case in ((0, 0.3), (2, 0.3), (2, 1.0), (0, 2000.0))
        ),
    ],
)
def test_segments(num_states: int, half_life: float) -> None:
    """Both ways through the first pass: segments' maps linked, and forgotten before they begin."""
    inputs = Inputs(330, dim=16, batch=2, half_life=half_life, num_states=num_states)
    check(inputs, chunks_per_segment=1, backward_parts=3)
    check(inputs, chunks_per_segment=2)
    check(replace(inputs, dtype=torch.bfloat16), chunks_per_segment=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("half_life", [0.3, 20.0, 65536.0])
@pytest.mark.parametrize("rate", [-12.0, 8.0])
def test_gates(rate: float, half_life: float, dtype: torch.dtype) -> None:
    check(Inputs(100, dtype, dim=32, half_life=half_life, num_states=1), rate=rate)


@pytest.mark.parametrize("chunks_per_segment", [1, 2, None])
def test_packed_sequences(chunks_per_segment: int | None) -> None:
    bounds = [0, 0, 65, 65, 66, 200, 200]
    check(Inputs(200, dim=32, num_states=6), bounds, chunks_per_segment, backward_parts=2)


@pytest.mark.parametrize("of", ["o", "state"])
def test_one_output_alone(of: str) -> None:
    check(Inputs(130, dim=16, num_states=1, q_index=(1,), kv_index=(0,)), of=of)


def test_strides() -> None:
    check(Inputs(70, torch.bfloat16, dim=32, batch=2, strided=True, num_states=2))


def test_gradient_of_a_sum() -> None:
    """Its gradient is one number, repeated with strides of zero."""
    arguments = Inputs(5, dim=16).arguments()
    del arguments["initial_state"]
    v = arguments["v_BTGD"].requires_grad_()
    expected = torch.autograd.grad(reference.gdn_forward(**arguments)[0].sum(), v)[0]
    found = torch.autograd.grad(operator.gated_delta_net(**arguments)[0].sum(), v)[0]
    torch.testing.assert_close(found, expected)


def test_heads_that_do_not_run_get_zeros() -> None:
    arguments = Inputs(5, dim=16, q_index=(2,), kv_index=(1,)).arguments()
    found = gradients_of(operator.gated_delta_net, arguments, {"output_final_state": True}, "both")
    for name, others in {
        "q_BTHD": [0, 1, 3],
        "a_BTH": [0, 1, 3],
        "k_BTGD": [0],
        "v_BTGD": [0],
    }.items():
        assert not found[name][:, :, others].any()
    assert not found["A_log_H"][[0, 1, 3]].any()


def test_nothing_to_do() -> None:
    for inputs in (Inputs(5, dim=16, q_index=(), kv_index=()), Inputs(0, dim=16, num_states=1)):
        found = gradients_of(
            operator.gated_delta_net, inputs.arguments(), {"output_final_state": True}, "both"
        )
        assert not any(x.any() for name, x in found.items() if name != "initial_state")
        if inputs.num_states:
            assert found["initial_state"].all()


def test_tokens_without_gates_have_finite_gradients() -> None:
    arguments = Inputs(70, dim=16, num_states=1).arguments()
    arguments["a_BTH"][:, :9] = float("-inf")
    arguments["b_BTH"][:, :9] = float("-inf")
    found = gradients_of(operator.gated_delta_net, arguments, {"output_final_state": True}, "both")
    assert all(x.isfinite().all() for x in found.values())
    assert not found["a_BTH"][:, :9].any()
    assert not found["b_BTH"][:, :9].any()


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter compiles nothing")
def test_one_compilation_serves_every_head_map() -> None:
    def run(heads: int, batch: int) -> None:
        index = tuple(range(heads))
        inputs = Inputs(
            2048, torch.bfloat16, batch, num_heads=32, q_index=index, kv_index=(1,) * heads
        )
        options = {"output_final_state": True}
        gradients_of(operator.gated_delta_net, inputs.arguments(), options, "o")

    run(32, 16)
    passes = (kernels.replay, kernels.retreat, forward_kernels.link)
    products = (gradient_kernels.query_gradients, gradient_kernels.key_gradients)
    stages = (*passes, *products, gradient_kernels.gather, gradient_kernels.gates)
    compiled = num_compilations(*stages)
    for heads, batch in ((1, 1), (2, 3), (15, 1), (16, 2), (32, 1)):
        run(heads, batch)
    assert num_compilations(*stages) == compiled


def test_no_gradient_without_autograd() -> None:
    arguments = Inputs(3, dim=16).arguments()
    q: Tensor = arguments["q_BTHD"].requires_grad_()
    with torch.no_grad():
        o, state = operator.gated_delta_net(**arguments)
    assert (o.requires_grad, state, q.grad) == (False, None, None)
