"""Every kernel of a mixed layer is compiled here, without a GPU, for the architectures that it should run on.

Operators run on CPU tensors with each launch replaced by Triton's compiler. Its arguments are what Triton would compile a
kernel for, so that a second head map must bring no new ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from archsearch_kernels import interpreter  # noqa: E402
from archsearch_kernels.gdn import kernel  # noqa: E402
from archsearch_kernels.mixed.bench import draw_layer, plan_of  # noqa: E402
from archsearch_kernels.mixed.operator import mixed_heads  # noqa: E402

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
"""Most shared memory of one program, by compute capability (CUDA C++ programming guide, table of technical specifications)."""
HEAD_MAPS = ((0, 5), (), (3,), tuple(range(1, 16)))

Variant = tuple[Any, ...]


def variant_of(function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Variant:
    """What Triton compiles the function for: types, constants, values that it reads 16 by 16, and options."""
    given = dict(zip((p.name for p in function.params), arguments, strict=False)) | options
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned = []
    for number, parameter in enumerate(function.params):
        value = given.pop(parameter.name, None)
        if parameter.is_constexpr or value is None:
            constants[parameter.name], types[parameter.name] = value, "constexpr"
        elif isinstance(value, torch.Tensor):
            types[parameter.name] = TYPES[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                aligned.append(number)
        else:
            types[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            free = parameter.do_not_specialize or isinstance(value, float)
            if not free and value == 1:
                constants[parameter.name], types[parameter.name] = 1, "constexpr"
            elif not free and value % 16 == 0:
                aligned.append(number)
    parts = (types.items(), constants.items(), aligned, given.items())
    return tuple(tuple(part) for part in parts)


def compiled(function: Any, variant: Variant, capability: int) -> Any:
    types, constants, aligned, options = variant
    attributes = {(number,): [["tt.divisibility", 16]] for number in aligned}
    source = ASTSource(function, dict(types), dict(constants), attributes)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=dict(options))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[Any, set[Variant]]:
    """The variants that were launched, by kernel; nothing runs."""
    seen: dict[Any, set[Variant]] = {}

    def launch(function: Any, grid: Any) -> Callable[..., None]:
        def note(*arguments: Any, **options: Any) -> None:
            seen.setdefault(function, set()).add(variant_of(function, arguments, options))

        return note

    monkeypatch.setattr(JITFunction, "__getitem__", launch)
    monkeypatch.setattr(interpreter, "DEVICES", ("cpu",))
    return seen


def run(full: tuple[int, ...]) -> None:
    arguments = draw_layer(1, 2048, plan_of(full, "cpu"), dim=128)
    leaves = [x for x in arguments.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    out = mixed_heads(**arguments, full_attention=lambda q, k, v: q + 0 * (k.sum() + v.sum()))
    torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_gpu_and_interpreter_a_call_says_what_is_needed() -> None:
    with pytest.raises(
        ValueError, match=r"^inputs are on cpu; allowed: a CUDA device, or the CPU "
    ):
        run(HEAD_MAPS[0])


def test_head_maps_share_their_compilations(launches: dict[Any, set[Variant]]) -> None:
    run(HEAD_MAPS[0])
    first = {function: set(variants) for function, variants in launches.items()}
    for full in HEAD_MAPS[1:]:
        run(full)
    assert {function.fn.__name__ for function in first} >= {"attend", "key_gradients", "fuse"}
    assert launches == first


@pytest.mark.parametrize(("capability", "stages"), [(90, 3), (80, 2), (89, 1), (120, 1)])
def test_kernels_compile(
    capability: int,
    stages: int,
    launches: dict[Any, set[Variant]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel, "_most_stages", lambda device: stages)
    run(HEAD_MAPS[0])
    for function, variants in launches.items():
        for variant in variants:
            built = compiled(function, variant, capability)
            assert built.metadata.shared <= SHARED_BYTES[capability], function.fn.__name__
