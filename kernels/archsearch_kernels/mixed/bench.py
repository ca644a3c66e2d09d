"""Inputs of a whole layer of mixed heads, and its times with and without its options: python -m archsearch_kernels.mixed.bench.

Shapes: B batch, T tokens, D head_dim; 16 query heads over 8 KV heads.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from archsearch_kernels.mixed.heads import MixedPlan, plan_mixed
from archsearch_kernels.timing import require_gpu

NUM_HEADS, NUM_KV_HEADS, DIM = 16, 8, 128
SHAPES = ((1, 32768), (8, 4096))
"""B and T."""
FULL = {"7:1": (3, 12), "3:1": (1, 6, 9, 14), "full": tuple(range(NUM_HEADS))}
"""Query heads of full attention; the others are Gated DeltaNet."""


def plan_of(full: tuple[int, ...], device: str = "cuda") -> MixedPlan:
    """The plan whose full-attention heads are these."""
    linear = [head for head in range(NUM_HEADS) if head not in full]
    return plan_mixed(full, linear, NUM_KV_HEADS, device)


def draw_layer(
    batch: int,
    tokens: int,
    plan: MixedPlan,
    *,
    half_life: float = 64.0,
    dim: int = DIM,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Arguments of mixed_heads, all of them, random; tensors that a model would train ask for gradients."""
    device, count = plan.device, len(plan.linear)
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=kind)

    places, wide = (batch, tokens), torch.float32
    rate = torch.full((count,), 0.6931 / half_life, device=device)
    leaves = {
        "q_BTHD": randn(*places, NUM_HEADS, dim),
        "k_BTGD": randn(*places, NUM_KV_HEADS, dim),
        "v_BTGD": randn(*places, NUM_KV_HEADS, dim),
        "a_BTn": randn(*places, count),
        "b_BTn": randn(*places, count),
        "A_log_n": torch.zeros(count, device=device),
        "dt_bias_n": rate.expm1().log(),
        "q_weight_D": 1 + 0.1 * randn(dim, kind=wide),
        "k_weight_D": 1 + 0.1 * randn(dim, kind=wide),
        "gamma_nD": 1 + 0.1 * randn(count, dim, kind=wide),
        "bias_nD": 0.1 * randn(count, dim, kind=wide),
        "gate_BTnD": randn(*places, count, dim),
    }
    for x in leaves.values():
        x.requires_grad_()
    powers = torch.arange(dim // 2, device=device) / (dim // 2)
    angles = torch.arange(tokens, device=device)[:, None] * 1e6**-powers
    angles = torch.cat((angles, angles), dim=-1)
    tables = {"cos_BTD": angles.cos().to(dtype), "sin_BTD": angles.sin().to(dtype)}
    return {**leaves, **tables, "plan": plan}


def gradients(
    forward: Callable[[], Tensor], arguments: dict[str, Any]
) -> tuple[Tensor | None, ...]:
    """Forward and backward pass: the gradient of every argument that asks for one, from that of its own output."""
    leaves = [x for x in arguments.values() if isinstance(x, Tensor) and x.requires_grad]
    out = forward()
    return torch.autograd.grad(out, leaves, out.detach(), allow_unused=True)


def main() -> None:
    """Prints milliseconds of forward and of forward with backward, q and k remade or kept, on one stream or two."""
    parser = argparse.ArgumentParser(description=(main.__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--ratio",
        action="append",
        choices=("7:1", "3:1"),
        help="of GDN heads to full-attention heads; may be given again; both by default",
    )
    options = parser.parse_args()
    require_gpu(parser)
    from triton.testing import do_bench

    from archsearch_kernels.mixed.operator import mixed_heads

    for name, (batch, tokens) in product(options.ratio or ("7:1", "3:1"), SHAPES):
        arguments = draw_layer(batch, tokens, plan_of(FULL[name]))
        for remake, streams in product((True, False), (1, 2)):
            side = torch.cuda.Stream() if streams == 2 else None
            forward = partial(mixed_heads, **arguments, remake=remake, side_stream=side)
            times = [
                do_bench(call, return_mode="median")
                for call in (forward, partial(gradients, forward, arguments))
            ]
            how = f"{'remade' if remake else 'kept'}, {streams} streams"
            print(f"{name} B{batch} T{tokens} {how}: {times[0]:.3f} and {times[1]:.3f} ms")


if __name__ == "__main__":
    main()
