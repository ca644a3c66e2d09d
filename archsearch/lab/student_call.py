"""What scripts that train and compare students share: their options, their folder of texts, their workers."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..config import ExecutionConfig
from ..execution.base import Executor
from ..execution.choice import open_executor
from .bench_folder import BenchFolder
from .entry import add_overrides
from .selection_maps import METHODS
from .student_worker import StudentWorker


def add_students(parser: argparse.ArgumentParser, folder: str) -> None:
    """Which students, how long they may take, where their readings go. folder: what is used where none is given."""
    parser.add_argument("--folder", type=Path, help=f"{folder} where not given")
    parser.add_argument("--ledger", type=Path, help="FOLDER/readings.jsonl where not given")
    parser.add_argument("--only", nargs="+", choices=METHODS, help="selectors")
    parser.add_argument("--seconds", type=float, default=480.0, help="most in all")
    parser.add_argument("--workers", type=int, default=1, help="processes, spread over the GPUs")
    add_overrides(parser, "run's config")
    parser.add_argument("--dry-run", action="store_true", help="only says what it takes")
    parser.add_argument("--rate", type=float, default=200_000, help="training tokens a second")
    parser.add_argument("--figures", type=Path, metavar="FILE", help="JSON that they go to")


def prepare_payload(
    args: argparse.Namespace, folder: BenchFolder, tokens: int, started: float
) -> dict[str, Any]:
    """Makes the folder's files, says what was left out of the text, and returns what a StudentWorker is built from.

    tokens: the longest training; started: time.time() that --seconds count from.
    """
    left_out = folder.prepare()
    print(
        f"text: gone over {folder.epochs(tokens):.1f} times in {tokens:,} tokens; {left_out} rows left out that share a "
        "passage with held-out text",
        flush=True,
    )
    return folder.payload() | {
        "ledger": str(args.ledger or folder.dir / "readings.jsonl"),
        "settings": folder.settings(),
        "deadline": started + args.seconds,
        "workers": args.workers,
    }


def open_workers(args: argparse.Namespace, payload: Mapping[str, Any]) -> Executor:
    """One worker in this process, or several that share the GPUs that there are."""
    gpus = torch.cuda.device_count() if args.workers > 1 else 0
    execution = ExecutionConfig(
        executor="serial" if args.workers == 1 else "ray",
        workers=args.workers,
        gpus_per_worker=min(1.0, gpus / args.workers),
    )
    return open_executor(execution, StudentWorker, payload)
