"""How much front a search finds for its trials: proposals compared on what stands for the model (search_evaluator).

    export OPENBLAS_NUM_THREADS=1
    python -m archsearch.lab.search_bench --ledger bench.jsonl --part 0/2 & python -m archsearch.lab.search_bench --ledger bench.jsonl --part 1/2; wait
    python -m archsearch.lab.search_bench --ledger bench.jsonl --figures runs/lab/search_bench.json

Every contestant runs as a user's search does: driver, SQLite and seeds, which count as trials; only the worker is the evaluator.
Seeds are the config's and the integer program's at the same shares, with --every-selector those of a search of 400 trials, which
are more than 50. Hypervolumes are shares of the box from no KL at the cost of an all-GDN map to a tenth beyond all-GDN's KL and all-FA's cost.
The integer program alone has no search: as many of its maps as trials, spread evenly over the budgets. A call goes on from the
ledger's rows of the same evaluator, config and sources of archsearch.search, and ends with what there is after --seconds.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from .. import search as search_package
from ..config import ObjectiveConfig, RunConfig, SeedConfig, SeedMethod
from ..configfile import load_config
from ..errors import ConfigError
from ..execution.serial import SerialExecutor
from ..headmap import HeadMap, Operator
from ..rundir import RunDir
from ..search.driver import run_search
from ..search.front import Candidate, Scale, pareto_front
from ..search.seeds import seed_maps
from .entry import run_script, script_parser
from .ledger import FAILED, VALUES, Ledger
from .map_measures import part_of
from .map_table import digest_of
from .records import LabBook
from .search_evaluator import ASSET, NEEDED_MAPS, SearchEvaluator
from .search_tables import CHECKPOINTS, STEP, Row, Standing, print_standing

CONFIG = Path("search_spaces/smollm2_135m_gpu.yaml")
SETTINGS = {"kl and cache": ("kl", "cache_bytes"), "kl and share": ("kl", "fa_share")}
"""Objectives, all of them to be small."""
PROGRAM = "integer program"
PROGRAMS: tuple[SeedMethod, ...] = ("program", "program_groups", "program_bytes")


@dataclass(frozen=True)
class Contestant:
    """Fields of config.search, and how often and how long it runs."""

    search: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 5
    trials: int = CHECKPOINTS[-1]


CONTESTANTS = {
    "guided free": Contestant({"representation": "free", "sampler": "guided"}),
    "guided groups": Contestant({"representation": "groups", "sampler": "guided"}),
    "tpe": Contestant({"sampler": "tpe"}),
    "nsga2": Contestant({"sampler": "nsga2"}),
    "nsga3": Contestant({"sampler": "nsga3"}),
    "gp": Contestant({"sampler": "gp"}, seeds=3, trials=100),
    "random": Contestant({"sampler": "random"}),
    "random free": Contestant({"representation": "free", "sampler": "random"}),
    PROGRAM: Contestant(seeds=1),
}


@dataclass(frozen=True)
class Match:
    """One search that is to be run: key says all that its outcome depends on."""

    setting: str
    contestant: str
    seed: int
    trials: int
    key: str


class Bench:
    """The evaluator and the config that all contestants share."""

    def __init__(
        self, evaluator: SearchEvaluator, config: RunConfig, *, every_selector: bool = False
    ) -> None:
        self.evaluator, self._config = evaluator, config
        seeds = config.search.seeds
        methods = tuple(dict.fromkeys((*seeds.methods, PROGRAMS[0])))
        changes = {"methods": methods, "every_selector": every_selector}
        self._seeds = seeds.model_copy(update=changes).model_dump(mode="json")

    def scale(self, setting: str) -> Scale:
        """The box of a setting, by the two uniform maps."""
        uniform = [
            HeadMap.uniform(self.evaluator.shape, op) for op in (Operator.FULL, Operator.GDN)
        ]
        return Scale.of(objectives_of(setting), self._evaluated(uniform))

    def config(self, match: Match) -> RunConfig:
        """The config of one search. Raises ConfigError where it is none, such as for a sampler that does not exist."""
        data = self._config.model_dump(mode="json", by_alias=True)
        data["name"], data["seed"] = "bench", match.seed
        # Nothing that the evaluator does not tell.
        data["probes"] |= {
            "kinds": self.evaluator.kinds,
            "unseen": [],
            "files": [],
            "contexts": data["probes"]["contexts"][:1],
        }
        data["cost"] = self.evaluator.cost.model_dump()
        data["execution"] = {"executor": "serial"}
        data["search"] = {
            "seeds": self._seeds,
            "objectives": [o.model_dump() for o in objectives_of(match.setting)],
            "trials": match.trials,
            "random_control": False,
            **CONTESTANTS[match.contestant].search,
        }
        try:
            return RunConfig.model_validate_json(json.dumps(data))
        except ValueError as error:
            raise ConfigError(f"{match.contestant}: {error}") from error

    def play(self, match: Match) -> dict[str, Any]:
        """Runs a match: hypervolumes by trials, its front as objectives, and its seconds."""
        started = time.monotonic()
        if match.contestant == PROGRAM:
            steps = self._programs(match.trials)
            found, num_seeds = steps[-1][1], 0
        else:
            found = self._search(self.config(match))
            num_seeds = sum(c.source != "search" for c in found)
            steps = [(n, found[:n]) for n in range(STEP, len(found) + 1, STEP)]
        seconds = time.monotonic() - started
        scale = self.scale(match.setting)
        front = pareto_front(found, scale)
        metrics = [objective.metric for objective in scale.objectives]
        deviation_N = self.evaluator.deviation([c.head_map for c in front])
        return {
            "volumes": {str(n): scale.hypervolume(some) for n, some in steps},
            "front": [[c.metrics[name] for name in metrics] for c in front],
            "seconds": round(seconds, 2),
            "seeds": num_seeds,
            "maps": len({c.head_map.layers for c in found}),
            "deviation": float(np.median(deviation_N)),
        }

    def _search(self, config: RunConfig) -> list[Candidate]:
        """All candidates of a search in the order of their trials."""
        with TemporaryDirectory() as folder, RunDir(Path(folder) / "run") as run_dir:
            run_dir.freeze_config(config)
            outcome = run_search(
                config,
                run_dir,
                self.evaluator.shape,
                self.evaluator.scores,
                say=logging.getLogger(__name__).info,
                make_executor=lambda: SerialExecutor(lambda _: self.evaluator, {}),
            )
        if outcome.failed:
            raise RuntimeError(f"{outcome.failed} candidates failed")
        return sorted(outcome.rungs[0].search, key=lambda c: c.candidate)

    def _programs(self, trials: int) -> list[tuple[int, list[Candidate]]]:
        """The integer program's maps for each checkpoint: budgets spread evenly."""
        steps = []
        for checkpoint in CHECKPOINTS:
            if checkpoint <= trials:
                budgets = checkpoint // len(PROGRAMS)
                shares = tuple((n + 1) / (budgets + 1) for n in range(budgets))
                config = SeedConfig(methods=PROGRAMS, fa_shares=shares)
                shape, cost = self.evaluator.shape, self.evaluator.cost
                seeds = seed_maps(shape, self.evaluator.scores, config, 0, cost)
                steps.append((checkpoint, self._evaluated([seed.head_map for seed in seeds])))
        return steps

    def _evaluated(self, maps: Sequence[HeadMap]) -> list[Candidate]:
        return [
            Candidate(number, PROGRAM, self.evaluator.metrics(head_map), head_map)
            for number, head_map in enumerate(maps)
        ]


