"""README's calls of the kernels, as they stand, against the references; and what the packages offer by name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from archsearch_kernels.fusion import reference as fusion_reference
from archsearch_kernels.gdn import reference as gdn_reference
from archsearch_kernels.mixed import reference as mixed_reference
from archsearch_kernels.prologue import reference as prologue_reference

README = Path(__file__).parents[2] / "README.md"
PACKAGES = ("gdn", "prologue", "fusion", "mixed")

needs_triton = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available(),
    reason="needs a GPU or TRITON_INTERPRET=1",
)


def examples() -> list[str]:
    section = (
        README.read_text(encoding="utf-8").partition("\n## Kernels\n")[2].partition("\n## ")[0]
    )
    return re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)


def check(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    bound = 2e-2 if torch.cuda.is_available() else 1e-4  # bf16 or fp32, as the examples choose
    one, other = found.detach().double(), expected.detach().double()
    assert float((one - other).norm() / other.norm()) < bound


@needs_triton
def test_the_examples_compute_what_the_references_do() -> None:
    torch.manual_seed(0)
    x: dict[str, Any] = {}
    for example in examples():
        exec(example, x)
    assert all(x[leaf].grad.norm() > 0 for leaf in "qkvab")
    tiles, scalars = [x[name] for name in "qkvab"], (x["A_log"], x["dt_bias"])
    index = (x["q_index"], x["kv_index"])
    o, state = gdn_reference.gdn_forward(*tiles, *scalars, *index, output_final_state=True)
    assert state is not None
    check(x["o"], o)
    check(x["state"], state)
    tables = {"cos_BTD": x["cos"], "sin_BTD": x["sin"]}
    plan = x["plan_heads"](x["parts"], x["H"], x["G"], x["device"])
    expected = prologue_reference.prologue(x["q"], x["k"], plan, **x["norms"], **tables)
    found = (x["rotated_q"], x["rotated_k"], x["plain_q"])
    for one, other in zip(found, expected, strict=True):
        check(one, other)
    plan = x["plan_fusion"](x["heads"], x["device"])
    options = {"gamma_RD": x["gamma"], "gate_BTED": x["gate"]}
    check(x["fused"], fusion_reference.fusion(x["full"], x["o"], plan, **options))
    options = {"gamma_nD": x["gamma"], "gate_BTnD": x["gate"]}
    layer = (*tiles[:3], *x["gates"], x["plan"])
    check(x["mixed"], mixed_reference.mixed_heads(*layer, **x["norms"], **tables, **options))


def test_every_package_has_an_example_and_its_names() -> None:
    code = "\n".join(examples())
    for name in PACKAGES:
        package = import_module(f"archsearch_kernels.{name}")
        assert f"from archsearch_kernels.{name} import " in code
        assert package.__doc__
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = package.nothing


@pytest.mark.parametrize("name", PACKAGES)
def test_public_names_are_found_where_they_are_made(name: str) -> None:
    pytest.importorskip("triton")
    package = import_module(f"archsearch_kernels.{name}")
    for public in package.__all__:
        found = getattr(package, public)
        assert found.__module__.startswith(f"archsearch_kernels.{name}.")
        assert found.__name__ == public


def test_plans_need_no_triton_and_packages_no_torch() -> None:
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "from archsearch_kernels import fusion, gdn, mixed, prologue\n"
        "assert 'torch' not in sys.modules\n"
        "plan = mixed.plan_mixed([2], [0, 1, 3], 2, 'cpu')\n"
        "assert prologue.plan_heads and fusion.plan_fusion and plan.full == (2,)\n"
    )
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    environment = os.environ | {"PYTHONPATH": path}
    subprocess.run([sys.executable, "-P", "-c", code], env=environment, check=True)
