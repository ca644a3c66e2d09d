"""The accuracy battery of the gated delta rule's kernels: outputs, last states and every gradient against fp64.

Cases are a cover of the settings below by pairs, and by triples of those that decide the arithmetic. On a GPU all of them run,
by as many processes as one likes: python -m pytest tests/kernels/test_gdn_battery.py -n 14. In Triton's interpreter a cover
of small settings runs. Inputs, fixtures and the way to run are test_gdn_kernel.py's. The reference computes on the kernel's own
inputs in fp64, which has no TF32: token by token, but long sequences by chunks, which must equal it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations, product
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from archsearch.attention.delta_rule import gated_delta_chunked
from archsearch_kernels.gdn import reference
from tests.kernels.test_gdn_kernel import (  # noqa: F401 - a fixture of every test
    DEVICE,
    Inputs,
    true_bf16,
)

gradients = pytest.importorskip("archsearch_kernels.gdn.gradients")
kernel = pytest.importorskip("archsearch_kernels.gdn.kernel")
operator = pytest.importorskip("archsearch_kernels.gdn.operator")

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CHUNK = 64
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-3}
SUMS_OVER_TOKENS = ("d_A_log_H", "d_dt_bias_H")
"""One number a head, in which tokens' gradients of either sign cancel, but not the rounding of each: twice the error."""
FEWEST_NUMBERS = 12 if DEVICE == "cuda" else 4
"""Numbers in the gradient of A_log or dt_bias, over heads and draws. A single one may by chance be next to zero, a sum of large terms
that cancel, and no rounding of those terms is small beside it."""
MOST_STEPS = 129
"""Tokens up to which the reference goes token by token; autograd keeps a few states for each."""

Settings = dict[str, tuple[Any, ...]]
Names = tuple[str, ...]
Goal = frozenset[tuple[str, Any]]
Results = dict[str, Tensor]

SETTINGS: Settings = {
    "tokens": (1, 7, 63, 64, 65, 129, 1000, 4097),
    "heads": (1, 3, 14, 15),
    "readers": (1, 2, 3, 8),
    "dim": (64, 128, 256),
    "half_life": (0.3, 20.0, 65536.0),
    "rate": (-8.0, 0.0, 8.0),
    "dtype": (torch.bfloat16, torch.float32),
    "has_state": (True, False),
    "has_final_gradient": (True, False),
    "is_packed": (True, False),
    "is_cut": (True, False),
}
SMALL_SETTINGS: Settings = SETTINGS | {
    "tokens": (7, 65, 129),
    "heads": (1, 3),
    "readers": (1, 2),
    "dim": (16, 32),
}
TRIPLES = [("tokens", "dim", "dtype"), *combinations(("dim", "half_life", "rate", "dtype"), 3)]
"""Settings that decide the arithmetic, which are covered by threes."""


