"""Compilation in shares, and what becomes of processes; fla-core is not needed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from archsearch.lab import kernel_prepare
from archsearch.lab.kernel_prepare import Share, compile_share, prepare


class FakeConfig:
    def __init__(self, warps: int) -> None:
        self.warps = warps

    def __str__(self) -> str:
        return f"{self.warps} warps"

    def all_kwargs(self) -> dict[str, int]:
        return {"num_warps": self.warps}


class FakeKernel:
    """A jitted function and, in its `fn`, what compiles it."""

    do_not_specialize = ("T",)

    def __init__(self) -> None:
        self.compiled: list[tuple[int, int]] = []

    def run(self, *args: Any, warmup: bool, num_warps: int, H: int, **options: Any) -> None:
        assert warmup
        self.compiled.append((H, num_warps))


class FakeTuner:
    arg_names = ("x", "T", "H")

    def __init__(self, kernel: FakeKernel) -> None:
        self.fn, self.base_fn, self.nargs = kernel, test_shares_are_disjoint_and_whole, None

    def prune_configs(self, options: dict[str, Any]) -> list[FakeConfig]:
        assert "warmup" in options
        return [FakeConfig(warps) for warps in (1, 2, 4)]


def test_shares_are_disjoint_and_whole() -> None:
    pytest.importorskip("triton")
    everything = []
    for number in range(2):
        kernel, share = FakeKernel(), Share(number, 2)
        for tokens, heads in ((32, 14), (64, 14), (64, 12)):
            share.run(FakeTuner(kernel), torch.ones(3), tokens, H=heads, warmup=False, grid=None)
        assert share.facts() == {"variants": 6, "compiled": 3, "impossible": 0}
        everything += kernel.compiled
    assert sorted(everything) == [(heads, warps) for heads in (12, 14) for warps in (1, 2, 4)]


def test_variants_that_do_not_compile_are_passed_over() -> None:
    errors = pytest.importorskip("triton.runtime.errors")

    class TooLarge(FakeKernel):
        def run(self, *args: Any, **options: Any) -> None:
            raise errors.OutOfResources(2, 1, "shared memory")

    share = Share(0, 1)
    share.run(FakeTuner(TooLarge()), torch.ones(3), 8, H=4, warmup=False)
    assert share.facts() == {"variants": 3, "compiled": 3, "impossible": 3}


def test_tuning_is_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    before, kernel = autotuner.run, FakeKernel()

    def call() -> None:
        autotuner.run(FakeTuner(kernel), torch.ones(3), 8, H=4, warmup=False)

    monkeypatch.setattr(kernel_prepare, "everything", lambda: [call])
    assert compile_share(0, 1).compiled == 3
    assert autotuner.run is before


def test_processes_report_or_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = []

    class FakeProcess:
        def __init__(self, command: list[str], env: dict[str, str]) -> None:
            options = dict(zip(command[3::2], command[4::2], strict=True))
            self.number, self.file = int(options["--share"]), Path(options["--to"])
            assert options["--of"] == "3"

        def wait(self, seconds: float | None = None) -> int:
            if self.number == 1 and seconds is not None:
                raise subprocess.TimeoutExpired("share", seconds)
            facts = {"variants": 30, "compiled": 10, "impossible": 0}
            if self.number == 0:
                self.file.write_text(json.dumps(facts))
            return 1 if self.number == 2 else 0

        def kill(self) -> None:
            killed.append(self.number)

    monkeypatch.setattr(subprocess, "Popen", FakeProcess)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(3)))
    found = prepare(tmp_path, 5.0)
    assert found.items() >= {"processes": 3, "variants": 30, "compiled": 10}.items()
    assert found["unfinished"] == {"share 1": "out of time", "share 2": "ended with 1"}
    assert killed == [0, 1, 2]
