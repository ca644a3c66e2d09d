"""Figures of the gated delta rule alone: errors against fp64, times against fla-core, distance from the floor, stages.

Shapes: B batch, T tokens; 14 of 16 query heads over 8 KV heads, D 128.
"""

from __future__ import annotations

from typing import Any

import torch

from archsearch_kernels.gdn import reference

from .kernel_book import Figures
from .kernel_graphs import add_times
from .kernel_rivals import HALF_LIVES, RIVALS, SHAPES, Case, draw_core, forget_tuning
from .kernel_timing import (
    floor_ms,
    relative_errors,
    run_with_gradients,
    stages_ms,
    widened,
)

BOUNDS = {torch.bfloat16: 1e-2, torch.float32: 1e-3}
SUMS_OVER_TOKENS = ("A_log_H", "dt_bias_H", "A_log_n", "dt_bias_n")
"""One number a head, in which tokens' gradients of either sign cancel, but not the rounding of bf16: twice the bound."""
CHECKED = (2, 500)
"""B and T of the inputs that fp64 computes too."""
HEADS = 14
GOALS = {("forward", 1): 2.7, ("forward", 8): 2.5, ("backward", 1): 3.0, ("backward", 8): 2.0}
"""How many times faster than fla-core, by pass and B."""


class Inaccurate(Exception):
    """Errors above their bounds: no time is worth reporting."""


def core_errors(dtype: torch.dtype, half_life: float) -> dict[str, float]:
    """Relative errors of outputs, last states and every gradient against the token-by-token reference in fp64."""
    from archsearch_kernels.gdn.operator import gated_delta_net

    arguments = draw_core(*CHECKED, half_life, HEADS, dtype=dtype)

    def outputs(function: Any, inputs: dict[str, Any]) -> Any:
        state: list[Any] = []

        def call(**given: Any) -> Any:
            out, last = function(**given, output_final_state=True)
            state.append(last)
            return out

        found = run_with_gradients(call, inputs)
        return found | {"last_state": state[0].detach()}

    return relative_errors(
        outputs(gated_delta_net, arguments), outputs(reference.gdn_forward, widened(arguments))
    )


def too_large(errors: dict[str, float], bound: float) -> dict[str, float]:
    """Those of the errors that are above the bound."""
    return {
        name: error
        for name, error in errors.items()
        if error > (2 * bound if name in SUMS_OVER_TOKENS else bound)
    }


def check_core(figures: Figures) -> None:
    """Records the errors. Raises Inaccurate where one is too large."""
    wrong: dict[str, float] = {}
    for kind, half_life in HALF_LIVES.items():
        for dtype, bound in BOUNDS.items():
            errors = core_errors(dtype, half_life)
            name = str(dtype).removeprefix("torch.")
            facts = {"dtype": name, "half_life_tokens": half_life, "errors": errors}
            batch, tokens = CHECKED
            figures.add(
                "GDN: largest relative error of outputs, states, gradients",
                max(errors.values()),
                "",
                "fp64, token by token",
                batch=batch,
                tokens=tokens,
                **facts,
            )
            wrong |= {f"{kind} {name} {key}": x for key, x in too_large(errors, bound).items()}
    if wrong:
        raise Inaccurate(f"GDN: {wrong}")


def time_core(figures: Figures) -> None:
    """Our times of both passes, at both shapes and half-lives, with their floors and stages."""
    for batch, tokens in SHAPES:
        for half_life in HALF_LIVES.values():
            case = RIVALS["ours"](draw_core(batch, tokens, half_life, HEADS))
            facts = {"batch": batch, "tokens": tokens, "heads": HEADS}
            for direction, make in case.passes().items():
                add_times(
                    figures,
                    f"GDN {direction}, ours",
                    make,
                    floor_ms(batch * tokens * HEADS, direction),
                    **facts,
                    half_life_tokens=half_life,
                    stages_ms=stages_ms(make()),
                )


def time_fla(figures: Figures) -> None:
    """fla-core's times, tuned anew at each shape, and how many times faster ours are; decay makes no difference to it."""
    for batch, tokens in SHAPES:
        arguments = draw_core(batch, tokens, HALF_LIVES["short"], HEADS)
        case = RIVALS["fla"](arguments)
        forget_tuning()
        case.both()
        difference = _difference(case, RIVALS["ours"](arguments))
        for direction, make in case.passes().items():
            add_times(
                figures,
                f"GDN {direction}, fla-core",
                make,
                batch=batch,
                tokens=tokens,
                heads=HEADS,
                relative_difference_of_outputs=difference,
                stages_ms=stages_ms(make()),
            )
            figures.ratio(
                f"GDN {direction}, fla-core",
                f"GDN {direction}, ours",
                batch,
                tokens,
                f"at least {GOALS[direction, batch]} times",
            )
        figures.write()


def _difference(one: Case, other: Case) -> float:
    with torch.no_grad():
        return relative_errors({"out": one.forward()}, {"out": other.forward()})["out"]
