"""The Triton forward of the gated delta rule against the reference: on a GPU, or in Triton's interpreter.

On a machine without a GPU: TRITON_INTERPRET=1 python -m pytest tests/kernels, with triton installed. Without it, all skip.
Errors are the norm of the difference over the norm of the reference, which computes in fp64 on the kernel's own inputs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from archsearch_kernels.gdn import reference
from tests.kernels.compilations import num_compilations

triton = pytest.importorskip("triton")
interpreter = pytest.importorskip("triton.runtime.interpreter")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from archsearch_kernels.gdn import forward_kernels as kernels  # noqa: E402
from archsearch_kernels.gdn import inputs as inputs_module  # noqa: E402
from archsearch_kernels.gdn import kernel, transform_kernels  # noqa: E402
from archsearch_kernels.gdn.operator import gated_delta_net  # noqa: E402

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
TOLERANCE = {torch.float32: 1e-5 if DEVICE == "cpu" else 1e-4, torch.bfloat16: 1e-2}
LENGTHS = (1, 63, 64, 65, 130, 200)

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@dataclass(frozen=True)
class Inputs:
    """Random inputs; the heads that run are neither all of them nor in order, and share heads of k and v."""

    tokens: int
    dtype: torch.dtype = torch.float32
    batch: int = 1
    dim: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    q_index: tuple[int, ...] = (3, 0, 2)
    kv_index: tuple[int, ...] = (1, 0, 1)
    half_life: float = 20.0
    num_states: int = 0
    strided: bool = False

    def arguments(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.tokens)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        places, groups = (self.batch, self.tokens), self.num_kv_heads
        q = draw(*places, self.num_heads, self.dim)
        k, v = draw(2, *places, groups, self.dim)
        a, b = draw(2, *places, self.num_heads)
        if self.strided:  # slices of one fused projection, heads before tokens
            q = draw(self.batch, self.num_heads, self.tokens, self.dim).transpose(1, 2)
            k, v = draw(*places, groups, 3 * self.dim)[..., : 2 * self.dim].chunk(2, dim=-1)
            a, b = draw(*places, 2 * self.num_heads).chunk(2, dim=-1)
        A_log = 0.5 * draw(self.num_heads)
        rate = torch.full((self.num_heads,), 0.6931 / self.half_life)
        state = draw(self.num_states, len(self.q_index), self.dim, self.dim)
        tiles = {"q_BTHD": q, "k_BTGD": k, "v_BTGD": v, "a_BTH": a, "b_BTH": b}
        return {
            **{name: x.to(DEVICE, self.dtype) for name, x in tiles.items()},
            "A_log_H": A_log.to(DEVICE),
            "dt_bias_H": rate.expm1().log().to(DEVICE),
            "q_index_n": torch.tensor(self.q_index, dtype=torch.int32, device=DEVICE),
            "kv_index_n": torch.tensor(self.kv_index, dtype=torch.int32, device=DEVICE),
            "initial_state": state.to(DEVICE) if self.num_states else None,
        }


@pytest.fixture(autouse=True)
def true_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies the bits of bf16 numbers as if they were integers, and rounds towards zero."""
    if DEVICE != "cpu":
        return
    monkeypatch.setattr(inputs_module, "INTERPRETED_DTYPES", inputs_module.DTYPES)
    builder, bf16 = interpreter.InterpreterBuilder, triton.language.bfloat16
    create_dot, cast = builder.create_dot, builder.cast_impl

    def widen(x: Any) -> Any:
        if x.dtype.scalar != bf16:
            return x
        values = (x.data.astype("uint32") << 16).view("float32")
        return interpreter.TensorHandle(values, triton.language.float32)

    def multiply(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, widen(a), widen(b), *rest)

    def round_to_nearest(self: Any, source: Any, kind: Any) -> Any:
        if kind.scalar != bf16 or source.dtype.scalar == bf16:
            return cast(self, source, kind)
        bits = torch.from_numpy(source.data).bfloat16().view(torch.uint16).numpy()
        return interpreter.TensorHandle(bits, bf16)

    monkeypatch.setattr(builder, "create_dot", multiply)
    monkeypatch.setattr(builder, "create_fp_trunc", round_to_nearest)


