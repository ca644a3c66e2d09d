"""The table of operators: for each, its backends in order of preference. The model's heads call it, doctor proves it.

Shapes: B batch, T new tokens, S cached plus new tokens, H query heads, G heads of k and v, n heads that run, m KV heads,
N sequences, D head_dim.
"""

from __future__ import annotations

from torch import Tensor

from . import full_backends as full
from . import gdn_backends as gdn
from .backends import Backend, Operator, Situation, working_dtype
from .full_backends import AttentionCall
from .gdn_backends import GatedDeltaCall

OPERATORS: dict[str, Operator] = {
    "gdn": Operator(
        "gdn",
        "Gated DeltaNet (G)",
        "HYDRAHEAD_GDN_BACKEND",
        (
            Backend("triton", gdn.run_triton, gdn.triton_cannot, gdn.no_steps),
            Backend("flashqla", gdn.run_flashqla, gdn.flashqla_cannot, gdn.no_steps),
            Backend("fla", gdn.run_fla, gdn.fla_cannot),
            Backend("torch", gdn.run_torch, full.never, is_slow=True),
        ),
    ),
    "full": Operator(
        "full",
        "full attention (F)",
        "HYDRAHEAD_FULL_BACKEND",
        (
            Backend("cudnn", full.run_cudnn, full.cudnn_cannot, full.no_growing_steps),
            Backend("flash_attn", full.run_flash_attn, full.flash_attn_cannot, full.no_masks),
            Backend("sdpa", full.run_sdpa, full.sdpa_cannot),
            Backend("torch", full.run_torch, full.never, is_slow=True),
        ),
        rivals=("cudnn", "flash_attn"),
    ),
}


def set_backend(operator: str, name: str, asked_by: str = "set_backend") -> None:
    """Forces who computes an operator (gdn, full) in this process; `auto` goes back to the environment's wish.

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
    row; N = B without it. Raises RuntimeError where a backend is forced that can't serve.
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
    Raises RuntimeError where a backend is forced that can't serve.
    """
    dtype = working_dtype(q_BnTD)
    call = AttentionCall(q_BnTD.to(dtype), k_BmSD.to(dtype), v_BmSD.to(dtype), pairs_B1TS)
    output: Tensor = OPERATORS["full"].choose(call.situation(), call).run(call)
    return output
