"""The table of operators: for each, its backends in order of preference. The model's heads call it, doctor proves it.

Shapes: B batch, T new tokens, S cached plus new tokens, H query heads, G heads of k and v, n heads that run, m KV heads,
F full-attention heads, N sequences, D head_dim.
"""

from __future__ import annotations

from torch import Tensor

from . import full_backends as full
from . import fusion_backends as fusion
from . import gdn_backends as gdn
from . import prologue_backends as prologue
from .backends import Backend, Operator, Situation, never, working_dtype
from .full_backends import AttentionCall
from .fusion import HeadIndex, LinearHeads, RMSNorm
from .fusion_backends import FusionCall
from .gdn_backends import GatedDeltaCall
from .prologue_backends import PrologueCall
from .requirements import leaves_steps
from .rotary import PositionEmbeddings

OPERATORS: dict[str, Operator] = {
    "gdn": Operator(
        "gdn",
        "Gated DeltaNet (G)",
        "HYDRAHEAD_GDN_BACKEND",
        (
            Backend("triton", gdn.run_triton, gdn.triton_cannot, gdn.no_steps),
            Backend("flashqla", gdn.run_flashqla, gdn.flashqla_cannot, gdn.no_steps),
            Backend("fla", gdn.run_fla, gdn.fla_cannot),
            Backend("torch", gdn.run_torch, never, is_slow=True),
        ),
    ),
    "full": Operator(
        "full",
        "full attention (F)",
        "HYDRAHEAD_FULL_BACKEND",
        (
            Backend("cudnn", full.run_cudnn, full.cudnn_cannot, full.cudnn_leaves),
            Backend(
                "flash_attn", full.run_flash_attn, full.flash_attn_cannot, full.flash_attn_leaves
            ),
            Backend("sdpa", full.run_sdpa, full.sdpa_cannot),
            Backend("torch", full.run_torch, never, is_slow=True),
        ),
        rivals=("cudnn", "flash_attn"),
    ),
    "prologue": Operator(
        "prologue",
        "q/k norm and RoPE",
        "HYDRAHEAD_PROLOGUE_BACKEND",
        (
            Backend("triton", prologue.run_triton, prologue.triton_cannot, leaves_steps),
            Backend("torch", prologue.run_torch, never, is_slow=True),
        ),
    ),
    "fusion": Operator(
        "fusion",
        "fusion of heads",
        "HYDRAHEAD_FUSION_BACKEND",
        (
            Backend("triton", fusion.run_triton, fusion.triton_cannot, leaves_steps),
            Backend("torch", fusion.run_torch, never, is_slow=True),
        ),
    ),
}


def set_backend(operator: str, name: str, asked_by: str = "set_backend") -> None:
    """Forces who computes an operator (gdn, full, prologue, fusion) in this process; `auto` goes back to the environment's wish.

    asked_by is named in errors. Raises ValueError for an operator or backend that there is not.
    """
    if operator not in OPERATORS:
        raise ValueError(f"operator {operator!r}; allowed: {', '.join(OPERATORS)}")
    OPERATORS[operator].force(name, asked_by)


def gated_delta_net(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    a_BTH: Tensor,
    b_BTH: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    q_index_n: Tensor | None = None,
    kv_index_n: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Outputs [B, T, n, D] of the gated delta rule in q's dtype, and final states [N, n, D, D] in fp32 if asked for.

    q and k are taken before their L2 norm, a and b before their activations: g = -exp(A_log) softplus(a + dt_bias),
    beta = sigmoid(b). A token with a = b = -inf leaves the state alone. q_index and kv_index (int32) name the heads that
    run and whose k and v they read; without them all H = G heads do. cu_seqlens: bounds of N sequences packed into one
    row; N = B without it. Raises BackendRefusal where a backend is forced that can't serve.
    """
    dtype = working_dtype(v_BTGD)
    call = GatedDeltaCall(
        q_BTHD.to(dtype),
        k_BTGD.to(dtype),
        v_BTGD.to(dtype),
        a_BTH,
        b_BTH,
        A_log_H,
        dt_bias_H,
        q_index_n,
        kv_index_n,
        initial_state,
        cu_seqlens,
        output_final_state,
    )
    situation = Situation(q_BTHD.device, dtype, q_BTHD.shape[-1], call.purpose())
    result: tuple[Tensor, Tensor | None] = OPERATORS["gdn"].choose(situation).run(call)
    return result


def attend(
    q_BnTD: Tensor, k_BmSD: Tensor, v_BmSD: Tensor, pairs_B1TS: Tensor | None = None
) -> Tensor:
    """Softmax attention [B, n, T, D] of n query heads over m KV heads, n a multiple of m: head i reads i * m // n.

    pairs_B1TS: which key each query may see; without it all earlier ones and itself (T = S), or with T = 1 everything.
    Raises BackendRefusal where a backend is forced that can't serve.
    """
    dtype = working_dtype(q_BnTD)
    call = AttentionCall(q_BnTD.to(dtype), k_BmSD.to(dtype), v_BmSD.to(dtype), pairs_B1TS)
    output: Tensor = OPERATORS["full"].choose(call.situation(), call).run(call)
    return output


def norm_and_rotate(
    q_BTnD: Tensor,
    k_BTmD: Tensor,
    q_norm: RMSNorm | None,
    k_norm: RMSNorm | None,
    embeddings: PositionEmbeddings | None,
    factor_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q and k after their norms (both or neither) and RoPE, where there are tables; q times its token's factor.

    Raises BackendRefusal where a backend is forced that can't serve.
    """
    q_weight_D = k_weight_D = None
    eps = 0.0
    if q_norm is not None and k_norm is not None:
        if q_norm.weight.device == q_BTnD.device:
            q_weight_D, k_weight_D, eps = q_norm.weight, k_norm.weight, q_norm.eps
        else:
            # accelerate, which offloads weights, has them here only while their module runs.
            q_BTnD, k_BTmD = q_norm(q_BTnD), k_norm(k_BTmD)
    if q_weight_D is None and embeddings is None and factor_BT is None:
        return q_BTnD, k_BTmD
    call = PrologueCall(q_BTnD, k_BTmD, q_weight_D, k_weight_D, eps, embeddings, factor_BT)
    result: tuple[Tensor, Tensor] = OPERATORS["prologue"].choose(call.situation()).run(call)
    return result


def fuse_and_scatter(full_BTFD: Tensor | None, linear: LinearHeads, order: HeadIndex) -> Tensor:
    """o_proj's input [B, T, H, D]: full-attention heads as they are, linear heads after fusion.fuse, each at its own index.

    order.heads[h] is the place of head h, full-attention heads counted first. Raises BackendRefusal where a backend is
    forced that can't serve.
    """
    call = FusionCall(full_BTFD, *linear, order)
    output: Tensor = OPERATORS["fusion"].choose(call.situation()).run(call)
    return output
