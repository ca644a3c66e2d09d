"""Who computes full-attention heads: cuDNN, flash-attn, the kernels of torch's SDPA, its plain math. dispatch.py has their order.

Shapes: B batch, T new tokens, S cached plus new tokens, n query heads, m KV heads (n a multiple of m), D head_dim.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .backends import HALF, STEP, TRAINING, Situation, purpose_of

logger = logging.getLogger(__name__)

FLASH_PACKAGES = (
    ("flash_attn_interface", (9,)),
    ("flash_attn.cute", (9, 10, 11)),
    ("flash_attn", (8, 9, 10, 12)),
)
"""Modules of flash-attn 3, 4 and 2, and the major compute capabilities that each is taken for."""
FLASH_DIM = 256


class AttentionCall(NamedTuple):
    """The arguments of dispatch.attend, which says what they are."""

    q_BnTD: Tensor
    k_BmSD: Tensor
    v_BmSD: Tensor
    pairs_B1TS: Tensor | None

    @property
    def causal(self) -> bool:
        """Whether queries see no later keys: then T = S. One new token sees everything."""
        return self.pairs_B1TS is None and self.q_BnTD.shape[2] > 1

    def situation(self) -> Situation:
        """What the choice depends on."""
        (batch, heads, tokens, dim), (_, kv_heads, seen, _) = self.q_BnTD.shape, self.k_BmSD.shape
        return Situation(
            self.q_BnTD.device,
            self.q_BnTD.dtype,
            dim,
            purpose_of(self[:3], tokens),
            masked=self.pairs_B1TS is not None,
            shape=tuple(
                x.bit_length() for x in (batch * heads, tokens, seen, heads // max(kv_heads, 1))
            ),
        )


def run_cudnn(call: AttentionCall) -> Tensor:
    """SDPA's cuDNN kernels, asked for by name."""
    return _with_kernels(call, (SDPBackend.CUDNN_ATTENTION,))


def run_sdpa(call: AttentionCall) -> Tensor:
    """SDPA with its fused kernels; on the CPU with whatever it takes itself."""
    if not call.q_BnTD.is_cuda:
        return _sdpa(call)
    if call.pairs_B1TS is not None or call.q_BnTD.dtype not in HALF:
        # The memory-efficient kernel, which has no grouped mode, is the only one for masks and fp32.
        heads = call.q_BnTD.shape[1]
        call = call._replace(k_BmSD=_spread(call.k_BmSD, heads), v_BmSD=_spread(call.v_BmSD, heads))
    return _with_kernels(call, (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION))


def run_torch(call: AttentionCall) -> Tensor:
    """SDPA's plain products and softmax."""
    with sdpa_kernel([SDPBackend.MATH]):
        return _sdpa(call)


def _spread(x_BmSD: Tensor, heads: int) -> Tensor:
    """KV heads repeated for each of their readers."""
    return x_BmSD.repeat_interleave(heads // x_BmSD.shape[1], dim=1)


def _sdpa(call: AttentionCall) -> Tensor:
    q, k, v, pairs = call
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=pairs, is_causal=call.causal, enable_gqa=k.shape[1] < q.shape[1]
    )


def _with_kernels(call: AttentionCall, kernels: tuple[SDPBackend, ...]) -> Tensor:
    """SDPA with these kernels in this order; with any that can, and a warning, where none of them takes the call."""
    try:
        with sdpa_kernel(list(kernels), set_priority=True):
            return _sdpa(call)
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
    _warn_of(tuple(call.q_BnTD.shape), tuple(call.k_BmSD.shape), kernels)
    return _sdpa(call)


@cache
def _warn_of(q: tuple[int, ...], k: tuple[int, ...], kernels: tuple[SDPBackend, ...]) -> None:
    names = ", ".join(kernel.name.lower() for kernel in kernels)
    logger.warning("full: no kernel among %s takes q %s and k %s; SDPA chooses", names, q, k)


def run_flash_attn(call: AttentionCall) -> Tensor:
    """flash-attn, of the newest version that fits the GPU."""
    q, k, v, _ = call
    module = _flash_attn(torch.cuda.get_device_capability(q.device)[0])
    inputs = (x.transpose(1, 2) for x in (q, k, v))
    found = module.flash_attn_func(*inputs, softmax_scale=q.shape[-1] ** -0.5, causal=call.causal)
    # Version 4, and some builds of 3, return the log-sum-exp too.
    output: Tensor = found[0] if isinstance(found, tuple) else found
    return output.transpose(1, 2)