def objectives_of(setting: str) -> tuple[ObjectiveConfig, ...]:
    """The objectives of a setting."""
    return tuple(ObjectiveConfig(metric=name, direction="minimize") for name in SETTINGS[setting])


def list_matches(
    settings: Sequence[str], contestants: Sequence[str], trials: int, fixed: Mapping[str, Any]
) -> list[Match]:
    """All matches, a first one of everybody before a second one of anybody."""
    found = []
    for seed in range(max(CONTESTANTS[name].seeds for name in contestants)):
        for setting in settings:
            for name in contestants:
                contestant = CONTESTANTS[name]
                length = min(contestant.trials, trials)
                if seed < contestant.seeds:
                    facts = {"setting": setting, "contestant": name, "seed": seed, "trials": length}
                    key = json.dumps({**facts, **fixed}, sort_keys=True)
                    found.append(Match(setting, name, seed, length, key))
    return found


def sources_digest() -> str:
    """A digest of archsearch.search, whose code decides what a search finds."""
    (root,) = search_package.__path__
    files = sorted(Path(root).rglob("*.py"))
    return digest_of(b"".join(file.read_bytes() for file in files))


def play_all(bench: Bench, matches: Sequence[Match], ledger: Ledger, until: float) -> None:
    """Runs what the ledger lacks until the clock (time.monotonic) says `until`."""
    done = ledger.rows()
    for match in matches:
        if match.key in done or time.monotonic() >= until:
            continue
        name = f"{match.setting}, {match.contestant}, seed {match.seed}"
        try:
            values = bench.play(match)
        except (ConfigError, RuntimeError) as error:
            # Not for good: a sampler may come, so that there is no row.
            print(f"{name}: {' '.join(str(error).split())[:300]}", flush=True)
            continue
        ledger.add(match.key, **{VALUES: values})
        volumes = ", ".join(f"{n} {values['volumes'].get(str(n), np.nan):.4f}" for n in CHECKPOINTS)
        print(f"{name}: {volumes}; {values['seconds']:.1f} s", flush=True)


