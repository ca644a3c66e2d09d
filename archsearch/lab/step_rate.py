"""Speed of training: tokens a second and share of the matmul peak, seconds a candidate, and hours of a search.

    python -m archsearch.lab.step_rate search_spaces/qwen3_1.7b.yaml --set teacher.source=package:archsearch/assets/qwen3_1.7b
        --set teacher.random_weights=true --figures runs/lab/step_rate.json

An alignment step and a distillation step, by who computes the heads, by what is kept of the teacher, replayed from a CUDA
graph, with layers computed twice, and with fp32 weights under autocast instead of bf16 ones on fp32 masters. Batches are the config's, of random
tokens; those of a kept teacher have been seen before. The student keeps two random heads of each layer. A candidate is
cut, distilled at the measured rate, and measured on text and prompts as the config has them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..attention.dispatch import set_backend
from ..configfile import load_config
from ..models.teacher import load_teacher
from ..plan import matmul_rate
from ..training.align import AlignmentLoss
from ..training.distill import distill
from ..training.loop import Plan, TrainingState, train
from ..training.replay import Replay
from ..training.student import trainable_parameters
from ..training.teacher_logits import TeacherLogits
from .candidate_prices import price, time_candidate
from .entry import add_config, run_script, script_parser
from .kernel_timing import median_ms
from .records import LabBook
from .step_bench import WARMUP_STEPS, Bench, Clock, Timing, attempt, peak_bytes, reset_peak
from .step_flops import alignment_flops, distillation_flops

SETUPS = {
    "triton": {"gdn": "triton", "full": "auto", "prologue": "triton", "fusion": "triton"},
    "torch": {"gdn": "torch", "full": "sdpa", "prologue": "torch", "fusion": "torch"},
    "fla": {"gdn": "fla", "full": "sdpa", "prologue": "torch", "fusion": "torch"},
}
"""These kernels, and what there was before them: SDPA's own choice of kernels and torch ops, with the delta rule in plain
torch or by fla-core."""
MATMUL_SIZE = 8192
DISTILLATION = "distillation, "


class Case(NamedTuple):
    """A way to take a distillation step: fields of DistillConfig, and whether the weights that are trained are fp32."""

    fields: dict[str, Any]
    wide: bool = False


CASES = {
    "exact": Case({"teacher_logits": "exact"}),
    "hidden": Case({"teacher_logits": "hidden"}),
    "mean_row": Case({"teacher_logits": "mean_row", "trainable": "attention"}),
    "topk": Case({"teacher_logits": "topk"}),
    "mean_row, replayed": Case(
        {"teacher_logits": "mean_row", "trainable": "attention", "replay": True}
    ),
    "hidden, layers twice": Case({"teacher_logits": "hidden", "checkpointing": True}),
    "hidden, fp32 weights": Case({"teacher_logits": "hidden"}, wide=True),
    "hidden, all weights": Case({"teacher_logits": "hidden", "trainable": "all"}),
    "hidden, packed": Case({"teacher_logits": "hidden", "packed": True}),
}


def time_alignment(bench: Bench, *, replayed: bool) -> Timing:
    """Steps of alignment, on a GPU replayed from a CUDA graph where asked."""
    teacher, config = bench.teacher, bench.config
    supernet = bench.supernet().requires_grad_(True)
    shape, tokens = teacher.shape, config.data.sequence_length
    variance_LH = torch.ones(shape.num_layers, shape.num_heads, device=teacher.device)
    groups = [list(twin.parameters()) for twin in supernet.twins]
    state = TrainingState(dict(supernet.named_parameters()), groups)
    replay = None
    if replayed and teacher.device.type == "cuda":
        replay = Replay(list(state.parameters.values()))
    batches = bench.batches(config.supernet.batch_tokens)
    clock = Clock(teacher.device)
    reset_peak(teacher.device)
    train(
        state,
        Plan(1 + WARMUP_STEPS + bench.steps, learning_rate=1e-6),
        AlignmentLoss(teacher, supernet, variance_LH, replay=replay),
        batches,
        progress=clock,
    )
    flops = alignment_flops(teacher, supernet, tokens)
    return Timing(clock, flops, next(batches(0)).numel(), peak_bytes(teacher.device))


def time_distillation(bench: Bench, case: Case) -> Timing:
    """Steps of distillation in one way."""
    teacher, tokens = bench.teacher, bench.config.data.sequence_length
    options = bench.config.distill.model_copy(update=case.fields)
    student = bench.student()
    if case.wide:
        for parameter in trainable_parameters(student, options.trainable).values():
            parameter.data = parameter.data.float()
    batches = bench.batches(options.batch_tokens)
    batch_tokens = next(batches(0)).numel()
    clock = Clock(teacher.device)
    reset_peak(teacher.device)
    distill(
        student,
        teacher,
        batches,
        tokens=(1 + WARMUP_STEPS + bench.steps) * batch_tokens,
        config=options,
        logits=TeacherLogits(teacher, options),
        progress=clock,
    )
    flops = distillation_flops(
        teacher, student, tokens, form=options.teacher_logits, trainable=options.trainable
    )
    return Timing(clock, flops, batch_tokens, peak_bytes(teacher.device))


def record_rate(bench: Bench, work: str, setup: str, timing: Timing) -> None:
    """Records tokens a second and the share of the peak."""
    facts = {
        "setup": setup,
        "backends": SETUPS[setup],
        "batch_tokens": timing.batch_tokens,
        "sequence_tokens": bench.config.data.sequence_length,
        "step_seconds": timing.clock.step_seconds,
        "first_step_seconds": timing.clock.first_seconds,
        "flops_a_token": timing.flops,
        "peak_flops": bench.peak_flops,
        "peak_bytes": timing.peak_bytes,
    }
    bench.add(f"{work}, {setup}", timing.rate, "tokens/s", **facts)
    share = timing.rate * timing.flops / bench.peak_flops
    bench.add(f"{work}, {setup}, share of the matmul peak", share, "", **facts)


def measure(bench: Bench, setup: str, cases: Sequence[str], most: float, *, first: bool) -> None:
    """All figures of one set of backends; candidates are priced by the first one."""
    for operator, backend in SETUPS[setup].items():
        set_backend(operator, backend, f"--setups {setup}")

    def record(name: str, timed: Callable[[], Timing]) -> None:
        timing = timed()
        if first:
            bench.rates[name.removeprefix(DISTILLATION)] = timing.rate
        record_rate(bench, name, setup, timing)

    works: dict[str, Callable[[], Timing]] = {
        "alignment": partial(time_alignment, bench, replayed=False)
    }
    if first:
        works["alignment, replayed"] = partial(time_alignment, bench, replayed=True)
    for case in cases:
        works[DISTILLATION + case] = partial(time_distillation, bench, CASES[case])
    for name, timed in works.items():
        attempt(bench, f"{name}, {setup}", most, partial(record, name, timed))
    if first:
        attempt(bench, f"candidate, {setup}", most, lambda: price(bench, time_candidate(bench)))


def matmul_peak(device: torch.device) -> float:
    """FLOP/s of a large product on the device, bf16 on a GPU."""
    if device.type == "cpu":
        return matmul_rate(device)
    a, b = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE, device=device, dtype=torch.bfloat16)
    return 2 * MATMUL_SIZE**3 / median_ms(lambda: a @ b) * 1e3


def main() -> None:
    """Command line entry."""
    parser = script_parser(__doc__)
    add_config(parser)
    parser.add_argument(
        "--setups", nargs="+", choices=SETUPS, help="backends, the first for all cases"
    )
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=list(CASES), help="ways to distil"
    )
    parser.add_argument("--steps", type=int, default=10, help="that are timed")
    parser.add_argument(
        "--seconds", type=float, default=540.0, help="most in all, loading included"
    )
    parser.add_argument("--figure-seconds", type=float, default=120.0, help="most for one figure")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    config = load_config(args.config, args.overrides)
    teacher, book = load_teacher(config.teacher), LabBook(config.seed)
    peak_flops = matmul_peak(teacher.device)
    bench = Bench(config, teacher, book, peak_flops, args.steps, deadline, args.figures)
    bench.add("matmul peak", peak_flops / 1e12, "TFLOP/s")
    on_gpu = teacher.device.type == "cuda"
    setups = args.setups or (list(SETUPS) if on_gpu else ["torch"])
    for setup in setups:
        first = setup == setups[0]
        cases = args.cases if first else ["exact"]
        measure(bench, setup, cases, args.figure_seconds, first=first)


if __name__ == "__main__":
    run_script(main)
