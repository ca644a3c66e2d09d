"""The fusion in Triton against its reference: on a GPU, or in Triton's interpreter.

On a machine without a GPU: TRITON_INTERPRET=1 python -m pytest tests/kernels, with triton installed. Without it, all skip
but the tests of the table and of the reference. Errors are the norm of the difference over the norm of the reference, which
computes in fp64 on the kernel's own inputs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from archsearch.attention.fusion import HeadIndex, fuse, scatter_heads
from archsearch_kernels.fusion import reference
from archsearch_kernels.fusion.heads import FusionPlan, Head, plan_fusion
from tests.kernels.compilations import num_compilations

pytestmark = pytest.mark.usefixtures("poisoned_memory")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
needs_triton = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="needs a GPU or TRITON_INTERPRET=1"
)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def mixed(full: tuple[int, ...], count: int, is_bare: bool) -> tuple[Head, ...]:
    """Heads of which those in `full` are full attention, with rows and gates for all or, bare, for linear heads only."""
    heads, places = [], {True: 0, False: 0}
    for head in range(count):
        in_full = head in full
        place = places[in_full]
        places[in_full] += 1
        if not is_bare:
            heads.append(Head(in_full, place, norm=not in_full, row=count - 1 - head, gate=head))
        elif in_full:
            heads.append(Head(True, place, norm=False))
        else:
            heads.append(Head(False, place, row=place, gate=place))
    return tuple(heads)


@dataclass(frozen=True)
class Inputs:
    heads: tuple[Head, ...] = mixed((1, 4), 5, is_bare=True)
    tokens: int = 9
    dtype: torch.dtype = torch.float32
    batch: int = 2
    dim: int = 32
    gamma: bool = True
    bias: bool = True
    gate: bool = True
    spare: int = 0

    def plan(self) -> FusionPlan:
        return plan_fusion(self.heads, DEVICE)

    def arguments(self) -> dict[str, Any]:
        """Branches as operators leave them: the full one with heads before tokens. `spare` rows and gates serve no head."""
        generator, plan = torch.Generator().manual_seed(self.tokens), self.plan()

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        places, rows = (self.batch, self.tokens), len(plan.rows) + self.spare
        full = draw(self.batch, plan.num_full, self.tokens, self.dim).transpose(1, 2)
        linear = 3 * draw(*places, plan.num_linear, self.dim)
        gate = draw(*places, len(plan.gates) + self.spare, 2 * self.dim)[..., self.dim :]
        gamma, bias = 1 + 0.3 * draw(rows, self.dim), draw(rows, self.dim)
        return {
            "full_BTFD": full.to(DEVICE, self.dtype) if plan.num_full else None,
            "linear_BTnD": linear.to(DEVICE, self.dtype) if plan.num_linear else None,
            "gamma_RD": gamma.to(DEVICE) if self.gamma else None,
            "bias_RD": bias.to(DEVICE) if self.bias else None,
            "gate_BTED": gate.to(DEVICE, self.dtype) if self.gate else None,
        }


def with_gradients(
    call: Any, plan: FusionPlan, arguments: dict[str, Any], kind: Any
) -> list[Tensor]:
    """Output, then gradients to all inputs, of a sum with random factors that is the same for equal shapes."""
    leaves = {
        name: x.detach().to(kind(x)).requires_grad_()
        for name, x in arguments.items()
        if x is not None
    }
    some = next(iter(arguments.values()))
    some = arguments["linear_BTnD"] if some is None else some
    out = call(plan=plan, **{**arguments, **leaves})
    factor = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    factor = factor.to(DEVICE, some.dtype).to(out.dtype)
    gradients = torch.autograd.grad(
        (out * factor).double().sum(), list(leaves.values()), materialize_grads=True
    )
    return [out, *gradients]


def check(inputs: Inputs, **changes: Any) -> None:
    kernel = pytest.importorskip("archsearch_kernels.fusion.kernel")
    arguments, plan = {**inputs.arguments(), **changes}, inputs.plan()
    found = with_gradients(kernel.fusion, plan, arguments, lambda x: x.dtype)
    expected = with_gradients(reference.fusion, plan, arguments, lambda _: torch.float64)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        error, norm = (one.double() - other).norm(), other.norm()
        assert error <= TOLERANCE[inputs.dtype] * norm, f"error {error:.1e} of {norm:.1e}"


@needs_triton
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("is_bare", [True, False])
def test_dtypes(dtype: torch.dtype, is_bare: bool) -> None:
    check(Inputs(mixed((1, 4), 5, is_bare), dtype=dtype))


@needs_triton
@pytest.mark.parametrize("gamma", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gate", [True, False])
def test_what_may_be_missing(gamma: bool, bias: bool, gate: bool) -> None:
    check(Inputs(gamma=gamma, bias=bias, gate=gate))


@needs_triton
@pytest.mark.parametrize("tokens", [1, 127, 128, 300])
def test_lengths(tokens: int) -> None:
    check(Inputs(tokens=tokens, dim=64))


@needs_triton
@pytest.mark.parametrize("dim", [16, 128, 256])
def test_head_dims(dim: int) -> None:
    check(Inputs(dim=dim))


@needs_triton
@pytest.mark.parametrize("full", [(), (0, 1, 2), (2,)])
def test_one_branch_and_rows_that_serve_no_head(full: tuple[int, ...]) -> None:
    check(Inputs(mixed(full, 3, is_bare=False), spare=2))
    check(Inputs(mixed(full, 3, is_bare=True), spare=1))


@needs_triton
def test_one_gamma_a_head() -> None:
    kernel = pytest.importorskip("archsearch_kernels.fusion.kernel")
    arguments, plan = Inputs().arguments(), Inputs().plan()
    for gamma in (torch.arange(3.0, device=DEVICE), torch.ones(3, 1, device=DEVICE)):
        arguments["gamma_RD"] = gamma.reshape(-1, 1).expand(-1, 32).contiguous()
        wide = with_gradients(kernel.fusion, plan, arguments, lambda x: x.dtype)
        arguments["gamma_RD"] = gamma
        narrow = with_gradients(kernel.fusion, plan, arguments, lambda x: x.dtype)
        wide[3] = wide[3].sum(1).view(gamma.shape)
        for one, other in zip(narrow, wide, strict=True):
            torch.testing.assert_close(one, other)


@needs_triton
def test_gradients_keep_the_layout_of_their_branch() -> None:
    kernel = pytest.importorskip("archsearch_kernels.fusion.kernel")
    inputs = Inputs()
    arguments = {name: x.detach().requires_grad_() for name, x in inputs.arguments().items()}
    kernel.fusion(plan=inputs.plan(), **arguments).sum().backward()
    full = arguments["full_BTFD"]
    assert full.grad.stride() == full.stride()
    assert arguments["linear_BTnD"].grad.is_contiguous()


@needs_triton
def test_gate_factor() -> None:
    kernel = pytest.importorskip("archsearch_kernels.fusion.kernel")
    arguments = Inputs().arguments()
    found, expected = (
        call(plan=Inputs().plan(), **arguments, gate_factor=1.0, norm_eps=0.1)
        for call in (kernel.fusion, reference.fusion)
    )
    torch.testing.assert_close(found, expected)


@needs_triton
def test_nothing_to_do() -> None:
    kernel = pytest.importorskip("archsearch_kernels.fusion.kernel")
    inputs = Inputs(tokens=0)
    out, *gradients = with_gradients(
        kernel.fusion, inputs.plan(), inputs.arguments(), lambda x: x.dtype
    )
    assert out.shape == (2, 0, 160)
    assert not any(x.any() for x in gradients)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter compiles nothing")
def test_one_compilation_serves_every_head_map() -> None:
    passes = pytest.importorskip("archsearch_kernels.fusion.passes")
    stages = (passes.fuse, passes.part_gradients)

    compiled = 0
    for full in range(1, 17):
        heads = mixed(tuple(range(full)), 17, is_bare=True)
        check(Inputs(heads, 10 + full, torch.bfloat16, 1 + full % 3, 128))
        compiled = compiled or num_compilations(*stages)
    assert num_compilations(*stages) == compiled


def test_the_reference_is_what_the_model_computes() -> None:
    """Today's layer: linear heads normed, scaled, shifted and gated, full heads as they are, back at their own index."""
    arguments, plan = Inputs().arguments(), Inputs().plan()
    linear = fuse(
        arguments["linear_BTnD"],
        gamma_nD=arguments["gamma_RD"],
        bias_nD=arguments["bias_RD"],
        gate_BTnD=2 * torch.sigmoid(arguments["gate_BTED"]),
        norm_eps=1e-6,
    )
    order = HeadIndex([2, 0, 3, 4, 1])
    expected = scatter_heads([arguments["full_BTFD"], linear], order).flatten(2)
    torch.testing.assert_close(reference.fusion(plan=plan, **arguments), expected)