def standings(
    bench: Bench, matches: Sequence[Match], rows: Mapping[str, Mapping[str, Any]]
) -> Iterator[Standing]:
    """What the ledger has of each setting."""
    for setting in dict.fromkeys(match.setting for match in matches):
        found = [
            Row(match.contestant, match.seed, rows[match.key][VALUES])
            for match in matches
            if match.setting == setting and match.key in rows and FAILED not in rows[match.key]
        ]
        if found:
            yield Standing.of(setting, found, bench.scale(setting))


def main() -> None:
    """Command line entry."""
    started = time.monotonic()
    parser = script_parser(__doc__, figures=False)
    parser.add_argument("--evaluator", type=Path, default=ASSET, help="what search_evaluator wrote")
    parser.add_argument("--config", type=Path, default=CONFIG, help="whose seeds are taken")
    parser.add_argument(
        "--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="objectives"
    )
    parser.add_argument(
        "--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS), help="proposals"
    )
    parser.add_argument("--every-selector", action="store_true", help="as a seed")
    parser.add_argument("--trials", type=int, default=CHECKPOINTS[-1], help="at most, of a search")
    parser.add_argument(
        "--part", type=part_of, default=(0, 1), metavar="i/n", help="every nth search"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="no search is begun after them"
    )
    parser.add_argument(
        "--ledger", type=Path, required=True, help="JSON lines that a call goes on from"
    )
    parser.add_argument("--figures", type=Path, help="JSON that figures go to")
    args = parser.parse_args()
    evaluator, config = SearchEvaluator.load(args.evaluator), load_config(args.config)
    bench = Bench(evaluator, config, every_selector=args.every_selector)
    fixed: dict[str, Any] = {
        "evaluator": digest_of(args.evaluator.read_bytes()),
        "config": digest_of(args.config.read_bytes()),
        "sources": sources_digest(),
        "every_selector": args.every_selector,
    }
    matches = list_matches(args.settings, args.contestants, args.trials, fixed)
    ledger = Ledger(args.ledger)
    first, number = args.part
    play_all(bench, matches[first::number], ledger, started + args.seconds)
    maps = len(bench.evaluator.table.indices_N)
    facts = {"measured_maps": maps, "preliminary": maps < NEEDED_MAPS, **fixed}
    book = LabBook(0)
    for standing in standings(bench, matches, ledger.rows()):
        print_standing(standing)
        standing.add_to(book, **facts)
    if args.figures:
        book.write(args.figures)


if __name__ == "__main__":
    run_script(main)