def cudnn_cannot(situation: Situation) -> str | None:
    """Why cuDNN can't serve: it says so itself."""
    if situation.device.type != "cuda":
        return "needs a CUDA device"
    if situation.capability[0] < 9:
        return "is asked for on Hopper and later only, before which SDPA's own choice is as fast"
    # Another dtype is left to others, so that what torch lacks is asked of one that cuDNN takes.
    dtype = situation.dtype if situation.dtype in HALF else torch.bfloat16
    return _sdpa_lacks(replace(situation, dtype=dtype), "cudnn")


def cudnn_leaves(situation: Situation) -> str | None:
    """cuDNN takes half precision alone; it makes a plan for each length, and a step's is never seen again."""
    if situation.purpose == STEP:
        return "would make a new plan for every token of a decode"
    return _no_full_precision(situation)


def sdpa_cannot(situation: Situation) -> str | None:
    """Why SDPA has no fused kernel."""
    if situation.device.type != "cuda":
        return None
    if _sdpa_lacks(situation, "flash") is None or _sdpa_lacks(situation, "efficient") is None:
        return None
    return _sdpa_lacks(situation, "efficient")


def flash_attn_cannot(situation: Situation) -> str | None:
    """Why flash-attn can't serve."""
    if situation.device.type != "cuda":
        return "needs a CUDA device"
    if situation.head_dim % 8 or situation.head_dim > FLASH_DIM:
        return f"takes head_dim up to {FLASH_DIM}, multiples of 8"
    found = _flash_attn(situation.capability[0])
    return found if isinstance(found, str) else None


def flash_attn_leaves(situation: Situation) -> str | None:
    """flash-attn takes half precision alone, and knows causality alone."""
    if situation.masked:
        return "takes no mask, as padding makes one"
    return _no_full_precision(situation)


def _no_full_precision(situation: Situation) -> str | None:
    return None if situation.dtype in HALF else "takes bfloat16 and float16 only"


CHECKS = {
    "cudnn": (can_use_cudnn_attention, True),
    "flash": (can_use_flash_attention, True),
    "efficient": (can_use_efficient_attention, False),
}
"""How torch says whether an SDPA kernel can serve, and whether it has a grouped mode."""


def _sdpa_lacks(situation: Situation, kernel: str) -> str | None:
    """Why torch says that an SDPA kernel can't serve; asked of small tensors of the same kind."""
    return _asked(replace(situation, shape=()), kernel)


@cache
def _asked(situation: Situation, kernel: str) -> str | None:
    check, grouped = CHECKS[kernel]
    trains = situation.purpose == TRAINING
    options: dict[str, Any] = {"device": situation.device, "dtype": situation.dtype}
    with torch.inference_mode(False):
        q, k, v = (
            torch.empty(1, heads, 64, situation.head_dim, **options).requires_grad_(trains)
            for heads in ((2, 1, 1) if grouped else (2, 2, 2))
        )
        pairs = None
        if situation.masked:
            pairs = torch.ones(1, 1, 64, 64, dtype=torch.bool, device=situation.device)
        parameters = SDPAParams(q, k, v, pairs, 0.0, pairs is None, grouped)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if check(parameters, debug=True):
                return None
    words = [str(warning.message).partition(" (Triggered")[0] for warning in said]
    return "; ".join(words) or f"torch offers no {kernel} kernel here"


@cache
def _flash_attn(major: int) -> Any:
    """The module of flash-attn for a GPU's major compute capability, or the reason why there is none."""
    reasons = []
    for name, majors in FLASH_PACKAGES:
        if major not in majors:
            continue
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        except Exception as error:  # a broken build raises anything at import
            reasons.append(f"{name} fails to import ({type(error).__name__}: {error})")
            continue
        # flash-attn 4 alone makes `flash_attn` a folder without anything in it.
        if hasattr(module, "flash_attn_func"):
            return module
    return "; ".join(reasons) or "flash-attn is not installed for this GPU"
