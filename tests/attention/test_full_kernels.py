"""Full-attention heads with every switch, our kernels around them against torch ops: outputs, cache and gradients.

On a machine without a GPU: TRITON_INTERPRET=1 python -m pytest tests/attention/test_full_kernels.py, with triton installed.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from archsearch.attention.backends import Operator
from archsearch.attention.cache import KeyValueStore
from archsearch.attention.configuration_hydrahead import HydraHeadConfig
from archsearch.attention.dispatch import OPERATORS
from archsearch.attention.full import FullHeads, build_mask
from archsearch.attention.positions import LOG_SCALES, full_positions
from archsearch.attention.rotary import Rotary

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
AROUND = ("prologue", "fusion")
TOKENS, PADDING = 21, 5


def heads_of(fa: dict[str, Any], *, qk_norm: bool, dtype: torch.dtype) -> FullHeads:
    config = HydraHeadConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        qk_norm=qk_norm,
        fa=fa,
    )
    torch.manual_seed(0)
    heads = FullHeads(config, (0, 1, 2)).to(DEVICE)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return heads.to(dtype)


def run(heads: FullHeads) -> list[Tensor]:
    """Output and cached keys on a padded batch, then the gradients of input and parameters."""
    generator = torch.Generator().manual_seed(1)
    dtype = heads.q_proj.weight.dtype
    x_BTC = torch.randn(2, TOKENS, 32, generator=generator).to(DEVICE, dtype).requires_grad_()
    attended = torch.ones(2, TOKENS, dtype=torch.long, device=DEVICE)
    attended[1, :PADDING] = 0
    positions_BT = (attended.cumsum(-1) - 1).clamp_min(0)
    rotary, store = Rotary(heads.config), KeyValueStore()
    output = heads(
        x_BTC,
        rotary.tables(positions_BT, dtype),
        build_mask(attended, TOKENS, 0, DEVICE),
        store,
        own_positions=full_positions(rotary, positions_BT, dtype, training=True),
    )
    weights = torch.randn(output.shape, generator=generator).to(DEVICE)
    gradients = torch.autograd.grad((output * weights).sum(), [x_BTC, *heads.parameters()])
    return [output, *store.before(0, TOKENS), *gradients]


def error_of(x: Tensor, right: Tensor) -> float:
    right = right.detach().double()
    return float((x.detach().double() - right).norm() / right.norm().clamp_min(1e-12))


def force(patch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Has that backend compute what is around the heads, torch the rest; returns the list in which calls are noted."""
    calls: list[str] = []
    for key, operator in list(OPERATORS.items()):
        backend = operator.backend(name if key in AROUND else "torch")

        def noted(call: Any, key: str = key, inner: Any = backend.run) -> Any:
            calls.append(key)
            return inner(call)

        # On the CPU the table would refuse our kernels.
        able = replace(backend, run=noted, cannot=lambda situation: None)
        patch.setitem(OPERATORS, key, Operator(key, key, "NO", (able,)))
    return calls


@pytest.mark.parametrize(
    ("qk_norm", "dtype"), [(True, torch.float32), (False, torch.float32), (True, torch.bfloat16)]
)
@pytest.mark.parametrize(("norm", "gate"), list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("form", [None, *LOG_SCALES])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_our_kernels_equal_torch(
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    form: str | None,
    norm: bool,
    gate: bool,
    qk_norm: bool,
    dtype: torch.dtype,
) -> None:
    fa = {"rope_share": share, "norm": norm, "gate": gate, "log_scale": form is not None}
    fa |= {"log_scale_form": form or "shifted", "log_scale_tokens": 8}
    heads, found = heads_of(fa, qk_norm=qk_norm, dtype=dtype), {}
    for name in ("torch", "triton"):
        with monkeypatch.context() as patch:
            calls = force(patch, name)
            found[name] = run(heads)
        assert calls.count("prologue") == int(qk_norm or share > 0 or form is not None)
        assert calls.count("fusion") == int(norm or gate)
    if dtype == torch.float32:
        errors = [error_of(*pair) for pair in zip(found["triton"], found["torch"], strict=True)]
        assert max(errors) < 1e-4
        return
    exact = run(heads.float())
    # Triton's interpreter cuts off where a GPU rounds, which doubles errors in bf16 and more.
    slack = 2.5 if DEVICE.type == "cpu" else 1.2
    for ours, theirs, right in zip(found["triton"], found["torch"], exact, strict=True):
        assert ours.dtype == theirs.dtype
        assert error_of(ours, right) < slack * error_of(theirs, right) + 2e-3
