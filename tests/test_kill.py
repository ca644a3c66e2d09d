"""A whole run in a process of its own that gets SIGKILL, during the alignment or the search, and is started again."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import optuna
import pytest
import torch
from optuna.trial import FrozenTrial, TrialState
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from archsearch.models.supernet import read_meta

ROOT = Path(__file__).parents[1]
STEPS = 90
"""Of the alignment: a second or more, while its first checkpoint comes after 60 ms."""
TRIALS = 6
KILLED_AFTER = 4
"""Trials: the three seeds and one that the sampler chose."""
MARK = [0, -1.0]
"""A row of the loss log that no training writes."""
SET_UP = "SELECT count(*) FROM trial_user_attributes WHERE key = 'candidate'"
"""Counts the trials whose evaluation has begun: serially, all but the last one are finished."""

CONFIG = """\
schema: 1
name: check
seed: 3
teacher: {{source: {teacher}, device: cpu}}
data:
  sequence_length: 96
  heldout_sequences: 1
  niah_share: 0.25
  train: {{source: file, path: {text}}}
  heldout: {{source: file, path: {text}}}
probes: {{contexts: [96], multi_keys: 2, digits: 2, prompts: 1}}
scoring: {{retrieval: [], general: [], pairs_file: {pairs}, sender_pairs: 2, replacement_length: 32}}
supernet: {{tokens: {tokens}, batch_tokens: 96, checkpoint_minutes: 0.001}}
search:
  trials: {trials}
  proxy_tokens: [0, 96]
  random_control: false
  seeds: {{methods: [all_full, all_gdn, causal], fa_shares: [0.5]}}
cost: {{context: 256}}
distill: {{batch_tokens: 96}}
execution: {{executor: serial}}
"""


class Run:
    """One run directory, and the command that is started in it again and again."""

    def __init__(self, config: Path, folder: Path) -> None:
        self.folder = folder
        self._command = ["run", str(config), "--run-dir", str(folder)]
        self._log = folder.with_suffix(".log")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "archsearch.cli", *self._command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def kill_once(self, due: Callable[[], bool]) -> None:
        """Waits until it is due, and kills without a chance to clean up."""
        assert self._process is not None
        deadline = time.monotonic() + 100
        while not due():
            assert self._process.poll() is None, f"ended too early: {self.output()}"
            assert time.monotonic() < deadline, f"was never due: {self.output()}"
            time.sleep(0.005)
        self._process.send_signal(signal.SIGKILL)
        assert self._process.wait() == -signal.SIGKILL, self.output()

    def finish(self) -> str:
        """Waits for the end, which has to be a good one; what was printed."""
        assert self._process is not None
        assert self._process.wait(timeout=100) == 0, self.output()
        return self.output()

    def stop(self) -> None:
        """Leaves nothing running behind a test that fails."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def checkpoint(self) -> Path:
        return self.folder / "align.checkpoint.safetensors"

    def aligning(self) -> bool:
        return self.checkpoint.exists()

    def searching(self) -> bool:
        """Whether enough trials are finished and another one is being evaluated."""
        found = 0
        # The database comes to be while we look.
        with contextlib.suppress(sqlite3.OperationalError):
            connection = sqlite3.connect(f"file:{self.folder}/study.db?mode=ro", uri=True)
            with contextlib.closing(connection):
                (found,) = connection.execute(SET_UP).fetchone()
        return found > KILLED_AFTER

    def trials(self, tokens: int = 0) -> list[FrozenTrial]:
        storage = optuna.storages.RDBStorage(f"sqlite:///{self.folder}/study.db")
        study = optuna.load_study(study_name=f"check@{tokens}", storage=storage)
        return study.get_trials()

    def times(self, *names: str) -> list[int]:
        """When files were last written."""
        return [(self.folder / name).stat().st_mtime_ns for name in names]


@pytest.fixture(scope="module")
def runs(
    teacher_folder: Path, answered_pairs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Run, Run]]:
    """Two runs of one config: whatever one of them was killed in, the other did in one go."""
    place = tmp_path_factory.mktemp("kill")
    rows = np.random.default_rng(0).integers(2, 40, size=(STEPS + 1, 96))
    np.save(place / "text.npy", rows.astype(np.uint16))
    config = place / "check.yaml"
    config.write_text(
        CONFIG.format(
            teacher=teacher_folder,
            pairs=answered_pairs,
            text=place / "text.npy",
            tokens=STEPS * 96,
            trials=TRIALS,
        )
    )
    pair = Run(config, place / "alignment"), Run(config, place / "search")
    yield pair
    for run in pair:
        run.stop()


