"""Who serves what on GPUs that this machine need not have, and why others do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from archsearch.attention import (
    backends,
    full_backends,
    fusion_backends,
    gdn_backends,
    prologue_backends,
    requirements,
)
from archsearch.attention.backends import INFERENCE, STEP, TRAINING, Operator, Situation
from archsearch.attention.dispatch import OPERATORS

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Gpu:
    """A machine with one GPU and every package, of which a test takes some away."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        self.has(capability=(9, 0), triton="3.7.1", kernels=object(), fla=object(), qla=object())

    def has(self, **parts: Any) -> None:
        places: dict[str, Any] = {
            "capability": ("_capability", backends),
            "triton": ("triton_version", requirements, gdn_backends),
            "kernels": ("_kernels", gdn_backends, prologue_backends, fusion_backends),
            "fla": ("_fla", gdn_backends),
            "qla": ("_flashqla", gdn_backends),
            "flash": ("_flash_attn", full_backends),
            "sdpa": ("_sdpa_lacks", full_backends),
        }
        for part, value in parts.items():
            name, *modules = places[part]
            for module in modules:
                self.patch.setattr(module, name, lambda *_, value=value: value)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def served_by(name: str, situation: Situation) -> str:
    """Of a fresh table: the real one keeps what it chose."""
    operator = OPERATORS[name]
    return Operator(name, operator.title, "HYDRAHEAD_NO", operator.backends).choose(situation).name


def test_order_of_gated_delta_backends(gpu: Gpu) -> None:
    train = Situation(CUDA, torch.bfloat16, 128, TRAINING)
    assert served_by("gdn", train) == "triton"
    assert served_by("gdn", replace(train, dtype=torch.float32)) == "triton"
    assert served_by("gdn", replace(train, dtype=torch.float16)) == "flashqla"
    assert served_by("gdn", replace(train, purpose=STEP)) == "fla"
    gpu.has(kernels="archsearch_kernels is not installed")
    assert served_by("gdn", train) == "flashqla"
    assert served_by("gdn", replace(train, head_dim=64)) == "fla"
    gpu.has(qla="flash-qla is not installed")
    assert served_by("gdn", train) == "fla"
    gpu.has(triton="3.6.0")
    assert served_by("gdn", train) == "torch", "miscompiled on Hopper"
    assert served_by("gdn", replace(train, purpose=INFERENCE)) == "fla"


@pytest.mark.parametrize(
    ("backend", "machine", "change", "reason"),
    [
        ("triton", {"triton": None}, {}, "Triton is not installed"),
        ("triton", {"triton": "3.5.1"}, {}, "needs Triton 3.6 or newer, this is 3.5.1"),
        ("triton", {}, {"head_dim": 96}, "takes head_dim 16, 32, 64, 128, 256"),
        ("triton", {}, {"dtype": torch.float16}, "takes bfloat16 and float32 only"),
        ("triton", {"capability": (7, 5)}, {}, "needs compute capability 8.0 or newer"),
        ("triton", {"kernels": "not there"}, {}, "not there"),
        ("triton", {}, {"purpose": STEP}, "has no kernel for single tokens"),
        ("flashqla", {"capability": (8, 0)}, {}, "Hopper generation or newer"),
        ("flashqla", {"capability": (12, 0)}, {}, "without a backward pass"),
        ("fla", {}, {"head_dim": 512}, "takes head_dim up to 256"),
        ("fla", {"triton": "3.7.0"}, {}, "Triton 3.7.0 miscompiles its backward pass on Hopper"),
        ("fla", {"fla": "fla-core is not installed"}, {}, "fla-core is not installed"),
    ],
)
def test_reasons_of_gated_delta_backends(
    gpu: Gpu, backend: str, machine: dict[str, Any], change: dict[str, Any], reason: str
) -> None:
    gpu.has(**machine)
    situation = replace(Situation(CUDA, torch.bfloat16, 128, TRAINING), **change)
    assert reason in str(OPERATORS["gdn"].refusal(backend, situation))


@pytest.mark.parametrize("name", ["prologue", "fusion"])
def test_who_computes_what_is_around_the_heads(gpu: Gpu, name: str) -> None:
    train = Situation(CUDA, torch.bfloat16, 128, TRAINING)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert served_by(name, replace(train, dtype=dtype)) == "triton"
    assert served_by(name, replace(train, purpose=STEP)) == "torch"
    for wrong, reason in (
        ({"dtype": torch.float64}, "takes bfloat16 and float16 and float32 only"),
        ({"head_dim": 96}, "takes head_dim 16, 32, 64, 128, 256"),
        ({"device": CPU}, "needs a CUDA device"),
    ):
        assert reason in str(OPERATORS[name].refusal("triton", replace(train, **wrong)))
        assert served_by(name, replace(train, **wrong)) == "torch"
    gpu.has(kernels="archsearch_kernels is not installed")
    assert served_by(name, train) == "torch"


def test_order_of_full_attention_backends(gpu: Gpu) -> None:
    gpu.has(sdpa=None, flash="flash-attn is not installed for this GPU")
    train = Situation(CUDA, torch.bfloat16, 128, TRAINING)
    assert served_by("full", train) == "cudnn"
    assert served_by("full", replace(train, purpose=STEP)) == "sdpa"
    gpu.has(flash=object())
    assert served_by("full", replace(train, purpose=STEP)) == "flash_attn"
    assert served_by("full", replace(train, purpose=STEP, masked=True)) == "sdpa"
    gpu.has(capability=(8, 0))
    assert served_by("full", train) == "flash_attn"
    gpu.has(sdpa="takes no such thing")
    assert served_by("full", replace(train, masked=True)) == "torch"
    assert "takes no such thing" in str(OPERATORS["full"].refusal("sdpa", train))
    wide = replace(train, head_dim=260)
    assert "multiples of 8" in str(OPERATORS["full"].refusal("flash_attn", wide))


@pytest.mark.parametrize("name", ["cudnn", "flash_attn"])
def test_full_precision_goes_past_a_forced_backend_of_half_precision(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def lacks(situation: Situation, kernel: str) -> str | None:
        wrong = kernel == "cudnn" and situation.dtype == torch.float32
        return "no fp32" if wrong else None

    gpu.has(flash=object())
    monkeypatch.setattr(full_backends, "_sdpa_lacks", lacks)
    full = OPERATORS["full"]
    operator = Operator("full", full.title, "HYDRAHEAD_NO", full.backends)
    operator.force(name, "kernels.full")
    half = Situation(CUDA, torch.bfloat16, 128, INFERENCE)
    assert operator.choose(half).name == name
    for purpose in (INFERENCE, TRAINING):
        single = replace(half, dtype=torch.float32, purpose=purpose)
        assert operator.choose(single).name == "sdpa"
        assert operator.refusal(name, single) == "takes bfloat16 and float16 only"
