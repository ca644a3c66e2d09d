"""fp32 masters of a model's parameters, which the optimizer moves while the model computes in its own dtype.

A group of parameters has one flat master and one flat gradient, so that an update is a few launches however many
parameters there are. What is rounded is what autocast rounds: a weight before its products, its gradient after them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")
BETAS = (0.9, 0.95)


class Masters:
    """The master of a group of parameters on one device: `flat`, and its gradient."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters: list[Tensor] = list(parameters)
        size = sum(parameter.numel() for parameter in self.parameters)
        device = self.parameters[0].device
        self.flat = nn.Parameter(torch.empty(size, dtype=torch.float32, device=device))
        self.gradient = torch.zeros_like(self.flat, requires_grad=False)
        self.values = self.views(self.flat.detach())
        """The master of each parameter, a view of flat in that parameter's shape."""
        self._gradients = self.views(self.gradient)
        with torch.no_grad():
            torch._foreach_copy_(self.values, self.parameters)

    def views(self, flat: Tensor) -> list[Tensor]:
        """A tensor like flat as one view a parameter, in its shape."""
        parts = flat.split([parameter.numel() for parameter in self.parameters])
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Moves the parameters' gradients to the master, which has none where no parameter has one; else those count as zero."""
        pairs = [(view, p.grad) for view, p in zip(self._gradients, self.parameters, strict=True)]
        given = [(view, grad) for view, grad in pairs if grad is not None]
        if len(given) < len(pairs):
            torch._foreach_zero_([view for view, grad in pairs if grad is None])
        if given:
            torch._foreach_copy_([view for view, _ in given], [grad for _, grad in given])
        self.flat.grad = self.gradient if given else None
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def take_values(self) -> None:
        """Follows parameters that somebody else has changed; of the others the master keeps what rounding hides."""
        for parameter, value in zip(self.parameters, self.values, strict=True):
            same = value.to(parameter.dtype) == parameter
            value.copy_(torch.where(same, value, parameter.float()))

    @torch.no_grad()
    def give_values(self) -> None:
        """Rounds the master into the parameters."""
        torch._foreach_copy_(self.parameters, self.values)


class MasterOptimizer:
    """AdamW without weight decay over groups of masters, the gradient of each group clipped on its own.

    A group without gradients rests: neither its values nor its moments change.
    """

    def __init__(self, groups: Sequence[Masters]) -> None:
        self.groups = list(groups)
        self._adamw = torch.optim.AdamW(
            [group.flat for group in self.groups], lr=0.0, betas=BETAS, weight_decay=0.0, fused=True
        )

    def update(self, rate: float, clip_norm: float) -> Tensor:
        """One step on the gradients that the parameters have, which it takes; their norms before clipping, [groups]."""
        for group in self.groups:
            group.take_gradients()
        gradients = [group.gradient for group in self.groups]
        norms_G = torch.stack(torch._foreach_norm(gradients))
        factors_G = (clip_norm / (norms_G + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, list(factors_G.unbind()))
        for options in self._adamw.param_groups:
            options["lr"] = rate
        self._adamw.step()
        for group in self.groups:
            group.give_values()
        return norms_G

    def updates(self, group: Masters) -> int:
        """Updates of a group so far, which its moments are corrected by."""
        state = self._adamw.state.get(group.flat)
        return int(state["step"]) if state else 0

    def moments(self, group: Masters) -> dict[str, Tensor]:
        """The group's moments by name, flat like its master; empty before the first update."""
        state = self._adamw.state.get(group.flat, {})
        return {name: state[name] for name in MOMENTS if name in state}

    def restore(self, group: Masters, moments: dict[str, Tensor], updates: int) -> None:
        """Puts moments, flat or copies of them, in the place of the group's; none of them as before the first update."""
        if not moments:
            self._adamw.state.pop(group.flat, None)
            return
        device = group.flat.device
        # The fused optimizer counts on the device of the parameter.
        count = torch.tensor(float(updates), dtype=torch.float32, device=device)
        copies = {name: moments[name].to(device, copy=True) for name in MOMENTS}
        self._adamw.state[group.flat] = {"step": count, **copies}
