"""What doctor proves of backends: fakes that are right, wrong, broken, hang, die, and are asked for in vain."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from typer.testing import CliRunner

from archsearch import doctor, kernel_proofs, kernel_workers
from archsearch.attention.dispatch import OPERATORS
from archsearch.cli import app
from archsearch.config import ExecutionConfig, KernelsConfig, RunConfig, TeacherConfig
from archsearch.doctor import complaint, examine
from archsearch.errors import ConfigError
from archsearch.findings import Finding
from archsearch.kernel_report import WORKER, KernelReport, Scope, Target
from archsearch.kernel_workers import Answer, Workers
from tests import doctor_fakes

SECONDS = 6.0
"""Limit of a child's proof here; a fake that can end takes milliseconds."""
USES = "training, inference, step in fp32"

Fill = Callable[[str], None]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fill]:
    """Leaves one operator, served by these fakes, here and in the children."""
    before = dict(OPERATORS)

    def fill(names: str) -> None:
        monkeypatch.setenv(doctor_fakes.TABLE, names)
        OPERATORS.clear()
        OPERATORS["prologue"] = doctor_fakes.operator()

    yield fill
    OPERATORS.clear()
    OPERATORS.update(before)


class InProcess:
    """Answers in this process what children would."""

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work())
        return future

    def ask(self, job: dict[str, Any], seconds: float, name: str) -> Answer:
        found = kernel_proofs._answer(json.dumps(job))
        return Answer(found["result"], found["fault"])


def said(target: Target | None = None, **scope: Any) -> list[Finding]:
    """The lines on the fakes, answered in this process."""
    target = target or Target("cpu", 64, ("float32",))
    return list(KernelReport(target, Scope(**scope), InProcess()).findings(print))


def examined(*, waiting: Callable[[str], None] = print, **scope: Any) -> list[Finding]:
    """The lines on the fakes, answered by children."""
    found = examine(scope=Scope(**scope), waiting=waiting, command=doctor_fakes.COMMAND)
    return list(found)[len(doctor.CHECKS) :]


