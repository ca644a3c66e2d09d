"""A search whose candidates get made-up metrics at once, so that what is measured is the search itself.

    python -m archsearch.lab.stand_in RUN_DIR SETTINGS

is one call of such a search in a process of its own, to be killed: SETTINGS is a Settings as JSON. Head maps are those of a
SmolLM2 (30 layers of 9 heads in 3 KV groups); damages of heads are drawn once and add up with interactions within a layer.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import event
from sqlalchemy.engine import Engine

from ..config import RunConfig
from ..execution.base import Executor
from ..execution.serial import SerialExecutor
from ..headmap import HeadMap, ModelShape
from ..progress import Progress, ignore_progress
from ..rundir import RunDir
from ..search.driver import run_search
from ..search.outcome import SearchOutcome
from ..search.records import TrialResult, TrialSpec
from ..search.rung import Say
from ..search.seeds import ScoreTables
from ..search.space import analytic_costs
from ..search.study import RungStudy

SHAPE = ModelShape("llama", num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64)
POINTS = ("statement", "commit", "begin", "end")
"""Where a driver can be told to die: after an SQL statement within a transaction, after a transaction, between a trial's being
written down and its worker's getting it, and between a worker's answer and its being written down."""


@dataclass(frozen=True)
class Settings:
    """One call of a stand-in search. workers 0: in this process. die: point and how often it is passed before the end."""

    search: Mapping[str, Any] = field(default_factory=dict)
    workers: int = 0
    seconds: float = 0.0
    """What a candidate takes."""
    seed: int = 0
    die: tuple[str, int] | None = None

    def config(self) -> RunConfig:
        """The run's config."""
        data = {
            "schema": 1,
            "name": "stand-in",
            "seed": self.seed,
            "teacher": {"source": "none"},
            "search": {"random_control": False, **self.search},
        }
        return RunConfig.model_validate_json(json.dumps(data))


@cache
def damages() -> NDArray[np.float64]:
    """What each head's loss costs, [layers, heads]."""
    return np.random.default_rng(11).gamma(0.4, 1.0, (SHAPE.num_layers, SHAPE.num_heads))


def score_tables() -> dict[str, ScoreTables]:
    """Scores that see the damages through noise, as those of a run do."""
    found = {}
    for seed, name in enumerate(("causal", "replacement_kl")):
        noise = np.random.default_rng(seed).lognormal(0, 1.0 - 0.5 * seed, damages().shape)
        heads = damages() * noise
        groups = heads.reshape(SHAPE.num_layers, SHAPE.num_kv_heads, -1).max(-1)
        found[name] = ScoreTables(heads.tolist(), groups.tolist())
    return found


class StandInWorker:
    """Answers a spec by formula. payload: {"seconds": what a candidate takes, "cost": the config's section}."""

    def __init__(self, payload: dict[str, Any]) -> None:
        self._seconds = payload["seconds"]
        self._cost = Settings().config().cost

    def __call__(self, spec: TrialSpec) -> TrialResult:
        """The same metrics for the same map and tokens."""
        start = time.monotonic()
        time.sleep(self._seconds)
        head_map = HeadMap.from_json(spec.head_map)
        lost = np.array([[letter != "F" for letter in row] for row in head_map.layers]) * damages()
        # What a layer loses as a whole hurts more than the sum of its heads.
        harm = float((lost.sum(1) ** 1.5).sum()) / (1 + spec.proxy_tokens / 200)
        metrics = {"kl": harm, "top1_agreement": 1 / (1 + harm)}
        for kind, share in (("single", 0.5), ("multikey", 1.0)):
            metrics |= {
                f"niah_{kind}_nll": harm * share,
                f"niah_{kind}_match": 1 / (1 + share * harm),
            }
        return TrialResult(
            spec.candidate,
            "ok",
            metrics=metrics | analytic_costs(head_map, self._cost),
            tokens=spec.proxy_tokens,
            seconds=time.monotonic() - start,
        )


def search(
    run_dir: RunDir, settings: Settings, say: Say = print, progress: Progress = ignore_progress
) -> SearchOutcome:
    """Runs, or goes on with, the search of a directory that is open."""
    config, payload = settings.config(), {"seconds": settings.seconds}
    run_dir.freeze_config(config)

    def executor() -> Executor:
        if not settings.workers:
            return SerialExecutor(StandInWorker, payload)
        from ..execution.ray_executor import RayExecutor

        return RayExecutor(StandInWorker, payload, workers=settings.workers, threads=1)

    return run_search(
        config, run_dir, SHAPE, score_tables(), progress, say=say, make_executor=executor
    )


def die_at(point: str, count: int) -> None:
    """Kills this process, with no chance to clean up, when it has passed a point so many times."""
    left = count

    def passed(*_: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    if point == "statement":
        event.listen(Engine, "after_cursor_execute", passed)
    elif point == "commit":
        event.listen(Engine, "commit", passed)
    else:
        real = getattr(RungStudy, point)

        def wrapped(self: RungStudy, *args: Any, **options: Any) -> Any:
            if point == "end":
                passed()
            result = real(self, *args, **options)
            if point == "begin":
                passed()
            return result

        setattr(RungStudy, point, wrapped)


def to_json(settings: Settings) -> str:
    """Settings as an argument of this module's command."""
    return json.dumps(asdict(settings))


def main() -> None:
    """Command line entry."""
    # Workers look their class up by its module, which here is __main__.
    stand_in = importlib.import_module("archsearch.lab.stand_in")

    place, text = sys.argv[1:]
    settings = stand_in.Settings(**json.loads(text))
    if settings.die is not None:
        die_at(*settings.die)
    with RunDir(Path(place)) as run_dir:
        print(stand_in.search(run_dir, settings).summary, flush=True)


if __name__ == "__main__":
    main()
