"""Learning rates and batch sizes of distillation compared on one head map: held-out KL and retrieval at each reading.

    archsearch score search_spaces/smollm2_135m_gpu.yaml --run-dir RUN
    python -m archsearch.lab.student_rates RUN --share 0.125 --batches 4096 16384 --rates 1e-4 3e-4 1e-3 --figures FILE

Every student starts from the supernet's weights and trains at a constant rate, with a short fork whose rate falls at each
reading, on the run's own training text. Students that train all weights keep the teacher's hidden states, the others its
expected rows; both give the exact KL. On a GPU steps are replayed from a CUDA graph.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..models.cut import cut
from ..rundir import RunDir
from ..trainconfig import DistillConfig
from ..training.loop import NonFiniteLoss
from ..training.readings import distill_with_readings
from ..training.teacher_logits import TeacherLogits
from .entry import add_run, run_script, script_parser
from .full_branch import Bench, distil_config, print_table


def cases(
    config: DistillConfig, batches: Sequence[int], rates: Sequence[float], trained: Sequence[str]
) -> dict[str, DistillConfig]:
    """The combinations by name. Raises ValidationError on what section distill does not allow."""
    found = {}
    for batch_tokens, rate, trainable in product(batches, rates, trained):
        fields = {
            "batch_tokens": batch_tokens,
            "learning_rate": rate,
            "trainable": trainable,
            "teacher_logits": "mean_row" if trainable == "attention" else "hidden",
            "replay": True,
        }
        options = DistillConfig.model_validate(config.model_dump() | fields)
        found[f"{trainable}, {batch_tokens:,} tokens a step, rate {rate:g}"] = options
    return found


def run_case(
    bench: Bench, case: str, config: DistillConfig, readings: Sequence[int], logits: TeacherLogits
) -> None:
    """Trains and measures one student; one that diverges is said and left."""
    student = cut(bench.teacher, bench.supernet, bench.head_map, copy=True)
    sequences = max(1, config.batch_tokens // bench.text_NT.shape[1])
    started, asked = time.monotonic(), iter(readings)

    def measure(model: HydraHeadForCausalLM, _: int) -> dict[str, float]:
        return bench.measure(case, f"{next(asked):,} tokens", model)

    try:
        distill_with_readings(
            student,
            bench.teacher,
            partial(bench.batches, sequences),
            readings=readings,
            measure=measure,
            config=distil_config(config),
            logits=logits,
        )
    except NonFiniteLoss as error:
        bench.book.add(f"{case}: diverged", 1.0, "students", None, text=str(error))
        print(f"{case}: {error}", flush=True)
    seconds = time.monotonic() - started
    done = {stage: values["kl"] for name, stage, values in bench.rows if name == case}
    said = ", ".join(f"{kl:.4f} after {stage}" for stage, kl in done.items())
    print(f"{case}: KL {said}; {seconds:.1f} s", flush=True)


def kept_logits(
    bench: Bench, configs: dict[str, DistillConfig]
) -> Iterator[tuple[str, DistillConfig, TeacherLogits]]:
    """Each case with what is kept of the teacher: the same for neighbours that see the same batches."""
    kept: tuple[tuple[str, int], TeacherLogits] | None = None
    for case, config in configs.items():
        sees = (config.teacher_logits, config.batch_tokens)
        if kept is None or kept[0] != sees:
            kept = None
            kept = (sees, TeacherLogits(bench.teacher, distil_config(config)))
        yield case, config, kept[1]


def main() -> None:
    """Command line entry."""
    parser = script_parser(__doc__)
    add_run(parser)
    parser.add_argument("--method", default="causal", help="a seed method")
    parser.add_argument("--share", type=float, default=0.125, help="of full-attention heads")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[4096, 16_384], help="tokens of a batch"
    )
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3], help="learning rates"
    )
    parser.add_argument(
        "--trained",
        nargs="+",
        default=["attention"],
        choices=["attention", "all"],
        help="which weights",
    )
    parser.add_argument(
        "--readings",
        type=int,
        nargs="+",
        default=[500_000, 2_000_000],
        help="tokens at which students are measured",
    )
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[1024, 4096], help="lengths of retrieval prompts"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no case after that")
    args = parser.parse_args()
    started = time.monotonic()
    bench = Bench.open(RunDir(args.run), args.method, args.share, args.contexts)
    bench.compared_to = None
    found = cases(bench.config.distill, args.batches, args.rates, args.trained)
    found = dict(
        sorted(
            found.items(),
            key=lambda item: (item[1].batch_tokens, item[1].teacher_logits),
            reverse=True,
        )
    )
    for case, config, logits in kept_logits(bench, found):
        if time.monotonic() - started > args.seconds:
            print(f"{case}: no time left", flush=True)
            continue
        run_case(bench, case, config, args.readings, logits)
        # After each case: a run that is cut off keeps what it has.
        bench.book.write(args.figures)
    if bench.rows:
        print_table(bench)


if __name__ == "__main__":
    run_script(main)