def is_gone(place: Path) -> bool:
    """Whether the process whose id lies there has ended, or ends now."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(int(place.read_text()))
        # A zombie waits for whoever has inherited it.
        psutil.wait_procs([process], 0 if process.status() == psutil.STATUS_ZOMBIE else 10)
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def test_what_is_chosen_is_proven_and_nothing_else(table: Fill) -> None:
    table("absent right off fails")
    choice, absent, right, off, fails = found = said()
    assert choice == Finding("fake", f"right: {USES}")
    assert absent == Finding("  absent", "not chosen: needs another machine", needed=False)
    assert right.text.startswith("chosen: agrees with the fp64 reference (fp32 forward ")
    assert all(f"fp32 {part} " in right.text for part in ("backward", "inference", "step"))
    for spare in (off, fails):
        assert spare.text == "not chosen: could serve, others come first (--all proves it)"
    assert not complaint(found)


def test_what_is_chosen_and_not_right_needs_attention(table: Fill) -> None:
    table("off right")
    found = said()
    assert complaint(found) == "needs attention: fake: off"
    assert "DIFFERS: fp32 forward; fp32 backward; fp32 inference; fp32 step (" in found[1].text


def test_what_no_run_goes_through_is_no_complaint() -> None:
    title = Finding("fake", "")
    late, wrong = (Finding("  one", "", "open"), Finding("  two", "", "WRONG", needed=False))
    assert complaint([title, wrong]) == ""
    assert complaint([title, wrong, late]) == "not done in time (see --seconds): fake: one"


def test_with_all_each_fault_is_its_own_backends(
    table: Fill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table("absent right hangs dies fails nan off spare")
    place = tmp_path / "pid"
    monkeypatch.setenv(doctor_fakes.LEFT_BEHIND, str(place))
    waited: list[str] = []
    lines = examined(every=True, seconds=SECONDS, waiting=waited.append)
    found = {finding.topic.strip(): finding for finding in lines}
    wrong = dict.fromkeys(("dies", "fails", "nan", "off"), "WRONG")
    assert {name: finding.verdict for name, finding in found.items()} == {
        **dict.fromkeys(("fake", "absent", "right", "spare"), "ok"),
        **wrong,
        "hangs": "open",
    }
    assert found["hangs"].text == f"not chosen: {USES} not proven in 6 s"
    died = "ended by SIGSEGV: LLVM ERROR: out of registers"
    assert found["dies"].text == f"not chosen: {USES} {died}"
    assert "DIFFERS: training in fp32 raised RuntimeError: no such kernel; " in found["fails"].text
    assert "and more" not in found["fails"].text
    assert "fp32 step nan" in found["nan"].text
    assert found["spare"].text.startswith("not chosen: agrees with the fp64 reference (")
    assert not complaint(lines)
    assert any("fake: hangs in fp32 (" in text for text in waited)
    assert is_gone(place)


def test_a_choice_that_hangs_is_given_up_and_nothing_is_proven(table: Fill) -> None:
    table("blocks right")
    assert examined(seconds=1.0) == [Finding("fake", "no choice in 1 s", "open")]


def test_a_named_backend_is_proven_alone_and_must_be_able_to_serve(table: Fill) -> None:
    table("absent right spare")
    _, spare = said(named=("spare",))
    assert spare.text.startswith("not chosen: agrees with the fp64 reference (")
    assert spare.needed
    found = said(named=("absent",))
    assert found[1] == Finding("  absent", "not chosen: needs another machine", "lacks")
    assert complaint(found) == "cannot serve here: fake: absent"
    with pytest.raises(ConfigError, match=r"--backend none: .* allowed: absent, right, spare"):
        next(examine(scope=Scope(named=("none",))))


def test_a_limit_may_be_infinite_but_not_nothing(
    table: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    table("right")
    # Many looks for an answer, each too short.
    monkeypatch.setattr(kernel_workers, "LONGEST_WAIT_SECONDS", 0.05)
    _, right = examined(seconds=float("inf"))
    assert right.text.startswith("chosen: agrees with the fp64 reference (")
    for seconds in (float("nan"), 0.0):
        with pytest.raises(ConfigError, match=rf"--seconds {seconds:g}: allowed: more than 0"):
            next(examine(scope=Scope(seconds=seconds)))


@pytest.mark.parametrize("name", list(OPERATORS))
def test_what_is_proven_is_not_compared_with_itself(name: str) -> None:
    uses = Target("cpu", 32, ("float32",)).uses(name)
    proof = kernel_proofs.prove(kernel_proofs.Job("prove", name, "cpu", 32, tuple(uses), "torch"))
    assert set(proof.errors) >= {"fp32 forward", "fp32 backward", "fp32 inference", "fp32 step"}
    assert all(1e-9 < error < 1e-5 for error in proof.errors.values())


def test_a_forced_backend_is_what_is_proven(table: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    table("absent right off")
    monkeypatch.setenv(doctor_fakes.VARIABLE, "off")
    choice, _, right, off = said()
    assert choice == Finding("fake", f"FAKE_BACKEND asks for off; off: {USES}")
    assert "could serve" in right.text
    assert off.verdict == "WRONG"


def test_a_wish_in_vain_is_wrong(table: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    table("absent right")
    monkeypatch.setenv(doctor_fakes.VARIABLE, "absent")
    choice, _, right = said()
    assert choice.verdict == "WRONG"
    assert choice.text.startswith("FAKE_BACKEND: absent was asked for, but cannot serve on cpu in ")
    assert "could serve" in right.text


def test_a_wish_for_nobody_is_an_error(table: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    table("absent right")
    monkeypatch.setenv(doctor_fakes.VARIABLE, "nobody")
    message = "FAKE_BACKEND: 'nobody' is not allowed; allowed: auto, absent, right"
    with pytest.raises(ConfigError, match=message):
        examined()


def test_a_wish_that_only_what_no_run_needs_is_denied_is_no_fault(
    table: Fill,
) -> None:
    table("half right")
    kernels = KernelsConfig.model_construct(prologue="half")
    dtypes = ("bfloat16", "float32")
    choice, half, _ = said(Target("cpu", 64, dtypes, kernels=kernels))
    assert choice.verdict == half.verdict == "ok"
    uses = "training, inference, step in bf16"
    assert choice.text.startswith(f"kernels.prologue asks for half; half: {uses}; kernels.prologue")
    assert "half was asked for, but cannot serve on cpu in float32" in choice.text
    needed = frozenset({("inference", "float32")})
    choice, *_ = said(Target("cpu", 64, dtypes, needed, kernels))
    assert choice.verdict == "WRONG"
    assert choice.text.startswith("kernels.prologue: half cannot serve on cpu in float32")


def test_children_end_with_a_doctor_that_is_interrupted(
    table: Fill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table("hangs")
    place = tmp_path / "pid"
    monkeypatch.setenv(doctor_fakes.LEFT_BEHIND, str(place))
    before = set(psutil.Process().children(recursive=True))  # other tests' Ray may still be here

    def interrupt(text: str) -> None:
        if place.exists() and place.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        examined(waiting=interrupt)
    assert is_gone(place)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_child_ends_with_its_parent() -> None:
    child = subprocess.Popen(WORKER, stdin=subprocess.PIPE, start_new_session=True)
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(60) == -signal.SIGKILL


def test_a_child_that_does_not_start_says_why() -> None:
    command = (sys.executable, "-c", "print('no', 'torch', file=__import__('sys').stderr); exit(3)")
    with Workers(command, 1) as workers:
        answer = workers.submit(lambda: workers.ask({}, 5, "a job")).result()
    assert answer.fault == "ended with status 3: no torch"


def config(**execution: Any) -> RunConfig:
    teacher = TeacherConfig(source="package:archsearch/assets/tiny/teacher")
    section = ExecutionConfig(**execution)
    return RunConfig(schema=1, name="it", teacher=teacher, execution=section)


def test_ray_is_wrong_only_where_the_run_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # so that its import raises
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    assert doctor._ray("Ray", None).verdict == "ok"
    assert doctor._ray("Ray", config(executor="serial")).verdict == "ok"
    with pytest.raises(ImportError):
        doctor._ray("Ray", config(executor="ray"))


def test_a_config_says_what_is_proven() -> None:
    target, (finding,) = doctor._target(config(executor="serial"))
    assert (target.device, target.head_dim, target.dtypes) == ("cpu", 32, ("float32",))
    assert finding.verdict == "ok"
    target, (finding,) = doctor._target(config(executor="serial", gpus_per_worker=64))
    assert target.head_dim == 32
    assert (finding.verdict, "64 GPUs" in finding.text) == ("WRONG", True)


def test_the_command_on_a_config_whose_wish_is_in_vain(run_config: Path) -> None:
    arguments = ["doctor", str(run_config), "--backend", "cudnn"]
    result = CliRunner().invoke(app, [*arguments, "--set", "kernels.full=cudnn"])
    assert result.exit_code == 3
    assert "WRONG full attention (F)   kernels.full: cudnn cannot serve on cpu in float32" in (
        result.output
    )
    assert "Gated DeltaNet" not in result.output
    last = result.output.splitlines()[-1]
    assert last.startswith("archsearch: doctor: needs attention: full attention (F)")


def test_the_worst_error_counts_and_nan_is_the_worst() -> None:
    ones = torch.ones(4)
    worst = kernel_proofs._worst([ones, ones * 1.5], [ones, ones])
    assert worst == pytest.approx(0.5)
    assert not kernel_proofs._worst([ones * float("nan"), ones], [ones, ones]) <= 1
