"""The folder of a comparison of students: a run's supernet and training text, held-out text of its own, and its results."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..changes import differences
from ..config import RunConfig
from ..configfile import load_config
from ..data.niah import retrieval_rows
from ..data.overlap import shared_rows
from ..errors import ConfigError
from ..headmap import ModelShape
from ..inputs import scored_inputs
from ..models.teacher import Teacher, load_teacher
from ..progress import ignore_progress
from ..rundir import RunDir
from ..search.trial import (
    HELDOUT_FILE,
    RETRIEVAL_FILE,
    STARTS_FILE,
    SUPERNET_FILE,
    TRAIN_FILE,
    heldout_file,
)
from ..stages import RunContext
from ..texts import write_heldout

TEXTS_FILE = "texts.json"
BY_THE_WAY = ("cache_gib", "checkpointing")
"""Fields of section distill that no figure depends on."""


def read_config(run: RunDir, overrides: Sequence[str]) -> RunConfig:
    """The run's config with `a.b=value` overrides. Raises ConfigError where there is none, or a value is not allowed."""
    run.load_config()
    return load_config(run / "config.json", overrides)


def read_shape(run: RunDir) -> ModelShape:
    """The geometry of the run's teacher. Raises ConfigError where the run has no teacher yet."""
    return ModelShape(**run.read_json("teacher.json")["model"])