def test_plans() -> None:
    heads = mixed((1, 4), 5, is_bare=True)
    plan = plan_fusion(heads, DEVICE)
    assert plan is plan_fusion(list(heads), DEVICE)
    assert plan.table[:2, :5].tolist() == [[0, 0, 1, 0, 0], [1, 0, 0, -1, -1]]
    assert (plan.num_full, plan.num_linear, plan.rows, plan.gates) == (2, 3, (0, 1, 2), (0, 1, 2))
    for wrong, message in (
        ((Head(True, 0), Head(True, 0)), "full branch"),
        ((Head(False, 1),), "linear branch"),
        ((Head(False, 0, row=1), Head(False, 1, row=1)), "each row"),
        ((Head(False, 0, gate=-1),), "each gate"),
        ((Head(False, 0.5),), "whole numbers"),
        ((0,), "a sequence of Head"),
    ):
        with pytest.raises(ValueError, match=message):
            plan_fusion(wrong, DEVICE)


@needs_triton
def test_wrong_inputs_are_refused() -> None:
    kernel = pytest.importorskip("archsearch_kernels.fusion.kernel")
    arguments, plan = Inputs().arguments(), Inputs().plan()
    for name, change, message in (
        ("full_BTFD", lambda x: x[..., :12], "with D of"),
        ("full_BTFD", lambda x: x.double(), "possible"),
        ("full_BTFD", lambda _: None, "full branch, which is missing"),
        ("linear_BTnD", lambda x: x[:, :3], "linear branch must be"),
        ("linear_BTnD", lambda x: x.half(), "linear branch must be"),
        ("linear_BTnD", lambda x: x.mT.contiguous().mT, "last stride of the linear"),
        ("gamma_RD", lambda x: x[:2], "gamma must be"),
        ("bias_RD", lambda x: x[:, :1], "bias must be"),
        ("bias_RD", lambda x: torch.cat((x, x)), "bias 6"),
        ("gate_BTED", lambda x: x[:, :, :2], "gate must be"),
        ("gate_BTED", lambda x: x.tolist(), "gate must be a tensor; got list"),
        ("gamma_RD", lambda x: x.tolist(), "gamma must be a tensor; got list"),
        ("gate_BTED", lambda x: x.double(), "gate must be"),
    ):
        with pytest.raises(ValueError, match=message):
            kernel.fusion(plan=plan, **{**arguments, name: change(arguments[name])})
    with pytest.raises(ValueError, match="one branch"):
        kernel.fusion(None, None, plan)
