"""The prologue in Triton against its reference: on a GPU, or in Triton's interpreter.

On a machine without a GPU: TRITON_INTERPRET=1 python -m pytest tests/kernels, with triton installed. Without it, all skip
but the tests of the tables and of the reference. Errors are the norm of the difference over the norm of the reference, which
computes in fp64 on the kernel's own inputs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from archsearch.attention.full import RMSNorm
from archsearch.attention.rotary import rotate
from archsearch_kernels.prologue import reference
from archsearch_kernels.prologue.heads import HeadPlan, Part, plan_heads
from tests.kernels.compilations import num_compilations

pytestmark = pytest.mark.usefixtures("poisoned_memory")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
needs_triton = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="needs a GPU or TRITON_INTERPRET=1"
)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
MIXED = (
    Part("q", (3, 0), log_scale=True),
    Part("k", (1, 0)),
    Part("q", (1, 2, 5, 6, 4), rotary=True),
    Part("k", (0, 1), rotary=True),
)
"""NoPE heads with log-scale beside rotated heads; k is written both ways, and head 7 of q by nobody."""


@dataclass(frozen=True)
class Inputs:
    tokens: int = 9
    dtype: torch.dtype = torch.float32
    batch: int = 2
    dim: int = 32
    num_q_heads: int = 8
    num_k_heads: int = 2
    parts: tuple[Part, ...] = MIXED
    norm: bool = True
    strided: bool = False
    shared_tables: bool = False

    def plan(self) -> HeadPlan:
        return plan_heads(self.parts, self.num_q_heads, self.num_k_heads, DEVICE)

    def arguments(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.tokens)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        heads = self.num_q_heads + self.num_k_heads
        x = draw(self.batch, self.tokens, heads, self.dim)
        if self.strided:  # slices of one fused projection, heads before tokens
            x = draw(self.batch, heads + 3, self.tokens, self.dim)[:, 2:-1].transpose(1, 2)
        q, k = x.to(DEVICE, self.dtype).split((self.num_q_heads, self.num_k_heads), dim=2)
        angles = draw(1 if self.shared_tables else self.batch, self.tokens, self.dim // 2).repeat(
            1, 1, 2
        )
        tables = {"cos_BTD": angles.cos(), "sin_BTD": angles.sin()}
        positions = torch.arange(self.tokens).expand(angles.shape[:2]) + 3
        factor = reference.log_scale(positions, 8)
        if self.shared_tables:
            tables, factor = {name: x[0] for name, x in tables.items()}, factor[0]
        weights = {"q_weight_D": 1 + 0.3 * draw(self.dim), "k_weight_D": 1 + 0.3 * draw(self.dim)}
        return {
            "q_BTHD": q,
            "k_BTGD": k,
            **{name: x.to(DEVICE) if self.norm else None for name, x in weights.items()},
            **{name: x.to(DEVICE, self.dtype) for name, x in tables.items()},
            "factor_BT": factor.to(DEVICE),
        }


def with_gradients(call: Any, plan: HeadPlan, arguments: dict[str, Any], kind: Any) -> list[Tensor]:
    """Outputs, then gradients to q, k and the weights, of a sum with random factors that is the same for equal shapes."""
    names = ("q_BTHD", "k_BTGD", "q_weight_D", "k_weight_D")
    given = {name: x if x is None else x.to(kind(x)) for name, x in arguments.items()}
    leaves = {name: given[name].detach() for name in names if given[name] is not None}
    for x in leaves.values():
        x.requires_grad_()
    outputs = call(plan=plan, **{**given, **leaves})
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros((), device=DEVICE, dtype=torch.float64)
    for x in outputs:
        # Heads before tokens, as the gradients of attention come.
        factor = torch.randn(x.transpose(1, 2).shape, generator=generator)
        factor = factor.to(DEVICE, arguments["q_BTHD"].dtype).to(x.dtype)
        total = total + (x.transpose(1, 2) * factor).double().sum()
    gradients = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return [*outputs, *gradients]


def check(inputs: Inputs) -> None:
    kernel = pytest.importorskip("archsearch_kernels.prologue.kernel")
    arguments, plan = inputs.arguments(), inputs.plan()
    found = with_gradients(kernel.prologue, plan, arguments, lambda x: x.dtype)
    expected = with_gradients(reference.prologue, plan, arguments, lambda _: torch.float64)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        error, norm = (one.double() - other).norm(), other.norm()
        assert error <= TOLERANCE[inputs.dtype] * norm, f"error {error:.1e} of {norm:.1e}"


@needs_triton
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("norm", [True, False])
def test_dtypes_with_and_without_norm(dtype: torch.dtype, norm: bool) -> None:
    check(Inputs(dtype=dtype, norm=norm))


@needs_triton
@pytest.mark.parametrize("tokens", [1, 31, 64, 65])
def test_lengths(tokens: int) -> None:
    check(Inputs(tokens))


@needs_triton
@pytest.mark.parametrize("dim", [16, 64, 128, 256])
def test_head_dims(dim: int) -> None:
    check(Inputs(dim=dim))


@needs_triton
def test_strides_and_tables_shared_by_the_batch() -> None:
    check(Inputs(33, torch.bfloat16, strided=True, shared_tables=True))


@needs_triton
@pytest.mark.parametrize(
    "parts",
    [
        MIXED[:1],
        (Part("q", (0, 0, 1), rotary=True), Part("k", (0, 1, 0, 0, 0, 1), rotary=True)),
        (Part("q", tuple(range(8)), rotary=True, log_scale=True),),
        (Part("q", ()), Part("k", (1,))),
    ],
)
def test_parts(parts: tuple[Part, ...]) -> None:
    check(Inputs(parts=parts))


@needs_triton
def test_queries_alone() -> None:
    kernel = pytest.importorskip("archsearch_kernels.prologue.kernel")
    plan = plan_heads(MIXED[:1], 8, 0, DEVICE)
    arguments = {**Inputs().arguments(), "k_BTGD": None, "k_weight_D": None}
    found = with_gradients(kernel.prologue, plan, arguments, lambda x: x.dtype)
    expected = with_gradients(reference.prologue, plan, arguments, lambda x: x.dtype)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@needs_triton
def test_a_part_without_gradient_counts_as_zero() -> None:
    kernel = pytest.importorskip("archsearch_kernels.prologue.kernel")
    arguments, plan = Inputs().arguments(), Inputs().plan()
    gradients = []
    for call in (kernel.prologue, reference.prologue):
        q = arguments["q_BTHD"].detach().requires_grad_()
        outputs = call(plan=plan, **{**arguments, "q_BTHD": q})
        gradients.append(torch.autograd.grad(outputs[2].square().sum(), q)[0])
    torch.testing.assert_close(*gradients)
    assert not gradients[0][:, :, [0, 3, 7]].any()


@needs_triton
def test_nothing_to_do() -> None:
    kernel = pytest.importorskip("archsearch_kernels.prologue.kernel")
    arguments, plan = Inputs(tokens=0).arguments(), Inputs(tokens=0).plan()
    *_, dq_weight, _ = with_gradients(kernel.prologue, plan, arguments, lambda x: x.dtype)
    assert not dq_weight.any()


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter compiles nothing")
def test_one_compilation_serves_every_head_map() -> None:
    passes = pytest.importorskip("archsearch_kernels.prologue.passes")
    stages = (passes.write_parts, passes.gather_gradients)

    compiled = 0
    for full in range(1, 17):
        parts = (
            Part("q", tuple(range(full)), log_scale=True),
            Part("k", tuple(sorted({head // 2 for head in range(full)}))),
            Part("q", tuple(range(full, 17)), rotary=True),
            Part("k", tuple(range(9)), rotary=True),
        )
        check(Inputs(10 + full, torch.bfloat16, 1 + full % 3, 128, 17, 9, parts))
        compiled = compiled or num_compilations(*stages)
    assert num_compilations(*stages) == compiled


def test_the_reference_is_what_the_model_computes() -> None:
    """Norm of the teacher, then rotation, as archsearch.attention has them."""
    arguments = Inputs().arguments()
    plan = plan_heads((Part("q", tuple(range(8)), rotary=True),), 8, 2, DEVICE)
    norm = RMSNorm(32, 1e-6)
    norm.weight.data = arguments["q_weight_D"]
    tables = (arguments["cos_BTD"], arguments["sin_BTD"])
    expected = rotate(norm(arguments["q_BTHD"]), tables)
    torch.testing.assert_close(reference.prologue(plan=plan, **arguments)[0], expected)


def test_plans() -> None:
    plan = plan_heads(MIXED, 8, 2, DEVICE)
    assert plan is plan_heads(list(MIXED), 8, 2, DEVICE)
    assert plan.sources.tolist() == [3, 0, 1, 0, 1, 2, 5, 6, 4, 0, 1]
    assert plan.source_starts.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 7, 9, 11]
    assert plan.readers[-2:].tolist() == [[1, 0, 0, 0], [3, 1, 1, 0]]
    assert plan.blocks[2:4, [0, 1, 4, 5, 6]].tolist() == [[2, 1, 0, 5, 4], [2, 1, 4, 5, 4]]
    assert plan.num_groups == (2, 1)
    for parts, message in (
        ((), "0 parts"),
        (MIXED + MIXED[:1], "5 parts"),
        ((Part("q", (8, -1)),), r"heads \[8, -1\] of q"),
        ((Part("k", (2,)),), "of k, which has 2"),
        ((("q", (0,)),), "a sequence of Part"),
    ):
        with pytest.raises(ValueError, match=message):
            plan_heads(parts, 8, 2, DEVICE)


@needs_triton
def test_wrong_inputs_are_refused() -> None:
    kernel = pytest.importorskip("archsearch_kernels.prologue.kernel")
    arguments, plan = Inputs().arguments(), Inputs().plan()
    for name, change, message in (
        ("q_BTHD", lambda x: x[..., :12], "q .* possible"),
        ("q_BTHD", lambda x: x.double(), "possible"),
        ("q_BTHD", lambda _: None, "q must be a tensor; got NoneType"),
        ("q_weight_D", lambda x: x.tolist(), "q_weight must be a tensor; got list"),
        ("cos_BTD", lambda x: x.tolist(), "cos must be a tensor; got list"),
        ("k_BTGD", lambda x: x[:, :3], "k must be"),
        ("k_BTGD", lambda x: x.half(), "k must be"),
        ("k_BTGD", lambda _: None, "which is missing"),
        ("k_BTGD", lambda x: x.mT.contiguous().mT, "last stride of k"),
        ("k_weight_D", lambda _: None, "both or neither"),
        ("k_weight_D", lambda x: x.half(), "differ in type"),
        ("q_weight_D", lambda x: x[1:], "vectors of 32"),
        ("cos_BTD", lambda x: x[:, 1:], "cos must be"),
        ("cos_BTD", lambda x: x.mT.contiguous().mT, "alike"),
        ("sin_BTD", lambda _: None, "needs sin"),
        ("factor_BT", lambda x: x[0, :4], "factor must be"),
        ("factor_BT", lambda _: None, "needs factor"),
    ):
        with pytest.raises(ValueError, match=message):
            kernel.prologue(plan=plan, **{**arguments, name: change(arguments[name])})
