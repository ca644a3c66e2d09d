"""Tokens a second and share of the matmul peak of an alignment step and a distillation step, by who computes the heads.

    python -m archsearch.lab.step_rate search_spaces/qwen3_1.7b.yaml --set teacher.source=package:archsearch/assets/qwen3_1.7b
        --set teacher.random_weights=true --figures runs/lab/step_rate.json

Batches are the config's, of random tokens. The student keeps two random heads of each layer; its attention is trained.
FLOPs are those of the products that a step needs, each once: what is computed again does not count.

Legend: T tokens of a sequence, D head_dim, V vocabulary, C hidden size.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from ..attention.dispatch import set_backend
from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..config import RunConfig
from ..configfile import load_config
from ..headmap import HeadMap
from ..models.cut import cut
from ..models.supernet import Supernet
from ..models.teacher import Teacher, load_teacher
from ..training.align import AlignmentLoss
from ..training.distill import distill
from ..training.loop import BatchSource, Plan, TrainingState, train
from .kernel_timing import FLOOR, limit, median_ms
from .records import LabBook

SETUPS = {
    "triton": {"gdn": "triton", "full": "auto", "prologue": "triton", "fusion": "triton"},
    "torch": {"gdn": "torch", "full": "sdpa", "prologue": "torch", "fusion": "torch"},
    "fla": {"gdn": "fla", "full": "sdpa", "prologue": "torch", "fusion": "torch"},
}
"""After these kernels, and before them: SDPA's own choice of kernels and torch ops, with the delta rule in plain torch or by
fla-core."""
WARMUP_STEPS, STEPS = 2, 5
FULL_HEADS_A_LAYER = 2
MATMUL_SIZE = 8192


class Clock:
    """A progress callback that takes the time of each step; the loop reads the loss, and so waits, before each call."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def __call__(self, done: int, total: int) -> None:
        self.moments.append(time.perf_counter())

    @property
    def first_seconds(self) -> float:
        """The first step, compilation included."""
        return self.moments[1] - self.moments[0]

    @property
    def step_seconds(self) -> float:
        """Median of the steps after the warm-up."""
        moments = self.moments[1 + WARMUP_STEPS :]
        return statistics.median(b - a for a, b in pairwise(moments))


def products(module: nn.Module) -> int:
    """Weights of its linear layers: two FLOPs each for a token."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


def core_flops(model: HydraHeadForCausalLM, tokens: int) -> tuple[float, float]:
    """FLOPs a token of all heads' operators over a context of T tokens, forward and backward.

    FA: 2 T D a head and token, backward 2.5 times that. GDN: the figures of D 128, growing with its square.
    """
    dim, layers = model.config.head_dim, model.config.head_map
    letters = "".join("".join(row) for row in layers)
    full, linear = letters.count("F"), letters.count("G")
    scale = (dim / 128) ** 2
    forward = full * 2 * tokens * dim + linear * FLOOR["forward"][0] * scale
    return forward, full * 5 * tokens * dim + linear * FLOOR["backward"][0] * scale


def alignment_flops(teacher: Teacher, supernet: Supernet, tokens: int) -> float:
    """FLOPs a token: the teacher's layers forward, the twins forward and backward, without gradients of their inputs."""
    shape = teacher.shape
    heads, dim = shape.num_layers * shape.num_heads, shape.head_dim
    twins = products(supernet)
    scale = (dim / 128) ** 2
    cores = heads * scale * (FLOOR["forward"][0] + FLOOR["backward"][0])
    # The error as o_proj sees it: one product with a matrix a head, and its gradient.
    errors = heads * 4 * dim * dim
    layers = 2 * products(teacher.model.model.layers) + core_flops(teacher.model, tokens)[0]
    return layers + 4 * twins + cores + errors


def distillation_flops(teacher: Teacher, student: HydraHeadForCausalLM, tokens: int) -> float:
    """FLOPs a token: both forward, the student backward, with gradients of the weights of its attention alone."""
    attention = sum(products(layer.self_attn) for layer in student.model.layers)
    inside, head = products(student.model.layers), products(student.lm_head)
    forward, backward = core_flops(student, tokens)
    theirs = (
        2 * (products(teacher.model.model.layers) + head) + core_flops(teacher.model, tokens)[0]
    )
    return theirs + 4 * (inside + head) + 2 * attention + forward + backward


