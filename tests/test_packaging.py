"""What the package must ship, and the names that it must not take."""

from __future__ import annotations

import subprocess
import sys
from importlib import resources
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_report_assets_ship() -> None:
    for name in ("page.css", "page.js"):
        assert resources.files("archsearch.report").joinpath(name).is_file()


def test_kernels_folder_does_not_hide_the_package_of_that_name() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    code = "import transformers, archsearch_kernels; transformers.PretrainedConfig"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT / "kernels", check=True)


def test_no_file_hides_triton() -> None:
    assert not [*ROOT.glob("archsearch/**/triton.py"), *ROOT.glob("kernels/**/triton.py")]


def test_commands_start_without_torch() -> None:
    code = "import archsearch.cli, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
