"""The entry point: `python -m archsearch`, and Ctrl-C while modules are imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

INTERRUPTED_IMPORT = """\
import os, signal, sys

# A process that was started in the background has it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

class Interrupts:
    def find_spec(self, name, path, target=None):
        if name != {module!r}:
            return
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt as error:
            raise {raised} from error

sys.meta_path.insert(0, Interrupts())
sys.argv = ["archsearch", "validate", "search_spaces/tiny.yaml"]
from archsearch.__main__ import main
main()
"""


def test_python_m_archsearch_is_the_command() -> None:
    command = [sys.executable, "-m", "archsearch", "validate", "nowhere.yaml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("archsearch: nowhere.yaml: cannot read the config")


@pytest.mark.parametrize(
    ("module", "raised"),
    [
        ("typer", "error"),
        ("yaml", "error"),
        ("archsearch.models.kernels", "error"),
        ("archsearch.models.kernels", "ModuleNotFoundError('what transformers makes of it')"),
    ],
)
def test_an_interrupt_during_an_import_is_one_line(module: str, raised: str) -> None:
    code = INTERRUPTED_IMPORT.format(module=module, raised=raised)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 130, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("archsearch: interrupted; ")
