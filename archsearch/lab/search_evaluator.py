"""What stands for the model in a search that needs none: a Gaussian process fitted to measured head maps (map_measures).

    OPENBLAS_NUM_THREADS=1 python -m archsearch.lab.search_evaluator TABLE.npz RUN --to archsearch/assets/smollm2_135m/head_maps.npz \
        --figures runs/lab/search_evaluator.json

RUN has the scores that the table's maps were drawn by. The file holds maps, figures, scores and hyperparameters, without pickle; the
process is fitted when it is read. It foretells log(figure + OFFSET) of every loss; agreement and matches share their loss's
hyperparameters. It is of another class than the search's own surrogate, which adds up damages.

Shapes: N maps, K figures.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import CostConfig
from ..errors import ConfigError
from ..headmap import HeadMap, ModelShape, Operator
from ..metrics import COSTS, is_loss
from ..rundir import RunDir, score_file
from ..search.records import TrialResult, TrialSpec
from ..search.seeds import ScoreTables, read_scores
from ..search.space import analytic_costs
from .entry import run_script, script_parser
from .map_list import head_map_of
from .map_process import Array, Descriptor, Hyperparameters, Process, predict_together
from .map_table import MapTable, digest_of
from .map_validation import (
    BEST,
    Agreement,
    Subject,
    cross_validate,
    extrapolate,
    learning_curve,
    leave_best_out,
)
from .records import LabBook

ASSET = Path(__file__).parents[1] / "assets" / "smollm2_135m" / "head_maps.npz"
OFFSET = 1e-3
"""Added to a loss, in nats, before its logarithm: the measured ones have errors of this order in bf16."""
HYPERPARAMETERS = "hyperparameters"
"""The fact that holds them, by loss."""
NEEDED_MAPS = 4_000


class SearchEvaluator:
    """The metrics of any head map of the measured model, by a process a loss. Called with a TrialSpec it is a worker."""

    def __init__(
        self,
        table: MapTable,
        scores: Mapping[str, ScoreTables],
        hyper: Mapping[str, Hyperparameters],
    ) -> None:
        self.table, self.scores = table, dict(scores)
        self.shape = ModelShape(**table.facts["model"])
        self.cost = CostConfig.model_validate(table.facts["cost"])
        self.kinds: list[str] = list(table.facts["prompts"]["kinds"])
        self.descriptor = Descriptor(self.shape, scores)
        maps = self.descriptor.describe(table.full_NLH)
        self._processes = {}
        for loss, names in figures_by_loss(table.columns).items():
            figure_NK = np.stack([figure_of(table, name) for name in names], axis=1)
            process = Process(self.descriptor, maps, figure_NK, hyper[loss])
            self._processes[loss] = names, process

    @classmethod
    def load(cls, path: Path = ASSET) -> SearchEvaluator:
        """Reads a file of write_evaluator. Raises ConfigError where it is none."""
        table, scores = MapTable.load(path), {}
        try:
            for name in sorted(table.facts["scores"]):
                arrays = (table.extra[f"scores/{name}/{which}"] for which in ("heads", "groups"))
                tables = (array.tolist() for array in arrays)
                scores[name] = ScoreTables(*tables)
            hyper = {
                loss: Hyperparameters(**found)
                for loss, found in table.facts[HYPERPARAMETERS].items()
            }
            return cls(table, scores, hyper)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: a table, but no evaluator ({error!r})") from error

    def metrics(self, head_map: HeadMap) -> dict[str, float]:
        """Every figure that was measured, and the costs. Losses are 0 at least, shares between 0 and 1."""
        maps = self.descriptor.describe(bits_of(head_map)[None])
        found: dict[str, float] = {}
        names_of, processes = zip(*self._processes.values(), strict=True)
        for names, figure_1K in zip(names_of, predict_together(processes, maps), strict=True):
            for name, value in zip(names, figure_1K[0].tolist(), strict=True):
                found[name] = (
                    max(0.0, float(np.exp(value)) - OFFSET)
                    if is_loss(name)
                    else min(1.0, max(0.0, value))
                )
        return found | analytic_costs(head_map, self.cost)

    def deviation(self, head_maps: list[HeadMap], loss: str = "kl") -> Array:
        """How sure it is of the logarithm of a loss: a standard deviation a map."""
        maps = self.descriptor.describe(np.stack([bits_of(head_map) for head_map in head_maps]))
        return self._processes[loss][1].deviation(maps)

    def __call__(self, spec: TrialSpec) -> TrialResult:
        """Answers as a trial's worker does."""
        started = time.monotonic()
        metrics = self.metrics(HeadMap.from_json(spec.head_map))
        seconds = time.monotonic() - started
        return TrialResult(spec.candidate, "ok", metrics=metrics, seconds=seconds)


def figures_by_loss(columns: tuple[str, ...]) -> dict[str, list[str]]:
    """For each loss the figures that share its hyperparameters, itself first."""
    found = {name: [name] for name in columns if is_loss(name)}
    for name in columns:
        if name in COSTS or name in found:
            continue
        probe = name.removesuffix("_match").removesuffix("_token")
        found["kl" if name.startswith("top1_agreement") else f"{probe}_nll"].append(name)
    return found


def figure_of(table: MapTable, name: str) -> Array:
    """A figure of all maps as the process is fitted to it."""
    value_N = table.values_NK[:, table.columns.index(name)].astype(np.float64)
    figure_N: Array = np.log(value_N.clip(0) + OFFSET) if is_loss(name) else value_N
    return figure_N


def bits_of(head_map: HeadMap) -> NDArray[np.bool_]:
    """Which heads are full attention, [L, H]."""
    return np.array([[letter == Operator.FULL for letter in row] for row in head_map.layers])


