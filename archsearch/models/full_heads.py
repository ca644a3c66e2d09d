"""A student's full-attention heads where they are more than the teacher's: options, their start, the way from RoPE to NoPE.

Shapes: L layers, H query heads, n full-attention heads of a layer, B sequences, T tokens, M = B * T, C hidden size,
D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.configuration_hydrahead import HydraHeadConfig
from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..attention.positions import set_rope_share
from ..studentconfig import FullConfig
from .teacher import Teacher


@dataclass(frozen=True)
class FullBranch:
    """Options of the full-attention heads; gamma_LH is measure_gamma's, needed where options.norm is on."""

    options: FullConfig
    gamma_LH: Tensor | None = None

    def added(self, config: HydraHeadConfig, layer: int) -> dict[str, Tensor]:
        """The parameters of a layer's heads that the teacher has not, at their start: the gate's [n * D, C], gamma [n, D].

        Raises ValueError where the norm has no measured gamma.
        """
        heads, parameters = config.heads(layer, "F"), dict[str, Tensor]()
        if not heads:
            return parameters
        if self.options.gate:
            parameters["gate_proj.weight"] = torch.zeros(
                len(heads) * config.head_dim, config.hidden_size
            )
        if self.options.norm:
            if self.gamma_LH is None:
                raise ValueError("student.full.norm needs the gamma that measure_gamma finds")
            gamma_n1 = self.gamma_LH[layer, heads, None]
            parameters["gamma"] = gamma_n1.expand(-1, config.head_dim).contiguous()
        return parameters


def full_branch(teacher: Teacher, options: FullConfig, ids_BT: Tensor) -> FullBranch:
    """The branch of these options, with gammas measured on the tokens where a norm needs them."""
    return FullBranch(options, measure_gamma(teacher, ids_BT) if options.norm else None)


def full_switches(options: FullConfig, tokens: int = 0) -> dict[str, Any]:
    """HydraHeadConfig.fa of a student that has been distilled on so many tokens."""
    switches = options.model_dump(exclude={"rope", "rope_fade_tokens"})
    return {"rope_share": rope_share(options, tokens), **switches}


def rope_share(options: FullConfig, tokens: int) -> float:
    """How much of RoPE is left after so many tokens of distillation: it falls evenly from 1 to 0 over rope_fade_tokens.

    Tokens, not a share of all steps: so a longer distillation may go on from the weights of a shorter one.
    """
    if options.rope:
        return 1.0
    if tokens >= options.rope_fade_tokens:
        return 0.0
    return 1 - tokens / options.rope_fade_tokens


def rope_fader(
    model: HydraHeadForCausalLM, options: FullConfig, batch_tokens: int
) -> Callable[[int, int], None]:
    """A hook for training: called before each step with (steps done, steps in all), it sets the model's share of RoPE.

    After the last step call it once more, with all steps done: a model is measured and saved with the share that it has.
    """

    def fade(step: int, _: int) -> None:
        set_rope_share(model, rope_share(options, step * batch_tokens))

    return fade


def measure_gamma(teacher: Teacher, ids_BT: Tensor) -> Tensor:
    """gamma [L, H], fp32, with which a normed head comes nearest to the teacher's head on these tokens.

    Least squares give the mean of the head's RMS over tokens, r: what is left of the head's energy is then
    1 - mean(r)^2 / mean(r^2).
    """
    layers, dim = teacher.model.model.layers, teacher.shape.head_dim
    sums_LH = torch.zeros(len(layers), teacher.shape.num_heads, device=teacher.device)

    def adder(layer: int) -> Any:
        def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            o_MHD = inputs[0].float().unflatten(-1, (-1, dim)).flatten(0, 1)
            sums_LH[layer] += o_MHD.square().mean(-1).sqrt().sum(0)

        return add

    handles = [
        block.self_attn.o_proj.register_forward_pre_hook(adder(layer))
        for layer, block in enumerate(layers)
    ]
    try:
        with torch.no_grad():
            # A sequence at a time: memory does not grow with their number.
            for ids_T in ids_BT.to(teacher.device):
                teacher.model.model(input_ids=ids_T[None], use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return sums_LH / ids_BT.numel()
