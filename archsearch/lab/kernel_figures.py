"""Every figure of the kernels that the lab book names, in one run on one GPU:

    python -m archsearch.lab.kernel_figures --figures runs/lab/kernels.json [--only SECTION ...]

Sections, in this order; each has a limit of time, and the file is written after each:
prepare_fla (goes with fla: fla-core's kernels compiled in processes of their own, in --fla-seconds at most), first_call (an
empty process and empty caches), accuracy, core and layer (our times), head_maps, long, memory, fla (all of fla-core's times
and the composition's), flashqla (where its packages are). No time is taken where accuracy failed. Times are those of eager
calls and of replays of CUDA graphs; ratios are of replays where both sides have them. --dry only says how long it may take.

What processes with empty caches (first_call, flashqla) have noted lies beside the figures, kernels.NAME.journal, from their first
note until its section is written: a run that is killed meanwhile, and a section that fails, leave it there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from archsearch_kernels.timing import require_gpu

from .kernel_book import Figures
from .kernel_core import Inaccurate, check_core, time_core, time_fla
from .kernel_layer import check_layer, time_composition, time_layer
from .kernel_limits import count_compilations, measure_memory, run_long
from .kernel_prepare import prepare
from .kernel_timing import limit

FIRST_CALL_SECONDS = 120.0
FLASHQLA_SECONDS = 300.0
MARGIN_SECONDS = 15.0
"""For processes that are ended."""
FLASHQLA_ANCHORS = {
    ("forward", 1, 32768): 0.38,
    ("backward", 1, 32768): 0.84,
    ("forward", 8, 4096): 0.29,
    ("backward", 8, 4096): 1.37,
}
"""ms on an H200: measured on 2026-11-30 at B 1, published at B 8. Taken where FlashQLA cannot run."""


@dataclass
class Run:
    """What the sections share: the file, a scratch folder, and how long fla-core may compile."""

    figures: Figures
    scratch: Path
    fla_seconds: float
    accurate: bool | None = None
    journals: list[Path] = field(default_factory=list)
    """Of processes with empty caches, until the figures that are made of them are written."""

    def write(self) -> None:
        """Writes the figures, which have what the journals have."""
        self.figures.write()
        while self.journals:
            self.journals.pop().unlink(missing_ok=True)

    def require_accuracy(self) -> None:
        """Checks once a run. Raises Inaccurate."""
        if self.accurate is None:
            self.accurate = False
            section, self.figures.section = self.figures.section, "accuracy"
            check_core(self.figures)
            check_layer(self.figures)
            self.accurate, self.figures.section = True, section
        if not self.accurate:
            raise Inaccurate("no times, since accuracy failed")

    def fresh(self, name: str, module: str, *arguments: str, seconds: float) -> dict[str, Any]:
        """What a process with empty caches of its own noted, in the journal of that name, before it ended or its time was up."""
        journal = self.figures.beside(f"{name}.journal")
        journal.parent.mkdir(parents=True, exist_ok=True)
        journal.unlink(missing_ok=True)
        self.journals.append(journal)
        folder = Path(tempfile.mkdtemp(dir=self.scratch))
        caches = ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", "TVM_CACHE_DIR", "CUDA_CACHE_PATH")
        environment = os.environ | {name: str(folder / name) for name in caches}
        environment["HOME"] = str(folder)
        command = [sys.executable, "-m", module, *arguments, "--to", str(journal.absolute())]
        try:
            subprocess.run(command, env=environment, timeout=seconds, check=False)
            ended = {}
        except subprocess.TimeoutExpired:
            ended = {"stopped_after_s": seconds}
        return (json.loads(journal.read_text()) if journal.exists() else {}) | ended


def prepare_fla(run: Run) -> None:
    """fla-core's kernels, compiled into Triton's cache, which `fla` reads; nothing else runs meanwhile."""
    if find_spec("fla") is None:
        run.figures.remark("fla-core is not installed")
        return
    facts = prepare(run.scratch, run.fla_seconds)
    metric = "fla-core's variants compiled beforehand, of all that its tuning tries"
    run.figures.add(metric, facts["compiled"], "variants", None, **facts)


def first_call(run: Run) -> None:
    """An empty process: a layer forward and backward, a second head map, another batch shape; the core alone likewise."""
    layer = run.fresh("layer", "archsearch.lab.kernel_layer", seconds=FIRST_CALL_SECONDS)
    module = "archsearch.lab.kernel_rivals"
    core = run.fresh("ours", module, "ours", seconds=FIRST_CALL_SECONDS)
    if "first_map_s" in layer:
        seconds = layer["first_map_s"] - layer["first_map_begins_s"]
        name = "first call of a layer, forward and backward, empty caches"
        run.figures.add(name, seconds, "s", "at most 20 s", journal=layer)
    else:
        run.figures.remark(f"the layer's first call did not end: {layer}")
    _second_map(run.figures, "ours", core)
    _second_map(run.figures, "ours, whole layer", layer)


def _second_map(figures: Figures, name: str, journal: dict[str, Any]) -> None:
    if "second_map_s" in journal:
        metric = f"process start to a second head map, caches empty, {name}"
        figures.add(metric, journal["second_map_s"], "s", "FlashQLA", journal=journal)
    else:
        figures.remark(f"no second head map, {name}: {journal}")


def accuracy(run: Run) -> None:
    """Errors against fp64."""
    run.require_accuracy()


def head_maps(run: Run) -> None:
    """Compilations over many head maps."""
    count_compilations(run.figures)


def long(run: Run) -> None:
    """A long sequence."""
    run_long(run.figures)


def core(run: Run) -> None:
    """Our times of the gated delta rule."""
    run.require_accuracy()
    time_core(run.figures)


def layer(run: Run) -> None:
    """Our times of the layer."""
    run.require_accuracy()
    time_layer(run.figures)


def memory(run: Run) -> None:
    """Our memory alone; `fla` measures it again beside the composition's."""
    measure_memory(run.figures, rivals=False)


