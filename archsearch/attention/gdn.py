"""Gated DeltaNet heads (arXiv 2412.06464), as HydraHead (arXiv 2606.20097) puts them in place of attention heads.

Order of work: project -> short convolution (optional) -> q/k norm of the teacher (where it has one) -> RoPE (optional)
-> L2 norm of q and k -> recurrence -> RMSNorm per head without weight (optional) -> times gamma -> plus bias (optional)
-> times gate (optional), so the gate also scales the bias.

Shapes: B batch, T tokens, C hidden size, n GDN heads, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .cache import GatedDeltaState
from .configuration_hydrahead import HydraHeadConfig
from .dispatch import fuse_and_scatter, gated_delta_net, norm_and_rotate
from .fusion import HeadIndex, LinearHeads, RMSNorm
from .packing import Documents
from .rotary import PositionEmbeddings

CONV_WIDTH = 4
INITIAL_HALF_LIFE_TOKENS = 64.0
"""Half-life of a new head's memory; alignment with a teacher overwrites it from that head's attention."""

SHARED_BY_HEADS = ("q_norm.weight", "k_norm.weight")
"""Parameters without a head axis."""


class GatedDeltaHeads(nn.Module):
    """num_heads GDN heads of one layer, each with its own q, k and v.

    The first axis of every parameter but SHARED_BY_HEADS runs over heads (times D for projections).
    """

    def __init__(self, config: HydraHeadConfig, num_heads: int) -> None:
        super().__init__()
        self.config, self.num_heads, self.head_dim = config, num_heads, config.head_dim
        self._order = HeadIndex(range(num_heads))
        size, width, options = config.hidden_size, num_heads * config.head_dim, config.gdn
        self.rope, self.norm = options["rope"], options["norm"]
        self.q_proj = nn.Linear(size, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(size, width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(size, width, bias=config.qkv_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.a_proj = nn.Linear(size, num_heads, bias=False)
        self.b_proj = nn.Linear(size, num_heads, bias=True)
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.gamma = nn.Parameter(torch.empty(num_heads, self.head_dim))
        self.gate_proj = nn.Linear(size, width, bias=False) if options["gate"] else None
        self.bias: Tensor | None = None
        self.conv_weight: Tensor | None = None
        if options["bias"]:
            self.bias = nn.Parameter(torch.empty(num_heads, self.head_dim))
        if options["conv"]:
            self.conv_weight = nn.Parameter(torch.empty(num_heads, 3, self.head_dim, CONV_WIDTH))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets all but q, k, v and the norms: gate, bias, gamma and convolution start as the identity."""
        rate = math.log(2) / INITIAL_HALF_LIFE_TOKENS
        nn.init.zeros_(self.a_proj.weight)
        nn.init.zeros_(self.b_proj.weight)
        nn.init.zeros_(self.b_proj.bias)
        nn.init.zeros_(self.A_log)
        nn.init.constant_(self.dt_bias, math.log(math.expm1(rate)))
        nn.init.ones_(self.gamma)
        if self.gate_proj is not None:
            nn.init.zeros_(self.gate_proj.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.conv_weight is not None:
            nn.init.zeros_(self.conv_weight)

    def select(self, indices: Sequence[int]) -> GatedDeltaHeads:
        """A new module of the heads `indices`, in that order, with copies of their parameters."""
        # On the meta device nothing is allocated or drawn at random; the copies then take the places.
        with torch.device("meta"):
            chosen = GatedDeltaHeads(self.config, len(indices))
        index = HeadIndex(indices).on(self.gamma.device)
        rows = {}
        for name, tensor in self.state_dict().items():
            if name in SHARED_BY_HEADS:
                rows[name] = tensor.clone()
            else:
                by_head = tensor.view(self.num_heads, -1, *tensor.shape[1:])
                rows[name] = by_head.index_select(0, index).view(-1, *tensor.shape[1:])
        chosen.load_state_dict(rows, assign=True)
        return chosen.train(self.training)

    def forward(
        self,
        x_BTC: Tensor,
        rope: PositionEmbeddings,
        valid_BT: Tensor | None = None,
        state: GatedDeltaState | None = None,
        *,
        documents: Documents | None = None,
        fused: bool = True,
    ) -> Tensor | LinearHeads:
        """Head outputs [B, T, n, D]; reads and replaces state. Padding (valid_BT False) leaves the memory alone.

        documents are packed into the rows, each with a memory of its own. fused=False leaves the steps after the
        recurrence to the caller, who has other heads to put beside these.
        """
        q, k, v = self._project(x_BTC, rope, valid_BT, state, documents)
        a_BTn, b_BTn = self.a_proj(x_BTC), self.b_proj(x_BTC)
        if valid_BT is not None:
            # Neither decay nor writing.
            a_BTn, b_BTn = (
                x.masked_fill(~valid_BT[..., None], float("-inf")) for x in (a_BTn, b_BTn)
            )
        if documents is not None:
            # The operator takes sequences of several lengths in a single row.
            q, k, v, a_BTn, b_BTn = (x.flatten(0, 1)[None] for x in (q, k, v, a_BTn, b_BTn))
        o_BTnD, memory = gated_delta_net(
            q,
            k,
            v,
            a_BTn,
            b_BTn,
            self.A_log,
            self.dt_bias,
            initial_state=None if state is None else state.memory_BnDD,
            cu_seqlens=None if documents is None else documents.bounds_N,
            output_final_state=state is not None,
        )
        o_BTnD = o_BTnD.view(*x_BTC.shape[:2], self.num_heads, self.head_dim)
        if state is not None:
            state.memory_BnDD = memory
        heads = LinearHeads(
            o_BTnD,
            self.gamma,
            self.bias,
            None if self.gate_proj is None else self.gate_proj(x_BTC).view(o_BTnD.shape),
            self.config.rms_norm_eps if self.norm else None,
        )
        return fuse_and_scatter(None, heads, self._order) if fused else heads

    def _project(
        self,
        x_BTC: Tensor,
        rope: PositionEmbeddings,
        valid_BT: Tensor | None,
        state: GatedDeltaState | None,
        documents: Documents | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k (before their L2 norm) and v, each [B, T, n, D]."""
        shape = (*x_BTC.shape[:2], self.num_heads, self.head_dim)
        q, k, v = (p(x_BTC).view(shape) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.conv_weight is not None:
            joined = torch.stack((q, k, v), dim=3)
            q, k, v = self._convolve(joined, valid_BT, state, documents).unbind(3)
        q, k = norm_and_rotate(q, k, self.q_norm, self.k_norm, rope if self.rope else None)
        return q, k, v

    def _convolve(
        self,
        x_BTn3D: Tensor,
        valid_BT: Tensor | None,
        state: GatedDeltaState | None,
        documents: Documents | None,
    ) -> Tensor:
        """x plus its causal depthwise convolution over tokens; padding counts as zeros, as before a document's first token."""
        assert self.conv_weight is not None
        if valid_BT is not None:
            x_BTn3D = x_BTn3D.masked_fill(~valid_BT[..., None, None, None], 0.0)
        past = None if state is None else state.conv_BTn3D
        if past is None:
            past = x_BTn3D.new_zeros(x_BTn3D.shape[0], CONV_WIDTH - 1, *x_BTn3D.shape[2:])
        extended = torch.cat((past, x_BTn3D), dim=1)
        if state is not None:
            state.conv_BTn3D = extended[:, -(CONV_WIDTH - 1) :]
        weight_n3DW, tokens = self.conv_weight.to(x_BTn3D.dtype), x_BTn3D.shape[1]
        taps = [extended[:, i : i + tokens] * weight_n3DW[..., i] for i in range(CONV_WIDTH)]
        if documents is not None:
            back = reversed(range(CONV_WIDTH))
            inside = [(documents.positions_BT >= count)[..., None, None, None] for count in back]
            taps = [tap * reached for tap, reached in zip(taps, inside, strict=True)]
        return x_BTn3D + torch.stack(taps).sum(0)
