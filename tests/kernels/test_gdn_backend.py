"""Our Triton kernels as the backend of GDN heads: behind the table's call, and inside the heads' module."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from archsearch import kernel_proofs
from archsearch.attention import gdn_backends
from archsearch.attention.backends import INFERENCE, TRAINING, Operator, Situation
from archsearch.attention.cache import GatedDeltaState
from archsearch.attention.configuration_hydrahead import HydraHeadConfig
from archsearch.attention.dispatch import OPERATORS
from archsearch.attention.gdn import GatedDeltaHeads
from archsearch.attention.rotary import Rotary

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
CONFIG = HydraHeadConfig(
    hidden_size=32, num_attention_heads=3, num_key_value_heads=3, head_dim=16, qk_norm=True
)


@pytest.mark.parametrize("purpose", [TRAINING, INFERENCE])
def test_backend_agrees_with_the_reference(purpose: str) -> None:
    situation = Situation(DEVICE, torch.float32, 16, purpose)
    call, right = kernel_proofs.CASES["gdn"](situation)
    errors = kernel_proofs._errors(gdn_backends.run_triton, call, right, purpose == TRAINING)
    assert max(errors.values()) < kernel_proofs.TOLERANCE[torch.float32]


def test_heads_give_the_same_with_padding_and_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the torch path: outputs, the state after them, and every parameter's gradient."""
    torch.manual_seed(0)
    heads = GatedDeltaHeads(CONFIG, 3).to(DEVICE)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    x_BTC = torch.randn(2, 70, 32, device=DEVICE)
    valid_BT = torch.ones(2, 70, dtype=torch.bool, device=DEVICE)
    valid_BT[1, :9] = False
    rope = Rotary(CONFIG).tables(torch.arange(70, device=DEVICE)[None], x_BTC.dtype)
    table, results = OPERATORS["gdn"], []
    for name in ("torch", "triton"):
        # On the CPU the table would refuse it.
        only = replace(table.backend(name), cannot=lambda situation: None)
        monkeypatch.setitem(OPERATORS, "gdn", Operator("gdn", "GDN", "NO", (only,)))
        state = GatedDeltaState(torch.ones(2, 3, 16, 16, device=DEVICE))
        o_BTnD = heads(x_BTC, rope, valid_BT, state)
        weights = torch.linspace(-1, 1, o_BTnD.numel(), device=DEVICE).view_as(o_BTnD)
        assert state.memory_BnDD is not None
        loss = (o_BTnD * weights).sum() + state.memory_BnDD.square().sum()
        gradients = torch.autograd.grad(loss, list(heads.parameters()))
        results.append([o_BTnD, state.memory_BnDD, *gradients])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