@dataclass(frozen=True)
class Case:
    """heads: those that run; readers: query heads of a KV head; half_life: in tokens; rate: log-odds of the writing rate."""

    tokens: int
    heads: int
    readers: int
    dim: int
    half_life: float
    rate: float
    dtype: torch.dtype
    has_state: bool = True
    has_final_gradient: bool = True
    is_packed: bool = False
    is_cut: bool = True

    def __str__(self) -> str:
        flags = [f.name for f in fields(self) if getattr(self, f.name) is True]
        name = f"T{self.tokens}-H{self.heads}-r{self.readers}-D{self.dim}-half{self.half_life}"
        return "-".join([name, f"b{self.rate}", str(self.dtype).removeprefix("torch."), *flags])

    @property
    def bounds(self) -> list[int] | None:
        """Of the packed sequences, one of which is empty; the longest one has most tokens, so that it can be cut."""
        if not self.is_packed:
            return None
        start, end = self.tokens // 8, self.tokens - self.tokens // 16
        return [0, start, start, end, self.tokens]

    @property
    def inputs(self) -> Inputs:
        """The heads that run are neither all of them nor, unless there is one, in order."""
        num_kv_heads = self.heads // self.readers + 2
        num_heads = num_kv_heads * self.readers
        chosen = Random(self.heads).sample(range(num_heads), self.heads)
        if chosen == sorted(chosen):
            chosen.reverse()
        bounds, batch = self.bounds, 2 if self.tokens < MOST_STEPS and not self.is_packed else 1
        num_sequences = len(bounds) - 1 if bounds else batch
        return Inputs(
            self.tokens,
            self.dtype,
            batch,
            self.dim,
            num_heads,
            num_kv_heads,
            tuple(chosen),
            tuple(head // self.readers for head in chosen),
            self.half_life,
            num_sequences if self.has_state else 0,
        )

    @property
    def chunks_per_segment(self) -> int:
        chunks = -(-self.tokens // CHUNK)
        return max(1, chunks // 4) if self.is_cut else chunks


def goals_of(row: dict[str, Any], groups: Iterable[Names]) -> Iterator[Goal]:
    """What a case covers. Settings beside the length only count where states go from chunk to chunk."""
    for names in groups:
        if row["tokens"] > CHUNK or "tokens" in names:
            yield frozenset((name, row[name]) for name in names)


def cover(settings: Settings, triples: Iterable[Names] = (), num_tries: int = 40) -> list[Case]:
    """Cases with all pairs, and the triples named: greedily, the best of some random rows that have the first goal left."""
    groups = [*triples, *combinations(settings, 2)]
    long = {"tokens": tuple(tokens for tokens in settings["tokens"] if tokens > CHUNK)}
    left: dict[Goal, None] = {}
    for names in groups:
        for values in product(*(settings[name] for name in names)):
            left[frozenset(zip(names, values, strict=True))] = None
    random, cases = Random(0), []
    while left:
        first = dict(next(iter(left)))
        rows = [
            {name: random.choice(values) for name, values in (settings | long).items()} | first
            for _ in range(num_tries)
        ]
        best = max(rows, key=lambda row: sum(goal in left for goal in goals_of(row, groups)))
        for goal in goals_of(best, groups):
            left.pop(goal, None)
        cases.append(Case(**best))
    return cases


CASES = cover(SETTINGS, TRIPLES) if DEVICE == "cuda" else cover(SMALL_SETTINGS)
THROUGH_EVERY_KERNEL = Case(1000, 3, 2, 128, 65536.0, 0.0, torch.bfloat16)
"""Cut into segments, with states and their gradients."""
WIDTHS = {
    "states": kernel.COLUMNS,
    "kept_states": kernel.WIDE_COLUMNS,
    "gradients": gradients.GRADIENT_COLUMNS,
}
gpu_only = pytest.mark.skipif(
    DEVICE == "cpu", reason="means nothing to the interpreter, or takes it too long"
)


def results_of(
    function: Callable[..., Any], arguments: dict[str, Any], case: Case, options: dict[str, Any]
) -> Results:
    """Outputs, last states and gradients [draws, ...] of each float argument, from random ones of outputs and states."""
    leaves = {
        name: x.detach().requires_grad_()
        for name, x in arguments.items()
        if x is not None and x.is_floating_point()
    }
    bounds = None if case.bounds is None else torch.tensor(case.bounds, device=DEVICE)
    o, state = function(
        **{**arguments, **leaves}, cu_seqlens=bounds, output_final_state=True, **options
    )
    generator = torch.Generator().manual_seed(1)
    draws = []
    for _ in range(max(1, FEWEST_NUMBERS // case.heads)):
        weights = [
            torch.randn(x.shape, generator=generator).bfloat16().to(x.device, x.dtype)
            for x in (o, state)
        ]
        used = slice(2 if case.has_final_gradient else 1)
        draws.append(
            torch.autograd.grad(
                (o, state)[used], list(leaves.values()), weights[used], retain_graph=True
            )
        )
    stacked = (torch.stack(each) for each in zip(*draws, strict=True))
    named = {f"d_{name}": d for name, d in zip(leaves, stacked, strict=True)}
    return {"o": o.detach(), "state": state.detach(), **named}


def in_chunks(*inputs: Any) -> tuple[Tensor, Tensor]:
    """gated_delta_reference by chunks in fp64, into which archsearch's form in torch is talked where it asks for fp32."""
    *tensors, scale, state = inputs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        return gated_delta_chunked(*tensors, scale=scale, initial_state=state)


def expected_of(arguments: dict[str, Any], case: Case, most_steps: int = MOST_STEPS) -> Results:
    """Of sequences with more than most_steps tokens by chunks."""
    wide = {
        name: x.double() if x is not None and x.is_floating_point() else x
        for name, x in arguments.items()
    }
    by_tokens = reference.gated_delta_reference

    def either(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return (in_chunks if q.shape[1] > most_steps else by_tokens)(q, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "gated_delta_reference", either)
        return results_of(reference.gdn_forward, wide, case, {})


def errors_between(found: Results, expected: Results) -> dict[str, float]:
    """Norms of differences over those of what is expected, unless that is zero."""
    errors = {}
    for name, other in expected.items():
        assert found[name].shape == other.shape
        difference = (found[name].double() - other).norm()
        errors[name] = float(difference / other.norm()) if other.any() else float(difference)
    return errors


def arguments_of(case: Case) -> dict[str, Any]:
    arguments = case.inputs.arguments()
    return arguments | {"b_BTH": arguments["b_BTH"] + case.rate}


def check(case: Case) -> None:
    arguments = arguments_of(case)
    parts = 2 if case.is_cut else 1
    cut = {"chunks_per_segment": case.chunks_per_segment, "backward_parts": parts}
    found = results_of(operator.gated_delta_net, arguments, case, cut)
    for name, x in found.items():
        of = arguments.get(name.removeprefix("d_"), arguments["q_BTHD"])
        assert x.dtype == (torch.float32 if name == "state" else of.dtype)
    errors = errors_between(found, expected_of(arguments, case))
    for name, error in errors.items():
        allowed = TOLERANCE[case.dtype] * (2 if name in SUMS_OVER_TOKENS else 1)
        assert error < allowed, f"{name}: relative errors {errors}"


@pytest.fixture(autouse=True)
def shared_device() -> Iterator[None]:
    """Processes that test side by side keep no more of the GPU's memory than they use."""
    yield
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("tokens", [64, 129])
@pytest.mark.parametrize("half_life", [0.3, 65536.0])
def test_reference_by_chunks_equals_the_one_by_tokens(half_life: float, tokens: int) -> None:
    case = Case(tokens, 2, 2, 16, half_life, 8.0, torch.float32, is_packed=tokens > CHUNK)
    arguments = arguments_of(case)
    errors = errors_between(expected_of(arguments, case, 1), expected_of(arguments, case))
    assert max(errors.values()) < 1e-10, errors


@pytest.mark.parametrize(("settings", "triples"), [(SETTINGS, TRIPLES), (SMALL_SETTINGS, ())])
def test_cases_cover_every_pair(settings: Settings, triples: Sequence[Names]) -> None:
    cases = cover(settings, triples)
    for names in (*combinations(settings, 2), *triples):
        counted = [case for case in cases if case.tokens > CHUNK or "tokens" in names]
        seen = {tuple(getattr(case, name) for name in names) for case in counted}
        assert seen == set(product(*(settings[name] for name in names)))
    for case in cases:
        index, num_heads = case.inputs.q_index, case.inputs.num_heads
        assert len(index) < num_heads
        assert len(index) == 1 or index != tuple(sorted(index))


@gpu_only
@pytest.mark.parametrize(("stages", "dim"), [(1, 64), (1, 128), (1, 256), (2, 128)])
def test_tiles_in_flight(stages: int, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of devices with less shared memory."""
    monkeypatch.setattr(kernel, "_most_stages", lambda device: stages)
    check(replace(THROUGH_EVERY_KERNEL, dim=dim))


@pytest.mark.parametrize("dim", SETTINGS["dim"] if DEVICE == "cuda" else [32])
@pytest.mark.parametrize("table", WIDTHS)
def test_widths(table: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the columns a program that one of the tables says."""
    columns = WIDTHS[table]
    monkeypatch.setitem(columns, dim, columns[dim] // 2)
    case = replace(THROUGH_EVERY_KERNEL, dim=dim)
    check(case if DEVICE == "cuda" else replace(case, tokens=65))


@gpu_only
@pytest.mark.parametrize("half_life", SETTINGS["half_life"])
def test_long_sequences_stay_finite(half_life: float) -> None:
    case = Case(262144, 3, 2, 128, half_life, 8.0, torch.bfloat16)
    found = results_of(operator.gated_delta_net, arguments_of(case), case, {})
    for name, x in found.items():
        assert x.isfinite().all(), name