def fla(run: Run) -> None:
    """fla-core's times and the composition's, and the composition's memory."""
    if find_spec("fla") is None:
        run.figures.remark("fla-core is not installed")
        return
    time_fla(run.figures)
    time_composition(run.figures)
    measure_memory(run.figures, rivals=True)


def flashqla(run: Run) -> None:
    """FlashQLA in an empty process, or the figures known of it."""
    missing = _missing_of_flashqla()
    journal: dict[str, Any] = {}
    if missing:
        run.figures.remark(f"FlashQLA did not run: no {', '.join(missing)}; figures are anchors")
    else:
        module, seconds = "archsearch.lab.kernel_rivals", FLASHQLA_SECONDS
        journal = run.fresh("flashqla", module, "flashqla", "--times", seconds=seconds)
        _second_map(run.figures, "FlashQLA", journal)
    for (direction, batch, tokens), anchor in FLASHQLA_ANCHORS.items():
        measured = journal.get(f"{direction}_ms B{batch} T{tokens}")
        run.figures.add(
            f"GDN {direction}, FlashQLA",
            anchor if measured is None else measured,
            "ms",
            None,
            batch=batch,
            tokens=tokens,
            heads=14,
            source="anchors" if measured is None else "measured in this run",
        )
        rival, own = f"GDN {direction}, FlashQLA", f"GDN {direction}, ours"
        run.figures.ratio(rival, own, batch, tokens, "at least 0.87 times")


def _missing_of_flashqla() -> list[str]:
    return [name for name in ("tilelang", "flash_qla", "fla") if find_spec(name) is None]


SECTIONS: dict[str, Callable[[Run], None]] = {
    "prepare_fla": prepare_fla,
    "first_call": first_call,
    "accuracy": accuracy,
    "core": core,
    "layer": layer,
    "head_maps": head_maps,
    "long": long,
    "memory": memory,
    "fla": fla,
    "flashqla": flashqla,
}
OWN_LIMIT = {"first_call": 2 * FIRST_CALL_SECONDS, "flashqla": FLASHQLA_SECONDS + 10}
"""Sections whose seconds do not follow from the command line; `fla` has twice --section-seconds, since it tunes six times."""


def limits(names: Sequence[str], section_seconds: float, fla_seconds: float) -> dict[str, float]:
    """The most seconds of each section."""
    own = {**OWN_LIMIT, "prepare_fla": fla_seconds + MARGIN_SECONDS, "fla": 2 * section_seconds}
    if _missing_of_flashqla():
        own.pop("flashqla")
    return {name: own.get(name, section_seconds) for name in names}


def run_sections(run: Run, names: Sequence[str], section_seconds: float) -> list[str]:
    """Runs them in order and writes the file after each; a failure is a remark. Returns those that failed."""
    failed = []
    for name, seconds in limits(names, section_seconds, run.fla_seconds).items():
        run.figures.section, started = name, time.monotonic()
        try:
            with limit(seconds):
                SECTIONS[name](run)
        except Exception as error:  # the other sections' figures are worth having
            traceback.print_exc()
            run.figures.section = name
            run.figures.remark(f"{type(error).__name__}: {error}"[:600])
            run.journals.clear()  # Nothing else has what they have: they stay.
            failed.append(name)
        print(f"[{name}] took {time.monotonic() - started:.1f} s", flush=True)
        run.write()
    return failed


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--figures", type=Path, required=True, metavar="FILE", help="rows of other sections stay"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=SECTIONS,
        default=list(SECTIONS),
        metavar="SECTION",
        help=f"all by default: {', '.join(SECTIONS)}",
    )
    parser.add_argument(
        "--fla-seconds", type=float, default=150.0, metavar="S", help="limit of prepare_fla (150)"
    )
    parser.add_argument(
        "--section-seconds",
        type=float,
        default=120.0,
        metavar="S",
        help="limit of each other section (120); fla has twice that, flashqla and first_call their own",
    )
    parser.add_argument("--dry", action="store_true", help="only say how long it may take")
    parser.add_argument("--commit", help="of the source tree, where git cannot tell")
    options = parser.parse_args()
    asked = {*options.only, *(["prepare_fla"] if "fla" in options.only else [])}
    names = [name for name in SECTIONS if name in asked]
    most = limits(names, options.section_seconds, options.fla_seconds)
    told = ", ".join(f"{name} {seconds:.0f}" for name, seconds in most.items())
    print(f"at most {sum(most.values()):.0f} s: {told}", flush=True)
    if options.dry:
        return
    require_gpu(parser)
    # fla-core must choose its variants here, with nothing beside it, and not read what its compiling processes chose.
    os.environ["FLA_CACHE_RESULTS"] = "0"
    with tempfile.TemporaryDirectory() as scratch:
        replaced = {*names, *(["accuracy"] if {"core", "layer"} & {*names} else [])}
        figures = Figures(options.figures, replaced, options.commit)
        run = Run(figures, Path(scratch), options.fla_seconds)
        failed = run_sections(run, names, options.section_seconds)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
