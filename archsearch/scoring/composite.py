"""From the effects of single heads on pairs to one score a head (HydraHead, arXiv 2606.20097, Eq. 11-12).

Legend: P pairs of a sub-probe, B sub-probes, L layers, X query heads or KV groups of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .head_scores import Capability, HeadScores, rows_of


@dataclass(frozen=True)
class Evidence:
    """The effects on one sub-probe's pairs, [P, L, X] each; senders on fewer pairs, or None where not measured."""

    recv: Tensor
    send: Tensor | None = None


@dataclass(frozen=True)
class Summary:
    """One capability: means over sub-probes, their standard errors, consistency and score, [L, X] each."""

    recv: Tensor
    send: Tensor | None
    recv_spread: Tensor
    send_spread: Tensor | None
    consistency: Tensor
    score: Tensor
    spread: Tensor


def summarise(probes: Sequence[Evidence], threshold: float, *, weighted: bool = True) -> Summary:
    """s_c = max(recv, send) * k_c of one capability; without the factor k_c where it is not weighted.

    recv and send are means over the sub-probes' means, k_c is the share of sub-probes in which the larger of the
    two exceeds threshold. Raises ValueError without sub-probes, or for one without pairs.
    """
    if not probes or any(len(probe.recv) == 0 for probe in probes):
        raise ValueError("scores: a capability without pairs")
    recv_BLX = torch.stack([probe.recv.double().mean(0) for probe in probes])
    measured = [probe.send.double() for probe in probes if probe.send is not None]
    measured = [send for send in measured if len(send)]
    send_LX = torch.stack([send.mean(0) for send in measured]).mean(0) if measured else None
    larger_BLX = torch.stack([_larger(probe) for probe in probes])
    consistency_LX = (larger_BLX > threshold).double().mean(0)
    recv_LX, recv_spread_LX = recv_BLX.mean(0), _error([p.recv for p in probes])
    send_spread_LX = _error(measured) if measured else None
    best_LX, spread_LX = recv_LX, recv_spread_LX
    if send_LX is not None and send_spread_LX is not None:
        best_LX = torch.maximum(recv_LX, send_LX)
        spread_LX = torch.where(send_LX > recv_LX, send_spread_LX, recv_spread_LX)
    weight_LX = consistency_LX if weighted else torch.ones_like(consistency_LX)
    return Summary(
        recv_LX,
        send_LX,
        recv_spread_LX,
        send_spread_LX,
        consistency_LX,
        best_LX * weight_LX,
        spread_LX * weight_LX,
    )


def composite(summaries: Sequence[Summary], *, from_zero: bool = False) -> tuple[Tensor, Tensor]:
    """Score and its standard error, [L, X]: min-max per capability, then the mean over capabilities.

    from_zero divides by the range alone, so that no effect stays 0 and harm stays negative; the order of heads is
    the same. Raises ValueError where there is no capability.
    """
    if not summaries:
        raise ValueError("scores: no capability to score heads by")
    parts, errors = [], []
    for summary in summaries:
        low, width = summary.score.min(), summary.score.max() - summary.score.min()
        start = torch.zeros_like(low) if from_zero else low
        scale = 1 / float(width) if width > 0 else 0.0
        parts.append((summary.score - start) * scale)
        errors.append(summary.spread * scale)
    return torch.stack(parts).mean(0), torch.stack(errors).square().sum(0).sqrt() / len(errors)


def head_scores(
    method: str,
    heads: Mapping[str, Mapping[str, Evidence]],
    groups: Mapping[str, Mapping[str, Evidence]],
    threshold: float,
    counts: Mapping[str, dict[str, dict[str, int]]],
    *,
    signed: bool = False,
) -> HeadScores:
    """HeadScores of effects by capability and sub-probe, of heads and of whole KV groups; counts: pairs kept, drawn.

    signed scores are the effects as they are: consistency does not weigh them, and 0 stays 0.
    """
    summaries, whole = (
        {n: summarise(list(p.values()), threshold, weighted=not signed) for n, p in each.items()}
        for each in (heads, groups)
    )
    score_LH, spread_LH = composite(list(summaries.values()), from_zero=signed)
    score_LG, _ = composite(list(whole.values()), from_zero=signed)
    capabilities = {name: _capability(s, counts.get(name, {})) for name, s in summaries.items()}
    return HeadScores(
        method, rows_of(score_LH), rows_of(spread_LH), rows_of(score_LG), capabilities
    )


def _larger(probe: Evidence) -> Tensor:
    recv_LX = probe.recv.double().mean(0)
    if probe.send is None or len(probe.send) == 0:
        return recv_LX
    return torch.maximum(recv_LX, probe.send.double().mean(0))


def _error(effects: Sequence[Tensor]) -> Tensor:
    """Standard error of the mean of sub-probe means; pairs of a sub-probe with a single pair share the others'."""
    variances_BLX = torch.stack([_variance(each.double(), effects) for each in effects])
    return variances_BLX.sum(0).sqrt() / len(effects)


def _variance(effects_PLX: Tensor, all_effects: Sequence[Tensor]) -> Tensor:
    if len(effects_PLX) > 1:
        return effects_PLX.var(0) / len(effects_PLX)
    pooled = torch.cat([each.double() for each in all_effects])
    return pooled.var(0, correction=min(1, len(pooled) - 1))


def _capability(summary: Summary, probes: dict[str, dict[str, int]]) -> Capability:
    return Capability(
        recv=rows_of(summary.recv),
        send=None if summary.send is None else rows_of(summary.send),
        consistency=rows_of(summary.consistency),
        score=rows_of(summary.score),
        recv_spread=rows_of(summary.recv_spread),
        send_spread=None if summary.send_spread is None else rows_of(summary.send_spread),
        probes=probes,
    )