def subjects(table: MapTable, scores: Mapping[str, ScoreTables]) -> dict[str, Subject]:
    """Every loss of a table, to be fitted and validated."""
    descriptor = Descriptor(ModelShape(**table.facts["model"]), scores)
    maps = descriptor.describe(table.full_NLH)
    share_N = table.full_NLH.mean((1, 2))
    families = tuple(table.facts["families"])
    return {
        loss: Subject(descriptor, maps, figure_of(table, loss), share_N, table.families_N, families)
        for loss in figures_by_loss(table.columns)
    }


def read_run_scores(table: MapTable, run: Path) -> dict[str, ScoreTables]:
    """The scores that the maps of a table were drawn by. Raises ConfigError where the run's are others, or none."""
    names = sorted(table.facts["scores"])
    scores = read_scores(RunDir(run), names)
    for name in names:
        if digest_of(repr(scores[name]).encode()) != table.facts["scores"][name]:
            raise ConfigError(
                f"{run / score_file(name)}: not the scores that the maps were drawn by; allowed: the run that was measured"
            )
    return scores


def write_evaluator(
    table: MapTable,
    scores: Mapping[str, ScoreTables],
    hyper: Mapping[str, Hyperparameters],
    path: Path,
) -> None:
    """Writes all that SearchEvaluator.load needs; MapTable.load reads the file too."""
    extra = {
        f"scores/{name}/{which}": np.array(getattr(tables, which), dtype=np.float64)
        for name, tables in scores.items()
        for which in ("heads", "groups")
    }
    facts = table.facts | {HYPERPARAMETERS: {loss: asdict(found) for loss, found in hyper.items()}}
    MapTable(
        table.full_NLH,
        table.indices_N,
        table.families_N,
        table.values_NK,
        table.columns,
        facts,
        extra,
    ).save(path)


def validate(
    book: LabBook, loss: str, subject: Subject, hyper: Hyperparameters, rows: int, seed: int
) -> None:
    """Adds and prints how well a loss of held-out maps is foretold."""
    maps = len(subject.maps)
    facts: dict[str, Any] = {"loss": loss, "measured_maps": maps, "preliminary": maps < NEEDED_MAPS}

    def add(what: str, found: Agreement, **more: Any) -> None:
        for name, unit in (("spearman", "rho"), ("rmse", "nats"), ("bias", "nats")):
            value = round(getattr(found, name), 5)
            book.add(f"{what}: {name}", value, f"{unit} of log", maps=found.maps, **facts, **more)
        print(
            f"{loss:18} {what:32} {found.maps:5} maps  rho {found.spearman:.4f}  rmse {found.rmse:.4f}  bias {found.bias:+.4f}",
            flush=True,
        )

    for name, found in cross_validate(subject, rows, seed).items():
        add(f"held out, {name}", found)
    add(f"best {BEST:.0%} of each band left out", leave_best_out(subject, rows, seed))
    curve = learning_curve(subject, hyper, seed)
    for count, found in curve.items():
        add(f"held out, by {count} maps", found)
    if maps < NEEDED_MAPS:
        rho, rmse = extrapolate(curve, NEEDED_MAPS)
        book.add("extrapolated spearman", round(rho, 5), "rho of log", by_maps=NEEDED_MAPS, **facts)
        book.add("extrapolated rmse", round(rmse, 5), "nats of log", by_maps=NEEDED_MAPS, **facts)
        print(f"{loss:18} by {NEEDED_MAPS} maps, extrapolated: rho {rho:.4f}  rmse {rmse:.4f}")


def main() -> None:
    """Command line entry."""
    parser = script_parser(__doc__, figures=False)
    parser.add_argument("table", type=Path, help="what map_measures wrote")
    parser.add_argument("run", type=Path, help="whose scores the maps were drawn by")
    parser.add_argument(
        "--rows", type=int, default=800, help="maps that hyperparameters are fitted to"
    )
    parser.add_argument("--fold-rows", type=int, default=400, help="the same within a fold")
    parser.add_argument("--seed", type=int, default=0, help="of folds and of what is fitted")
    parser.add_argument("--to", type=Path, required=True, help="the evaluator")
    parser.add_argument("--figures", type=Path, help="JSON that figures go to")
    args = parser.parse_args()
    table = MapTable.load(args.table)
    scores = read_run_scores(table, args.run)
    found = subjects(table, scores)
    everything = np.arange(len(table.indices_N))
    hyper = {loss: s.fit(everything, args.rows, args.seed) for loss, s in found.items()}
    write_evaluator(table, scores, hyper, args.to)
    evaluator = SearchEvaluator.load(args.to)
    rate = evaluations_a_second(evaluator)
    size = args.to.stat().st_size
    print(
        f"{len(everything):,} maps, {size / 1e6:.2f} MB, {rate:,.0f} evaluations a second: {args.to}"
    )
    if args.figures:
        book = LabBook(args.seed)
        book.add("evaluations", round(rate), "1/s", measured_maps=len(everything))
        book.add("file", size, "bytes", measured_maps=len(everything))
        for loss, subject in found.items():
            validate(book, loss, subject, hyper[loss], args.fold_rows, args.seed)
            book.write(args.figures)


def evaluations_a_second(evaluator: SearchEvaluator, count: int = 40, rounds: int = 5) -> float:
    """Trials that it answers in a second, one by one, in the best of a few rounds: a machine may be busy with other things."""
    specs = [
        TrialSpec(number, head_map_of(evaluator.shape, full_LH).to_json(), 0)
        for number, full_LH in enumerate(evaluator.table.full_NLH[:count])
    ]
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        for spec in specs:
            evaluator(spec)
        seconds.append(time.perf_counter() - started)
    return len(specs) / min(seconds)


if __name__ == "__main__":
    run_script(main)