def check(
    inputs: Inputs, cu_seqlens: list[int] | None = None, chunks_per_segment: int | None = None
) -> None:
    arguments = inputs.arguments()
    bounds = None if cu_seqlens is None else torch.tensor(cu_seqlens, device=DEVICE)
    options = {"cu_seqlens": bounds, "output_final_state": True}
    found = kernel.gdn_forward(**arguments, **options, chunks_per_segment=chunks_per_segment)
    wide = {
        name: x.double() if x is not None and x.is_floating_point() else x
        for name, x in arguments.items()
    }
    expected = reference.gdn_forward(**wide, **options)
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert other is not None
        assert one.shape == other.shape
        error = (one.double() - other).norm() / other.norm()
        assert error < TOLERANCE[inputs.dtype], f"relative error {error:.1e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_lengths(tokens: int, dtype: torch.dtype) -> None:
    check(Inputs(tokens, dtype))


@pytest.mark.parametrize("half_life", [1.0, 2000.0])
@pytest.mark.parametrize("num_states", [0, 2])
def test_segments(num_states: int, half_life: float) -> None:
    """Both ways through the second pass: segments' maps linked, and forgotten before they end."""
    check(Inputs(330, batch=2, half_life=half_life, num_states=num_states), chunks_per_segment=1)
    check(Inputs(330, batch=2, half_life=half_life, num_states=num_states), chunks_per_segment=2)


def test_segments_in_half_precision() -> None:
    check(Inputs(330, torch.bfloat16, half_life=2000.0, num_states=1), chunks_per_segment=2)


@pytest.mark.parametrize("chunks_per_segment", [1, None])
def test_packed_sequences(chunks_per_segment: int | None) -> None:
    bounds = [0, 65, 65, 66, 200]
    check(Inputs(200, num_states=4), bounds, chunks_per_segment)


@pytest.mark.parametrize("dim", [16, 32, 128, 256])
def test_head_dims(dim: int) -> None:
    check(Inputs(130, dim=dim, q_index=(1,), kv_index=(0,)), chunks_per_segment=1)


def test_strides() -> None:
    check(Inputs(70, torch.bfloat16, batch=2, strided=True))


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter compiles nothing")
def test_one_compilation_serves_every_head_map() -> None:
    def run(heads: int, batch: int) -> None:
        index = tuple(range(heads))
        inputs = Inputs(
            2048, torch.bfloat16, batch, num_heads=32, q_index=index, kv_index=(1,) * heads
        )
        kernel.gdn_forward(**inputs.arguments())

    run(32, 16)
    stages = (transform_kernels.transform, kernels.summarize, kernels.link, kernels.attend)
    compiled = num_compilations(*stages)
    for heads, batch in ((1, 1), (2, 3), (15, 1), (16, 2), (32, 1)):
        run(heads, batch)
    assert num_compilations(*stages) == compiled


