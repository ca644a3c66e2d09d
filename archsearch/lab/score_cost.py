"""Seconds and memory of causal scores, side by side with brute force, and their agreement.

    python -m archsearch.lab.score_cost CONFIG [--set A.B=VALUE ...] --figures runs/lab/score_cost.json

Brute force is a whole forward a head and a pair, done well: as many heads in a batch as the device takes, later
attention frozen, logits at the answer positions alone. It is timed on a slice and scaled to all heads and pairs.
--check compares both in the teacher's dtype on short pairs instead of timing them.

Legend: K heads at once, T tokens, A answer tokens, C hidden size, X = H * D.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import RunConfig
from ..configfile import load_config
from ..data.niah import Probe
from ..data.tasks import make_probes
from ..headmap import Head
from ..models.teacher import Teacher, load_teacher
from ..scoring.inputs import GIB
from ..scoring.pairs import PairBatch
from ..scoring.receivers import receiver_effects
from ..scoring.senders import sender_effects
from .entry import add_config, run_script, script_parser
from .records import LabBook

DECAY = 0.9
REPEATS = 3


@dataclass
class Frozen:
    """What every o_proj read and gave on the clean prompt, and read on the corrupt one; [T, X], [T, C], [T, X]."""

    clean: list[Tensor]
    outputs: list[Tensor]
    corrupt: list[Tensor]
    m: Tensor
    """m of the clean and of the corrupt prompt, [2]."""


def record(teacher: Teacher, batch: PairBatch) -> Frozen:
    """Runs both prompts of a batch of one pair."""
    kept = Frozen([], [], [], torch.empty(2))

    def keep(_: Any, args: Any, output_2TC: Tensor) -> None:
        kept.clean.append(args[0][0])
        kept.corrupt.append(args[0][1])
        kept.outputs.append(output_2TC[0])

    layers = teacher.model.model.layers
    handles = [layer.self_attn.o_proj.register_forward_hook(keep) for layer in layers]
    hidden_2TC = teacher.model.model(input_ids=batch.ids_2PT, use_cache=False).last_hidden_state
    for handle in handles:
        handle.remove()
    kept.m = batch.readout(teacher.model, batch.at_answers(hidden_2TC).unsqueeze(1))[:, 0]
    return kept


def patched(teacher: Teacher, batch: PairBatch, kept: Frozen, heads: Sequence[Head]) -> Tensor:
    """m of one whole forward a head, [K], all in one batch; later attention blocks keep their clean outputs."""
    dim, handles = teacher.shape.head_dim, []
    order = sorted(range(len(heads)), key=lambda k: heads[k])
    ranked = [heads[k] for k in order]
    for index, layer in enumerate(teacher.model.model.layers):
        rows = [k for k, (place, _) in enumerate(ranked) if place == index]
        num_earlier = sum(place < index for place, _ in ranked)

        def patch(_: Any, args: Any, rows: list[int] = rows, index: int = index) -> Any:
            for k in rows:
                columns = slice(ranked[k][1] * dim, (ranked[k][1] + 1) * dim)
                args[0][k, :, columns] = kept.corrupt[index][:, columns]
            return args

        def freeze(
            _: Any, args: Any, output_KTC: Tensor, count: int = num_earlier, index: int = index
        ) -> None:
            output_KTC[:count] = kept.outputs[index]

        handles.append(layer.self_attn.o_proj.register_forward_pre_hook(patch))
        handles.append(layer.self_attn.o_proj.register_forward_hook(freeze))
    ids_KT = batch.ids_2PT[:1].expand(len(heads), -1)
    hidden_KTC = teacher.model.model(input_ids=ids_KT, use_cache=False).last_hidden_state
    for handle in handles:
        handle.remove()
    hidden_KAC = hidden_KTC[:, batch.columns_PA[0]]
    m_K = batch.readout(teacher.model, hidden_KAC.unsqueeze(1))[:, 0]
    return m_K[torch.tensor(order, device=m_K.device).argsort()]


def largest_batch(run: Callable[[int], object], most: int) -> int:
    """The largest power of two, or `most`, that fits the device's memory."""
    size = 1
    while size < most:
        try:
            run(min(most, 2 * size))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return size
        size = min(most, 2 * size)
    return size


