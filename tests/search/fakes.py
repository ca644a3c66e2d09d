"""A run without a model: head maps get made-up metrics, and some fail in known ways."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from archsearch.config import RunConfig
from archsearch.cost import cache_bytes
from archsearch.execution.serial import SerialExecutor
from archsearch.headmap import HeadMap, ModelShape
from archsearch.rundir import RunDir
from archsearch.search import stopping
from archsearch.search.driver import run_search
from archsearch.search.front import Candidate, Fronts
from archsearch.search.outcome import SearchOutcome
from archsearch.search.promotion import promote_fronts
from archsearch.search.records import TrialResult, TrialSpec, trained_path
from archsearch.search.seeds import ScoreTables

SHAPE = ModelShape("qwen3", num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16)
CAUSAL = [[(7 * layer + 3 * head) % 11 / 10 for head in range(4)] for layer in range(4)]
DAMAGE = [[(5 * layer + 9 * head) % 13 / 10 for head in range(4)] for layer in range(4)]


def score_tables(heads: list[list[float]], group_size: int) -> ScoreTables:
    """Scores whose groups have the largest of their heads'."""
    starts = range(0, len(heads[0]), group_size)
    groups = [[max(row[start : start + group_size]) for start in starts] for row in heads]
    return ScoreTables(heads, groups)


SCORES = {"causal": score_tables(CAUSAL, 2), "replacement_kl": score_tables(DAMAGE, 2)}


def fake_config(**search: Any) -> RunConfig:
    """A config for 8 trials of one rung; keywords set fields of its search section."""
    data = {
        "schema": 1,
        "name": "fake",
        "teacher": {"source": "none"},
        "search": {
            "trials": 8,
            "seeds": {"methods": ["all_full", "all_gdn", "causal", "random"], "fa_shares": [0.25]},
            "random_control": False,
            **search,
        },
    }
    return RunConfig.model_validate_json(json.dumps(data))


class FakeWorker:
    """Metrics by formula. The payload may name candidates that fail: {"faults": {"3": ["raise"]}}.

    Every call is a line of the payload's log; the n-th try of a candidate takes the n-th fault of its list.
    """

    def __init__(self, payload: dict[str, Any]) -> None:
        self.faults = payload.get("faults", {})
        self.log = Path(payload["log"])
        self.seconds = payload.get("seconds", 0)

    def __call__(self, spec: TrialSpec) -> TrialResult:
        earlier = [call for call in read_log(self.log) if call["candidate"] == spec.candidate]
        with self.log.open("a") as file:
            file.write(json.dumps(spec.to_json()) + "\n")
        time.sleep(self.seconds)
        faults = self.faults.get(str(spec.candidate), [])
        fault = faults[len(earlier)] if len(earlier) < len(faults) else None
        metrics = fake_metrics(HeadMap.from_json(spec.head_map), spec.proxy_tokens)
        if (
            spec.proxy_tokens and spec.candidate != 0
        ):  # all FA is not distilled and leaves no weights
            weights = trained_path(self.log.parent, spec)
            weights.parent.mkdir(exist_ok=True)
            weights.touch()
        match fault:
            case "gone":
                raise FileNotFoundError(2, "No such file or directory", "train.npy")
            case "raise":
                raise ValueError("broken")
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "nan":
                metrics["kl"] = float("nan")
            case "missing":
                del metrics["kl"]
            case "memory":
                return TrialResult(spec.candidate, "failed", "out of memory: 3 GiB")
            case "pruned":
                return TrialResult(spec.candidate, "pruned", "worse than half of its rung")
        return TrialResult(spec.candidate, "ok", None, metrics, spec.proxy_tokens, 0.5)


class FakeClock:
    """The time that limits read: it goes on while a worker of its own evaluates, and at no other time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, now: float = 0.0) -> None:
        self.now = now
        monkeypatch.setattr(stopping.time, "monotonic", lambda: self.now)

    def worker(self, seconds: Callable[[TrialSpec], float]) -> type[FakeWorker]:
        """Workers whose candidates take so long."""
        clock = self

        class Slow(FakeWorker):
            def __call__(self, spec: TrialSpec) -> TrialResult:
                clock.now += seconds(spec)
                return super().__call__(spec)

        return Slow


def fake_metrics(head_map: HeadMap, tokens: int) -> dict[str, float]:
    """KL falls with the scores of the heads that are kept and with training."""
    full = head_map.full_heads()
    lost = sum(
        CAUSAL[layer][head] + DAMAGE[layer][head]
        for layer, head in SHAPE.heads()
        if (layer, head) not in full
    )
    return {
        "kl": lost / (1 + tokens / 100),
        "top1_agreement": 1 / (1 + lost),
        "niah_single_nll": lost / 2,
        "niah_single_match": 1.0,
        "niah_multikey_nll": lost,
        "niah_multikey_match": 0.5,
        "fa_share": head_map.fa_share,
        "cache_bytes": float(cache_bytes(head_map, 32_768)),
    }


def fake_search(
    config: RunConfig,
    folder: Path,
    *,
    said: list[str] | None = None,
    worker: type[FakeWorker] = FakeWorker,
    **payload: Any,
) -> SearchOutcome:
    """Runs the search with a fake worker in this process."""
    with RunDir(folder) as run_dir:
        run_dir.freeze_config(config)
        return run_search(
            config,
            run_dir,
            SHAPE,
            SCORES,
            say=said.append if said is not None else print,
            make_executor=lambda: SerialExecutor(
                worker, {"log": str(folder / "calls.jsonl"), **payload}
            ),
        )


def read_log(path: Path) -> list[dict[str, Any]]:
    """The specs that workers were called with, oldest first."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def going_on(fronts: Fronts, most: int | None = None) -> tuple[list[Candidate], list[Candidate]]:
    """Who goes on from these fronts, the search's and the control's, by number."""
    search, control = (
        sorted(each.chosen, key=lambda c: c.candidate)
        for each in promote_fronts(fronts, (), (), most, "search.max_promoted")
    )
    return search, control


def killed_searches(folder: Path, search: dict[str, Any], dying: Sequence[int]) -> list[int]:
    """Exit codes of that many calls of one search, each in a process that dies in one of these candidates."""
    faults = {str(number): ["die"] for number in dying}
    command = [sys.executable, "-m", "tests.search.fakes", str(folder), json.dumps(search)]
    root = Path(__file__).parents[2]
    paths = [os.environ.get("PYTHONPATH"), str(root), str(root / "kernels")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    done = subprocess.run(
        [*command, json.dumps(faults)],
        check=True,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    codes: list[int] = json.loads(done.stdout.splitlines()[-1])
    return codes


def search_until_killed(folder: str, search: str, faults: str) -> None:
    """Writes the exit codes of as many calls as there are faults to the standard output."""
    codes = []
    for _ in json.loads(faults):
        # Forked from a process that has no threads, so that what takes longest, the imports, is done once.
        driver = multiprocessing.get_context("fork").Process(
            target=fake_search,
            args=(fake_config(**json.loads(search)), Path(folder)),
            kwargs={"faults": json.loads(faults)},
        )
        driver.start()
        driver.join()
        codes.append(driver.exitcode)
    sys.stdout.write(json.dumps(codes))


if __name__ == "__main__":
    search_until_killed(*sys.argv[1:])