def test_wrong_inputs_are_refused() -> None:
    arguments = Inputs(4, dim=16).arguments()
    for name, change, message in (
        ("q_BTHD", lambda x: x[..., :12], "head_dim 12"),
        ("q_BTHD", lambda x: x[0], "4 dimensions"),
        ("q_BTHD", lambda x: x.tolist(), "q must be a tensor; got list"),
        ("q_BTHD", lambda x: x.half(), "bf16 or fp32"),
        ("k_BTGD", lambda x: x[:, :3], "do not fit"),
        ("v_BTGD", lambda x: x[0], "do not fit"),
        ("v_BTGD", lambda x: x.transpose(2, 3).contiguous().transpose(2, 3), "last stride"),
        ("a_BTH", lambda x: x[..., :3], "a, b must be"),
        ("a_BTH", lambda x: x.long(), "must be bf16, fp16 or fp32"),
        ("A_log_H", lambda x: x.double(), "must be bf16, fp16 or fp32"),
        ("dt_bias_H", lambda _: None, "dt_bias must be a tensor; got NoneType"),
        ("q_index_n", lambda x: x.long(), "int32"),
        ("kv_index_n", lambda x: x[:2], "equally long"),
        ("b_BTH", lambda x: x.requires_grad_(), "no backward"),
    ):
        with pytest.raises(ValueError, match=message):
            kernel.gdn_forward(**{**arguments, name: change(arguments[name].clone())})
    for name, value, message in (
        ("initial_state", torch.zeros(1, 2, 16, 16), "initial_state must be fp32"),
        ("initial_state", 0.0, "initial_state must be a tensor; got float"),
        ("cu_seqlens", torch.tensor([0, 3]), "cu_seqlens must ascend from 0 to T=4"),
        ("cu_seqlens", torch.tensor([0.0, 4.0]), "a vector of int32 or int64"),
        ("cu_seqlens", torch.tensor([[0, 4]]), "a vector of int32 or int64"),
        ("cu_seqlens", [0, 4], "cu_seqlens must be a tensor; got list"),
        ("chunks_per_segment", 0, "chunks_per_segment is 0; allowed: None, or 1 to 1024"),
        ("chunks_per_segment", 1025, "chunks_per_segment is 1025"),
        ("chunks_per_segment", 1.0, "chunks_per_segment is 1.0"),
        ("backward_parts", 0, "backward_parts is 0; allowed: whole numbers from 1 on"),
        ("backward_parts", 1.5, "backward_parts is 1.5"),
    ):
        for trains in (False, True):
            leaf = arguments["v_BTGD"].clone().requires_grad_(trains)
            with pytest.raises(ValueError, match=message):
                gated_delta_net(**{**arguments, "v_BTGD": leaf, name: value})


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU would have to be waited for")
def test_the_interpreter_refuses_heads_that_are_not_there_and_bf16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = Inputs(4, dim=16).arguments()
    for name, heads in (("q_index_n", [3, 4, 2]), ("kv_index_n", [0, -1, 1])):
        index = torch.tensor(heads, dtype=torch.int32)
        with pytest.raises(ValueError, match=rf"{name[:-2]} names heads \[{heads[1]}\]"):
            kernel.gdn_forward(**{**arguments, name: index})
    monkeypatch.undo()
    with pytest.raises(ValueError, match="products of bf16 wrongly: use fp32"):
        kernel.gdn_forward(**Inputs(4, torch.bfloat16, dim=16).arguments())


def test_bounds_made_in_inference_mode_serve_a_forward_and_backward_pass() -> None:
    arguments = Inputs(5, dim=16).arguments()
    arguments["v_BTGD"].requires_grad_()
    with torch.inference_mode():
        bounds = torch.tensor([0, 2, 5], device=DEVICE)
    found = gated_delta_net(**arguments, cu_seqlens=bounds)[0]
    expected = gated_delta_net(**arguments, cu_seqlens=torch.tensor([0, 2, 5], device=DEVICE))[0]
    assert torch.equal(found, expected)
    (gradient,) = torch.autograd.grad(found.sum(), arguments["v_BTGD"])
    assert gradient.isfinite().all()


def test_nothing_to_do() -> None:
    o, state = kernel.gdn_forward(**Inputs(5, q_index=(), kv_index=()).arguments())
    assert (o.shape, state) == ((1, 5, 0, 64), None)
    arguments = Inputs(0, num_states=1).arguments()
    o, state = kernel.gdn_forward(**arguments, output_final_state=True)
    assert o.shape == (1, 0, 3, 64)
    torch.testing.assert_close(state, arguments["initial_state"])


def test_a_token_without_gates_leaves_the_state_alone() -> None:
    arguments = Inputs(3, dim=16, num_states=1).arguments()
    for name in ("a_BTH", "b_BTH"):
        arguments[name].fill_(float("-inf"))
    state = kernel.gdn_forward(**arguments, output_final_state=True)[1]
    torch.testing.assert_close(state, arguments["initial_state"])
