"""The kernel figures' own arithmetic, records, limits of time and inputs; no kernel and no GPU is needed, but for the last."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from archsearch.lab import kernel_core, kernel_figures, kernel_graphs, kernel_layer, kernel_limits
from archsearch.lab.kernel_book import Figures
from archsearch.lab.kernel_core import too_large
from archsearch.lab.kernel_figures import Run, limits, run_sections
from archsearch.lab.kernel_layer import ours, with_remade_heads
from archsearch.lab.kernel_limits import random_maps
from archsearch.lab.kernel_rivals import RIVALS, Journal, draw_core
from archsearch.lab.kernel_timing import (
    OutOfTime,
    counted_compilations,
    floor_ms,
    limit,
    relative_errors,
    run_with_gradients,
    short_name,
    widened,
)
from archsearch_kernels.gdn import reference as gdn_reference
from archsearch_kernels.mixed import composition, reference
from archsearch_kernels.mixed.bench import FULL, draw_layer, gradients, plan_of


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(Figures(tmp_path / "kernels.json", ["one", "two", "three"]), tmp_path, 1.0)


def rows(run: Run) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run.scratch / "kernels.json").read_text())
    return found


def test_floors_are_those_of_arithmetic_or_memory() -> None:
    token_heads = 32768 * 14
    assert floor_ms(token_heads, "forward") == pytest.approx(0.111, abs=1e-3)
    assert floor_ms(token_heads, "backward") == pytest.approx(0.348, abs=1e-3)


def test_kernel_names_are_shortened() -> None:
    assert short_name("transform") == "transform"
    long = "void at::native::vectorized_elementwise_kernel<4, at::native::Add<float>>(int, float)"
    assert short_name(long) == "at::native::vectorized_elementwise_kernel"
    assert short_name("<lambda>") == "<lambda>"


def test_a_limit_stops_what_takes_too_long() -> None:
    with pytest.raises(OutOfTime, match="0 s"), limit(0.05):
        time.sleep(5)
    with limit(5):
        pass
    time.sleep(0.06)


def test_nan_is_an_infinite_error() -> None:
    right = {"a": torch.ones(3), "b": torch.ones(3), "none": torch.ones(0), "zero": torch.zeros(2)}
    found = {"a": torch.full((3,), 1.5), "b": torch.tensor([1, float("nan"), 1])}
    errors = relative_errors({**found, "zero": torch.full((2,), 3.0)}, right)
    assert errors == {"a": 0.5, "b": float("inf"), "zero": pytest.approx(18**0.5)}
    assert too_large({"q": 0.011, "A_log_H": 0.011, "k": float("inf")}, 0.01) == {
        "q": 0.011,
        "k": float("inf"),
    }


def test_gradients_by_name_and_in_fp64() -> None:
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    arguments = {"x": x, "scale": torch.tensor(2.0), "offset": 1}
    found = run_with_gradients(lambda x, scale, offset: scale * x * x + offset, arguments)
    assert found["out"].tolist() == [9, 19]
    assert set(found) == {"out", "x"}
    assert torch.equal(
        found["x"], run_with_gradients(lambda x, **_: 2 * x * x, {"x": x, "y": 0})["x"]
    )
    wide = widened(arguments)
    assert wide["x"].dtype == torch.float64
    assert (wide["x"].requires_grad, wide["scale"].requires_grad, wide["offset"]) == (
        True,
        False,
        1,
    )


def test_sections_are_written_one_by_one_and_fail_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, kept = [], run.scratch / "three.journal"

    def one(run: Run) -> None:
        run.figures.add("speed", 2.0, "ms", batch=1, tokens=8)

    def two(run: Run) -> None:
        seen.append(rows(run))
        time.sleep(5)

    def three(run: Run) -> None:
        seen.append(rows(run))
        kept.write_text("{}")
        run.journals.append(kept)
        raise ValueError("broken")

    monkeypatch.setattr(kernel_figures, "SECTIONS", {"one": one, "two": two, "three": three})
    assert run_sections(run, ["one", "two", "three"], 0.1) == ["two", "three"]
    assert [row["metric"] for row in seen[0]] == ["speed"]
    assert [row["section"] for row in seen[1]] == ["one", "two"]
    found = rows(run)
    assert "stopped after" in found[1]["text"]
    assert found[2]["text"] == "ValueError: broken"
    assert kept.exists()
    assert found[0].items() >= {"value": 2.0, "unit": "ms", "batch": 1, "section": "one"}.items()
    assert {"commit", "machine", "versions", "triton", "cudnn"} <= set(found[0])


def test_no_time_is_taken_where_accuracy_failed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(figures: Figures) -> None:
        raise kernel_figures.Inaccurate("wrong")

    timed: list[int] = []
    monkeypatch.setattr(kernel_figures, "check_core", check)
    monkeypatch.setattr(kernel_figures, "time_core", lambda figures: timed.append(1))
    monkeypatch.setattr(kernel_figures, "time_layer", lambda figures: timed.append(1))
    assert run_sections(run, ["core", "layer"], 5) == ["core", "layer"]
    assert not timed


def test_rows_of_other_sections_are_kept_and_compared(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    first = Figures(path, [])
    for section, metric, value in (("core", "ours", 2.0), ("fla", "theirs", 9.0)):
        first.section = section
        first.add(metric, value, "ms", batch=8, tokens=4, half_life_tokens=64.0)
    first.write()
    again = Figures(path, ["fla"], commit="abc")
    again.section = "fla"
    again.add("theirs", 6.0, "ms", batch=8, tokens=4)
    again.ratio("theirs", "ours", 8, 4, "at least 2 times")
    again.ratio("theirs", "ours", 1, 4, None)
    again.add("graphs", 5.0, "ms", batch=8, tokens=4, graph_ms=1.5)
    again.add("theirs", 7.0, "ms", batch=8, tokens=4, graph_ms=6.0)
    again.ratio("theirs", "graphs", 8, 4, None)
    again.write()
    found = json.loads(path.read_text())
    assert [(row["metric"], row["value"]) for row in found] == [
        ("ours", 2.0),
        ("theirs", 6.0),
        ("theirs over ours", 3.0),
        ("graphs", 5.0),
        ("theirs", 7.0),
        ("theirs over graphs", 4.0),
    ]
    assert (found[2]["by"], found[5]["by"]) == ("eager calls", "graph replays")
    assert found[5]["eager_times"] == pytest.approx(1.4)
    assert found[2]["half_life_tokens"] == 64.0
    assert found[2]["commit"] == "abc"


def test_a_fresh_process_has_its_own_caches_and_may_be_stopped(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def execute(command: list[str], *, env: dict[str, str], timeout: float, check: bool) -> None:
        assert Path(env["TRITON_CACHE_DIR"]).parent.parent == run.scratch
        assert not journal.exists(), "of an earlier run"
        Path(command[-1]).write_text(json.dumps({"first_map_s": 3.0}))
        raise subprocess.TimeoutExpired(command, timeout)

    journal = run.scratch / "kernels.core.journal"
    journal.write_text("{}")
    monkeypatch.setattr(subprocess, "run", execute)
    found = run.fresh("core", "module", "ours", seconds=4)
    assert found == {"first_map_s": 3.0, "stopped_after_s": 4}
    assert json.loads(journal.read_text()) == {"first_map_s": 3.0}, "until the figures are written"
    run.write()
    assert not journal.exists()


NOTES = """
import sys, time
from pathlib import Path
from archsearch.lab.kernel_rivals import Journal
journal = Journal(Path(sys.argv[-1]))
journal.note("first_map_s")
journal.note("forward_ms B1 T32768", 0.4)
time.sleep(600)
"""
KILLED = """
import sys, threading
from pathlib import Path
from archsearch.lab.kernel_book import Figures
from archsearch.lab.kernel_figures import Run
place = Path(sys.argv[1])
Run(Figures(place / "kernels.json", []), place, 1.0).fresh("flashqla", "notes", seconds=600)
"""


def test_a_run_that_is_killed_leaves_what_its_process_noted(tmp_path: Path) -> None:
    (tmp_path / "notes.py").write_text(NOTES)
    path = os.pathsep.join([str(tmp_path), *(os.path.abspath(entry) for entry in sys.path)])
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    whole = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": path}, start_new_session=True, cwd=tmp_path
    )
    journal, end = tmp_path / "kernels.flashqla.journal", time.monotonic() + 120
    try:
        while time.monotonic() < end and "forward_ms" not in (
            journal.read_text() if journal.exists() else ""
        ):
            time.sleep(0.2)
    finally:
        os.killpg(whole.pid, signal.SIGKILL)
        whole.wait()
    assert set(json.loads(journal.read_text())) == {"first_map_s", "forward_ms B1 T32768"}
    assert not (tmp_path / "kernels.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("archsearch.lab.kernel_figures", ["--figures", "F", "--only", "layer"]),
        ("archsearch.lab.kernel_layer", ["--to", "F"]),
        ("archsearch.lab.kernel_rivals", ["ours", "--to", "F"]),
        ("archsearch.lab.kernel_prepare", ["--share", "0", "--of", "2", "--to", "F"]),
        ("archsearch_kernels.gdn.bench", ["--to", "F"]),
        ("archsearch_kernels.prologue.bench", ["--to", "F", "--sweep"]),
        ("archsearch_kernels.fusion.bench", ["--to", "F"]),
        ("archsearch_kernels.mixed.bench", ["--ratio", "3:1"]),
    ],
)
def test_without_a_gpu_what_takes_times_says_so_in_a_line(
    module: str,
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if module.endswith("bench"):
        pytest.importorskip("triton")
    monkeypatch.chdir(tmp_path)
    main = importlib.import_module(module).main
    for given, status in ((options, 3), (["--help"], 0), (["--nothing"], 2)):
        monkeypatch.setattr("sys.argv", ["bench", *given])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == status
        said = capsys.readouterr()
        if status == 3:
            assert said.err == "bench: needs a CUDA device\n"
    assert not list(tmp_path.iterdir())


def test_a_section_s_limit_and_the_whole_run_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_figures, "find_spec", lambda name: None)
    assert limits(["core", "fla", "flashqla"], 10, 7) == {"core": 10, "fla": 20, "flashqla": 10}
    command = ["kernel_figures", "--figures", str(tmp_path / "x.json"), "--dry"]
    command += ["--section-seconds", "10", "--fla-seconds", "7", "--only", "fla", "core"]
    monkeypatch.setattr("sys.argv", command)
    kernel_figures.main()
    assert capsys.readouterr().out == "at most 52 s: prepare_fla 22, core 10, fla 20\n"
    assert not (tmp_path / "x.json").exists()


def test_flashqla_that_is_not_there_is_quoted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_figures, "find_spec", lambda name: None)
    run.figures.add("GDN forward, ours", 0.4, "ms", batch=1, tokens=32768, half_life_tokens=64.0)
    assert run_sections(run, ["flashqla", "fla"], 5) == []
    found = rows(run)
    assert "no tilelang, flash_qla, fla" in found[1]["text"]
    assert found[2]["source"] == "anchors"
    assert found[3]["value"] == pytest.approx(0.38 / 0.4)


def test_a_journal_leaves_out_what_was_measured_aside(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.json")
    journal.note("start")
    with journal.aside():
        time.sleep(0.3)
    journal.note("end")
    facts = json.loads((tmp_path / "journal.json").read_text())
    assert facts["end"] - facts["start"] < 0.2


def test_head_maps_differ() -> None:
    maps = random_maps(100)
    assert len(set(maps)) == 100
    assert maps[0] == FULL["7:1"]
    assert {len(full) for full in maps} >= {1, 8, 15}


def test_inputs_fit_what_they_are_for() -> None:
    core = draw_core(1, 5, heads=3, dim=16, dtype=torch.float32, device="cpu")
    assert gdn_reference.gdn_forward(**core)[0].shape == (1, 5, 3, 16)
    layer = draw_layer(1, 5, plan_of(FULL["3:1"], "cpu"), dim=16, dtype=torch.float32)
    found = gradients(partial(reference.mixed_heads, **layer), layer)
    assert all(x is not None for x in found)
    full = draw_layer(1, 5, plan_of(FULL["full"], "cpu"), dim=16, dtype=torch.float32)
    out = composition.mixed_heads(**full)
    torch.testing.assert_close(out, reference.mixed_heads(**full), rtol=1e-4, atol=1e-5)


def test_compilations_are_counted() -> None:
    knobs = pytest.importorskip("triton.knobs")
    with counted_compilations() as names:
        knobs.runtime.jit_post_compile_hook(fn=None, repr="kernel", key="", compile={})
    assert names == ["kernel"]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
def test_variants_of_the_layer_agree() -> None:
    arguments = draw_layer(1, 5, plan_of(FULL["7:1"], "cpu"), dim=16, dtype=torch.float32)
    expected = run_with_gradients(reference.mixed_heads, widened(arguments))
    for layer in (ours, with_remade_heads):
        errors = relative_errors(run_with_gradients(layer, arguments), expected)
        assert max(errors.values()) < 1e-4


class FakeReplay:
    """A graph's replay that makes the call again."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __call__(self) -> None:
        self._call()


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections over tiny inputs in Triton's interpreter, whose bf16 is wrong; a call takes 2 ms."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1")

    def median_ms(call: Any) -> float:
        call()
        return 1.0 if isinstance(call, FakeReplay) else 2.0

    monkeypatch.setattr(kernel_graphs, "median_ms", median_ms)
    monkeypatch.setattr(
        kernel_graphs, "capture", lambda make: SimpleNamespace(replay=FakeReplay(make()))
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for module in (kernel_core, kernel_layer, kernel_limits):
        monkeypatch.setattr(module, "SHAPES", ((1, 3), (2, 2)), raising=False)
        for name in ("plan_of", "draw_layer", "draw_core"):
            monkeypatch.setattr(module, name, CPU_INPUTS[name], raising=False)
        monkeypatch.setattr(module, "stages_ms", lambda call: {"kernel": 1.0}, raising=False)
        monkeypatch.setattr(module, "CHECKED", (1, 4), raising=False)
        monkeypatch.setattr(module, "peak_bytes", lambda call: 2**20, raising=False)
    monkeypatch.setattr(kernel_core, "BOUNDS", {torch.float32: 1e-3})
    for module in (kernel_layer, kernel_limits):
        monkeypatch.setattr(module, "VARIANTS", {"ours": ours})
    # Few linear heads: the interpreter takes a tenth of a second for each.
    monkeypatch.setattr(kernel_core, "HEADS", 2)
    for ratio, full in (("7:1", 15), ("3:1", 14)):
        monkeypatch.setitem(FULL, ratio, tuple(range(full)))
    monkeypatch.setattr(kernel_limits, "LONG_TOKENS", 5)
    monkeypatch.setattr(kernel_limits, "MAP_TOKENS", 3)
    monkeypatch.setattr(kernel_limits, "NUM_MAPS", 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


CPU_INPUTS = {
    "plan_of": partial(plan_of, device="cpu"),
    "draw_layer": partial(draw_layer, dim=16, dtype=torch.float32),
    "draw_core": lambda *shape, dtype=torch.float32: draw_core(
        *shape, dim=16, dtype=dtype, device="cpu"
    ),
}


@pytest.fixture
def rivals_on_cpu(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels stand in for fla-core's."""
    monkeypatch.setitem(RIVALS, "fla", RIVALS["ours"])
    for module in (kernel_core, kernel_layer):
        monkeypatch.setattr(module, "forget_tuning", lambda: 0)

    def delta_rule(*inputs: torch.Tensor) -> torch.Tensor:
        index = torch.arange(inputs[0].shape[2], dtype=torch.int32)
        return gdn_reference.gdn_forward(*inputs, index, index)[0]

    monkeypatch.setattr(composition, "by_fla", delta_rule)
    monkeypatch.setattr(kernel_figures, "find_spec", lambda name: name == "fla")
    goals = {**kernel_core.GOALS, ("forward", 2): 2.5, ("backward", 2): 2.0}
    monkeypatch.setattr(kernel_core, "GOALS", goals)
    layers = {**kernel_layer.GOALS, ("7:1", 2): 2.0, ("3:1", 2): 1.9}
    monkeypatch.setattr(kernel_layer, "GOALS", layers)


@pytest.mark.usefixtures("rivals_on_cpu")
def test_rivals_from_end_to_end(run: Run) -> None:
    for what in ("forward", "backward"):
        run.figures.add(f"GDN {what}, ours", 1.0, "ms", batch=2, tokens=2, half_life_tokens=9.0)
    run.figures.add("layer 3:1 forward and backward, ours", 0.5, "ms", batch=1, tokens=3)
    assert run_sections(run, ["fla"], 200) == []
    found = {row["metric"]: row for row in rows(run)}
    ratio = found["GDN backward, fla-core over GDN backward, ours"]
    assert (ratio["value"], ratio["half_life_tokens"], ratio["batch"]) == (2.0, 9.0, 2)
    assert ratio["compared_to"] == "at least 2.0 times"
    what = "layer 3:1 forward and backward"
    assert found[f"{what}, composition over {what}, ours"]["value"] == 4.0
    memory = found["layer 7:1, ours: peak memory of forward and backward"]
    assert memory["share_of_composition"] == 1.0


@pytest.mark.usefixtures("on_cpu")
def test_our_sections_from_end_to_end(run: Run) -> None:
    names = ["accuracy", "core", "layer", "head_maps", "long", "memory"]
    # The interpreter compiles nothing, and a count that saw no first compilation is worth nothing.
    assert run_sections(run, names, 200) == ["head_maps"]
    found = {row["metric"]: row for row in rows(run)}
    assert found["GDN backward, ours"]["stages_ms"] == {"kernel": 1.0}
    assert found["GDN backward, ours"]["graph_ms"] == 1.0
    assert found["GDN backward, ours"]["half_life_tokens"] == 65536.0
    assert found["layer 3:1 forward and backward, ours"]["value"] == 2.0
    assert found["tensors that are not finite, output and gradients"]["value"] == 0
    assert found["layer 7:1, ours: peak memory of forward and backward"]["value"] == 1.0
    slower = "all heads full attention forward and backward, cuDNN with torch ops"
    ratio = found[f"{slower} over layer 7:1 forward and backward, ours"]
    assert (ratio["value"], ratio["by"]) == (1.0, "graph replays")