def seconds(run: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median wall time of a call, the device's work included, after one call to warm up."""
    taken = []
    for number in range(repeats + 1):
        _wait()
        started = time.perf_counter()
        run()
        _wait()
        if number or not repeats:
            taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _peak() -> float:
    """Peak of device memory since its statistics were reset, in GiB, the model included; NaN without a GPU."""
    return torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else math.nan


def check(teacher: Teacher, probes: Sequence[Probe], book: LabBook, name: str) -> None:
    """Max abs difference of the shortcut from patched forwards, over all heads of some pairs."""
    found = receiver_effects(teacher, probes, decay=DECAY, min_gap=-math.inf).heads_PLH
    worst = 0.0
    for index, probe in enumerate(probes):
        batch = PairBatch.of([probe], DECAY, teacher.device)
        kept = record(teacher, batch)
        heads = teacher.shape.heads()
        m = torch.cat(
            [patched(teacher, batch, kept, heads[i : i + 9]) for i in range(0, len(heads), 9)]
        )
        expected = ((kept.m[0] - m) / (kept.m[0] - kept.m[1])).cpu().view_as(found[index])
        worst = max(worst, float((found[index] - expected).abs().amax()))
    text = (
        f"{name}: max abs difference of receiver scores from patched forwards, {len(probes)} pairs"
    )
    book.add(text, worst, "share of the gap", "at most 1e-4")
    print(f"{text}: {worst:.2e}")


def brute_seconds(teacher: Teacher, probe: Probe) -> tuple[float, int]:
    """Seconds a forward of brute force at its best batch, and that batch."""
    batch = PairBatch.of([probe], DECAY, teacher.device)
    kept = record(teacher, batch)
    heads = random.Random(0).sample(teacher.shape.heads(), teacher.shape.total_heads)
    most = largest_batch(lambda size: patched(teacher, batch, kept, heads[:size]), len(heads))
    sizes = sorted({most, max(1, most // 2), max(1, most // 8)})
    each = {
        size: seconds(lambda size=size: patched(teacher, batch, kept, heads[:size]), 1) / size  # type: ignore[misc]
        for size in sizes
    }
    best = min(each, key=lambda size: each[size])
    return each[best], best


def measure_receivers(
    teacher: Teacher, probes: Sequence[Probe], config: RunConfig, book: LabBook
) -> float:
    """Receiver scores beside brute force; returns the seconds of the former."""
    shape, name = teacher.shape, config.name
    memory = round(config.scoring.memory_gib * GIB)
    ours = seconds(
        lambda: receiver_effects(
            teacher, probes, decay=DECAY, min_gap=-math.inf, memory_bytes=memory
        )
    )
    peak = _peak()
    each, size = brute_seconds(teacher, probes[0])
    brute = each * shape.total_heads * len(probes) + 2 * each * len(probes)
    facts = {"pairs": len(probes), "tokens": len(probes[0].prompt), "heads": shape.total_heads}
    book.add(f"{name}: receiver scores", ours, "s", "brute force", **facts)
    book.add(f"{name}: brute force, scaled from a batch of {size}", brute, "s", None, **facts)
    book.add(f"{name}: brute force over receiver scores", brute / ours, "times", None, **facts)
    book.add(f"{name}: peak memory of receiver scores, model included", peak, "GiB", None, **facts)
    print(f"{name}: receivers {ours:.2f} s, brute force {brute:.1f} s, {brute / ours:.0f} times")
    return ours


def measure_senders(
    teacher: Teacher, probes: Sequence[Probe], config: RunConfig, book: LabBook, receivers_s: float
) -> None:
    """A round of sender scores of the share of heads that the config takes as receivers, and its peak memory."""
    shape, name, scoring = teacher.shape, config.name, config.scoring
    memory, rounds = round(scoring.memory_gib * GIB), scoring.sender_rounds
    chosen = frozenset(
        random.Random(1).sample(shape.heads(), round(scoring.receiver_share * shape.total_heads))
    )

    def senders(few: Sequence[Probe]) -> object:
        return sender_effects(
            teacher, few, chosen, decay=DECAY, min_gap=-math.inf, memory_bytes=memory
        )

    few = probes[: scoring.sender_pairs]
    senders(few[:1])  # to warm up
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    one, peak = seconds(lambda: senders(few), repeats=0), _peak()
    facts = {"pairs": len(few), "tokens": len(few[0].prompt), "heads": shape.total_heads}
    text = f"{name}: sender scores of {len(few)} pairs, {len(chosen)} receivers"
    both = receivers_s + rounds * one
    book.add(f"{text}, one round", one, "s", None, **facts)
    book.add(f"{name}: receivers, and {rounds} rounds of senders", both, "s", None, **facts)
    book.add(f"{name}: peak memory of sender scores, model included", peak, "GiB", None, **facts)
    print(f"{text}: {one:.1f} s a round; {peak:.1f} GiB at the peak")


def main() -> None:
    """Command line entry."""
    parser = script_parser(__doc__)
    add_config(parser)
    parser.add_argument("--pairs", type=int, default=40, help="of prompts")
    parser.add_argument(
        "--check", action="store_true", help="compares with patched forwards in place of timing"
    )
    args = parser.parse_args()
    config = load_config(args.config, args.overrides)
    teacher = load_teacher(config.teacher)
    context = config.scoring.contexts[0]
    probes = [
        probe
        for kind in ("single", "multikey")
        for probe in make_probes(
            teacher.tokenizer,
            kind,
            max(1, args.pairs // 2),
            context,
            keys=config.probes.multi_keys,
            digits=config.probes.digits,
            seed=config.seed,
        )
    ]
    book = LabBook(config.seed)
    with torch.inference_mode(), book.kept(args.figures):
        if args.check:
            check(teacher, probes, book, config.name)
        else:
            receivers_s = measure_receivers(teacher, probes, config, book)
            if config.scoring.sender_pairs:
                measure_senders(teacher, probes, config, book, receivers_s)


if __name__ == "__main__":
    run_script(main)