def test_killed_runs_end_as_if_nothing_had_happened(runs: tuple[Run, Run]) -> None:
    alignment, search = runs
    alignment.start()
    alignment.kill_once(alignment.aligning)
    step = mark(alignment.checkpoint)
    data = ("heldout.npy", "train.npy", "retrieval.npy")
    data_times = alignment.times(*data)
    assert 0 < step < STEPS
    assert not (alignment.folder / "supernet.safetensors").exists()

    # From here on both at once, since two cores are there.
    alignment.start()
    search.start()
    search.kill_once(search.searching)
    scores = ("scores.json", "scores/replacement_kl.json", "similarity.json")
    files = (*data, "supernet.safetensors", *scores)
    search_times = search.times(*files)
    before = search.trials()
    search.start()
    alignment_output, search_output = alignment.finish(), search.finish()

    assert kept_stages(alignment_output) == ["data"]  # The teacher has to be loaded again.
    assert alignment.times(*data) == data_times
    assert_went_on_from(alignment, step)
    assert kept_stages(search_output) == ["teacher", "data", "supernet", "scores"]
    assert search.times(*files) == search_times
    assert_trials_were_kept(search, before, search_output)
    for run in runs:
        assert_exact(run)
    assert_same_results(alignment, search)


def mark(checkpoint: Path) -> int:
    """Replaces the loss log in a checkpoint by MARK; the steps that are behind it."""
    with safe_open(checkpoint, framework="pt") as file:
        metadata = file.metadata()
    tensors = {name: tensor.clone() for name, tensor in load_file(checkpoint).items()}
    save_file(tensors, checkpoint, metadata | {"losses": f"[{MARK}]"})
    return int(metadata["step"])


def kept_stages(output: str) -> list[str]:
    return [line.split()[0] for line in output.splitlines() if line[9:].startswith(" kept: ")]


def assert_went_on_from(run: Run, step: int) -> None:
    """The checkpoint's loss log goes on with the steps after it, and the checkpoint is gone."""
    first, *others = read_meta(run.folder / "supernet.safetensors")["metrics"]["losses"]
    assert first == MARK
    assert [row[0] for row in others] == list(range(step + 1, STEPS + 1))
    assert not list(run.folder.glob("*checkpoint*"))


def assert_trials_were_kept(run: Run, before: list[FrozenTrial], output: str) -> None:
    """Finished trials are untouched; the one that ran is closed, and its candidate evaluated anew."""
    *finished, running = before
    assert [trial.state for trial in finished] == [TrialState.COMPLETE] * KILLED_AFTER
    assert running.state == TrialState.RUNNING
    after = run.trials()
    assert after[:KILLED_AFTER] == finished  # Values, times and attributes.
    (orphan,) = (trial for trial in after if trial.state == TrialState.FAIL)
    assert (orphan.number, orphan.user_attrs["reason"]) == (running.number, "orphaned")
    candidate = running.user_attrs["candidate"]
    assert f"check@0: requeued after an interruption: candidate {candidate}\n" in output
    (retry,) = (trial for trial in after if trial.user_attrs.get("retry_of") == orphan.number)
    assert retry.user_attrs["head_map"] == running.user_attrs["head_map"]


def assert_exact(run: Run) -> None:
    """Every candidate of the first rung has one result, and no trial of any rung is open."""
    complete = [trial for trial in run.trials() if trial.state == TrialState.COMPLETE]
    assert sorted(trial.user_attrs["candidate"] for trial in complete) == list(range(TRIALS))
    assert len({trial.user_attrs["head_map"] for trial in complete}) == TRIALS
    promoted = run.trials(96)
    ended = Counter(trial.state for trial in promoted)
    assert ended.keys() == {TrialState.COMPLETE, TrialState.PRUNED}
    assert ended.total() == TRIALS
    assert all(trial.state.is_finished() for trial in run.trials())


def assert_same_results(one: Run, other: Run) -> None:
    """The supernets agree bit for bit, and so do the values of every candidate in every rung."""
    left, right = (load_file(run.folder / "supernet.safetensors") for run in (one, other))
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(tensor.view(torch.uint8), right[name].view(torch.uint8)), name
    for tokens in (0, 96):
        assert results(one, tokens) == results(other, tokens)


def results(run: Run, tokens: int) -> dict[int, tuple[str, list[float]]]:
    return {
        trial.user_attrs["candidate"]: (trial.user_attrs["head_map"], trial.values)
        for trial in run.trials(tokens)
        if trial.state == TrialState.COMPLETE
    }