class BenchFolder:
    """Files that a TrialWorker reads, made of a run's where they are the same, and otherwise drawn or read once."""

    def __init__(self, run: RunDir, path: Path, config: RunConfig) -> None:
        self._run, self.dir, self._config = run, RunDir(path), config
        self._loaded: Teacher | None = None

    def prepare(self) -> int:
        """Makes what is missing; returns how many training rows were left out that share a passage with held-out text.

        Raises ConfigError or EnvironmentFault where the run has no supernet or no training text.
        """
        for name in (SUPERNET_FILE, TRAIN_FILE):
            if not (self._run / name).exists():
                raise ConfigError(f"{self._run / name}: missing; `archsearch score` makes it")
        self.dir.path.mkdir(parents=True, exist_ok=True)
        self._freeze_texts()
        self._link(SUPERNET_FILE)
        for name in self._same_heldout():
            self._link(name)
        context = RunContext(self._config, self.dir)
        missing = [name for name in self._heldout() if not (self.dir / name).exists()]
        if missing:
            write_heldout(self._config, self.dir, self._teacher(), context.seed, ignore_progress)
        if not (self.dir / TRAIN_FILE).exists():
            self._training_rows()
        if self._config.data.niah_share > 0 and not (self.dir / RETRIEVAL_FILE).exists():
            self._retrieval_rows(context.seed("retrieval"))
        self._loaded = None
        counts = [
            len(np.load(place / TRAIN_FILE, mmap_mode="r")) for place in (self._run, self.dir)
        ]
        return counts[0] - counts[1]

    def settings(self) -> str:
        """A digest of all that a student's figures depend on, but its map, its tokens and the order of its batches."""
        config, digest = self._config, hashlib.blake2b(digest_size=6)
        facts = {
            "teacher": self._run.read_json("teacher.json")["fingerprint"],
            "dtype": config.teacher.dtype,
            "distill": config.distill.model_dump(exclude={*BY_THE_WAY}),
            "full": config.student.full.model_dump(),
            "niah_share": config.data.niah_share,
            "probes": config.probes.model_dump(mode="json"),
            "tasks": config.harness.model_dump(mode="json"),
            "cost": config.cost.model_dump(),
            "seed": config.seed,
            "files": scored_inputs(config),
        }
        digest.update(json.dumps(facts, sort_keys=True).encode())
        for name in (SUPERNET_FILE, TRAIN_FILE, STARTS_FILE, RETRIEVAL_FILE, *self._heldout()):
            if (self.dir / name).exists():
                digest.update(hashlib.blake2b((self.dir / name).read_bytes()).digest())
        return digest.hexdigest()

    def epochs(self, tokens: int) -> float:
        """How often a student goes over the training text in so many tokens."""
        size = np.load(self.dir / TRAIN_FILE, mmap_mode="r").size
        return float(tokens * (1 - self._config.data.niah_share) / size)

    def payload(self) -> dict[str, Any]:
        """What a TrialWorker of this folder is built from."""
        config = self._config.model_dump(mode="json", by_alias=True)
        return {"config": config, "run_dir": str(self.dir.path)}

    def _freeze_texts(self) -> None:
        """Writes down what text the folder is for. Raises ConfigError where that was another."""
        data = self._config.data.model_dump(mode="json")
        wanted = {"data": data, "seed": self._config.seed}
        if not (self.dir / TEXTS_FILE).exists():
            self.dir.write_json(TEXTS_FILE, wanted)
        found = differences(self.dir.read_json(TEXTS_FILE), wanted)
        if found:
            field, (old, new) = next(iter(found.items()))
            raise ConfigError(
                f"{self.dir.path}: made for other text ({field}: {old!r} -> {new!r}); allowed: another folder"
            )

    def _heldout(self) -> list[str]:
        return [
            HELDOUT_FILE,
            *(heldout_file(text.label) for text in self._config.data.extra_heldout),
        ]

    def _same_heldout(self) -> list[str]:
        """Held-out files that are the run's own."""
        new, old = self._config.data, self._run.load_config().data
        same = []
        if (new.heldout, new.heldout_sequences, new.sequence_length) == (
            old.heldout,
            old.heldout_sequences,
            old.sequence_length,
        ):
            same.append(HELDOUT_FILE)
            same += [heldout_file(t.label) for t in new.extra_heldout if t in old.extra_heldout]
        return same

    def _training_rows(self) -> None:
        """Links the training text, or writes it without the rows that share a passage with held-out text."""
        text_NT = np.load(self._run / TRAIN_FILE, mmap_mode="r")
        shared: set[int] = set()
        for name in self._heldout():
            shared |= {row for row, _ in shared_rows(text_NT, np.load(self.dir / name))}
        kept = np.setdiff1d(np.arange(len(text_NT)), sorted(shared))
        if not len(kept):
            raise ConfigError(
                f"{self._run / TRAIN_FILE}: every row shares a passage with held-out text"
            )
        # The text last: where it is there, all is.
        for name in (STARTS_FILE, TRAIN_FILE):
            if not shared:
                self._link(name)
            elif (self._run / name).exists():
                self._write(name, np.load(self._run / name)[kept])

    def _retrieval_rows(self, seed: int) -> None:
        """The run's prompts, or as many to the rows of text as niah_share asks for."""
        if (self._run / RETRIEVAL_FILE).exists():
            self._link(RETRIEVAL_FILE)
            return
        share, probes = self._config.data.niah_share, self._config.probes
        count, length = np.load(self.dir / TRAIN_FILE, mmap_mode="r").shape
        rows = retrieval_rows(
            self._teacher().tokenizer,
            max(2, round(count * share / (1 - share)) if share < 1 else count),
            length,
            keys=probes.multi_keys,
            digits=probes.digits,
            seed=seed,
        )
        self._write(RETRIEVAL_FILE, rows)

    def _teacher(self) -> Teacher:
        if self._loaded is None:
            self._loaded = load_teacher(self._config.teacher)
        return self._loaded

    def _link(self, name: str) -> None:
        source, target = self._run / name, self.dir / name
        if source.exists() and not target.exists():
            # A link may point to where the run was before both were moved.
            target.unlink(missing_ok=True)
            os.symlink(os.path.relpath(source, target.parent), target)

    def _write(self, name: str, array: NDArray[Any]) -> None:
        with self.dir.replacing(name) as path, path.open("wb") as file:
            np.save(file, array)