def random_batches(rows: int, tokens: int, vocabulary: int) -> BatchSource:
    """Batches [rows, tokens] of random ids, the same at every call."""

    def batches(step: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(step)
        while True:
            yield torch.randint(vocabulary, (rows, tokens), generator=generator)

    return batches


def time_alignment(teacher: Teacher, config: RunConfig, steps: int) -> tuple[Clock, float]:
    """Steps of alignment; their times, and FLOPs a token."""
    supernet = Supernet.migrated(teacher, config.supernet.gdn).requires_grad_(True)
    shape = teacher.shape
    variance_LH = torch.ones(shape.num_layers, shape.num_heads, device=teacher.device)
    groups = [list(twin.parameters()) for twin in supernet.twins]
    state = TrainingState(dict(supernet.named_parameters()), groups)
    clock, tokens = Clock(), config.data.sequence_length
    train(
        state,
        Plan(steps, learning_rate=1e-6),
        AlignmentLoss(teacher, supernet, variance_LH),
        _batches(teacher, config.supernet.batch_tokens, tokens),
        progress=clock,
    )
    return clock, alignment_flops(teacher, supernet, tokens)


def time_distillation(teacher: Teacher, config: RunConfig, steps: int) -> tuple[Clock, float]:
    """Steps of distillation; their times, and FLOPs a token."""
    supernet = Supernet.migrated(teacher, config.supernet.gdn)
    rng, shape = random.Random(0), teacher.shape
    kept = [
        (layer, head)
        for layer in range(shape.num_layers)
        for head in rng.sample(range(shape.num_heads), FULL_HEADS_A_LAYER)
    ]
    student = cut(teacher, supernet, HeadMap.from_full_heads(shape, kept), copy=True)
    del supernet
    clock, tokens = Clock(), config.data.sequence_length
    batches = _batches(teacher, config.distill.batch_tokens, tokens)
    total = steps * next(batches(0)).numel()
    distill(student, teacher, batches, tokens=total, config=config.distill, progress=clock)
    return clock, distillation_flops(teacher, student, tokens)


def _batches(teacher: Teacher, batch_tokens: int, tokens: int) -> BatchSource:
    return random_batches(max(1, batch_tokens // tokens), tokens, teacher.model.config.vocab_size)


WORK: dict[str, Callable[[Teacher, RunConfig, int], tuple[Clock, float]]] = {
    "alignment": time_alignment,
    "distillation": time_distillation,
}


def measure(
    teacher: Teacher, config: RunConfig, work: str, setup: str, peak_flops: float, book: LabBook
) -> None:
    """Records tokens a second and the share of the peak of one kind of step with one set of backends."""
    for operator, backend in SETUPS[setup].items():
        set_backend(operator, backend, f"--setups {setup}")
    clock, flops = WORK[work](teacher, config, 1 + WARMUP_STEPS + STEPS)
    section = config.supernet if work == "alignment" else config.distill
    tokens = config.data.sequence_length
    batch = max(1, section.batch_tokens // tokens) * tokens
    rate = batch / clock.step_seconds
    facts = {
        "setup": setup,
        "backends": SETUPS[setup],
        "batch_tokens": batch,
        "sequence_tokens": tokens,
        "step_seconds": clock.step_seconds,
        "first_step_seconds": clock.first_seconds,
        "flops_a_token": flops,
        "peak_flops": peak_flops,
    }
    book.add(f"{config.name}: {work}, {setup}", rate, "tokens/s", None, **facts)
    share = rate * flops / peak_flops
    book.add(f"{config.name}: {work}, {setup}, share of the matmul peak", share, "", None, **facts)
    print(
        f"{work}, {setup}: {rate:,.0f} tokens/s, MFU {share:.1%}, step {clock.step_seconds:.3f} s, "
        f"first {clock.first_seconds:.1f} s",
        flush=True,
    )


def matmul_peak(device: torch.device) -> float:
    """FLOP/s of a large bf16 product on the device."""
    a, b = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE, device=device, dtype=torch.bfloat16)
    return 2 * MATMUL_SIZE**3 / median_ms(lambda: a @ b) * 1e3


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--setups", nargs="+", choices=SETUPS, default=list(SETUPS))
    parser.add_argument("--work", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--seconds", type=float, default=150.0, help="most for one figure")
    parser.add_argument("--figures", type=Path, required=True)
    args = parser.parse_args()
    config = load_config(args.config, args.overrides)
    teacher, book = load_teacher(config.teacher), LabBook(config.seed)
    peak_flops = matmul_peak(teacher.device)
    book.add(f"bf16 product of {MATMUL_SIZE} cubed", peak_flops / 1e12, "TFLOP/s")
    for setup in args.setups:
        for work in args.work:
            try:
                with limit(args.seconds):
                    measure(teacher, config, work, setup, peak_flops, book)
            except Exception as error:  # the other figures are worth having
                print(f"{work}, {setup}: {type(error).__name__}: {error}", flush=True)
                why = {"setup": setup, "text": f"{type(error).__name__}: {error}"[:400]}
                book.add(f"{config.name}: {work}, {setup}: none", 0.0, "", None, **why)
            torch.cuda.empty_cache()
            book.write(args.figures)


if __name__ == "__main__":
    main()
