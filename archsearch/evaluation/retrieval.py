"""Answers to probes, retrieval from long prompts and general ones: their likelihood and exact match.

Legend: B probes of a batch, T tokens, A answer tokens, C hidden size, M answer tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..data.niah import Probe, stack
from ..data.tasks import GENERAL_KINDS, metric_name


@dataclass
class Tally:
    """Sums over the probes of one kind."""

    nll: float = 0.0
    tokens: int = 0
    matches: int = 0
    probes: int = 0

    def metrics(self) -> dict[str, float]:
        """Mean NLL of an answer token, and share of probes that match."""
        return {"nll": self.nll / self.tokens, "match": self.matches / self.probes}


def retrieval(
    model: HydraHeadForCausalLM, probes: Sequence[Probe], *, batch_tokens: int = 4096
) -> dict[str, float]:
    """`NAME_nll` and `NAME_match` for every kind among the probes, NAME as metric_name calls it.

    nll: mean nats an answer token, teacher-forced. match: share of probes at which every answer token is
    the argmax, which is when greedy decoding gives the answer. With general probes among them also
    `general_nll` and `general_match`, the means over their kinds. batch_tokens bounds the tokens of a
    forward, padding included; a single longer probe still runs alone. The model runs in evaluation mode.
    """
    was_training = model.training
    model.train(False)
    tallies: dict[str, Tally] = {}
    with torch.inference_mode():
        for batch in batches(probes, batch_tokens):
            nll_BA, right_BA, real_BA = answer_scores(model, batch)
            for index, probe in enumerate(batch):
                tally = tallies.setdefault(probe.kind, Tally())
                tally.nll += float(nll_BA[index].sum(dtype=torch.float64))
                tally.tokens += int(real_BA[index].sum())
                tally.matches += int(right_BA[index].all())
                tally.probes += 1
    model.train(was_training)
    return _named({kind: tallies[kind].metrics() for kind in sorted(tallies)})


def _named(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Each kind's figures under its name, and the means over the general kinds."""
    general = [found[kind] for kind in GENERAL_KINDS if kind in found]
    rows = {metric_name(kind): figures for kind, figures in found.items()}
    if general:
        rows["general"] = {key: fmean(row[key] for row in general) for key in general[0]}
    return {f"{name}_{key}": value for name, row in rows.items() for key, value in row.items()}


def batches(probes: Sequence[Probe], batch_tokens: int) -> Iterator[list[Probe]]:
    """Probes in batches of similar length, so that little of a batch is padding."""
    batch: list[Probe] = []
    for probe in sorted(probes, key=probe_tokens):
        if batch and (len(batch) + 1) * probe_tokens(probe) > batch_tokens:
            yield batch
            batch = []
        batch.append(probe)
    if batch:
        yield batch


def probe_tokens(probe: Probe) -> int:
    """Tokens of a probe's prompt and answer together."""
    return len(probe.prompt) + len(probe.answer)


def answer_scores(
    model: HydraHeadForCausalLM, batch: Sequence[Probe]
) -> tuple[Tensor, Tensor, Tensor]:
    """NLL in nats, whether the argmax is right, and which entries are real, each [B, A].

    Past the end of a shorter answer the NLL is 0 and the argmax counts as right.
    """
    device = model.lm_head.weight.device
    input_ids, mask, positions_BA = stack(batch)
    real_BA = positions_BA >= 0
    columns_BA = positions_BA.clamp(min=0)
    targets_M = input_ids.gather(1, columns_BA + 1)[real_BA].to(device)
    # The last column predicts nothing that is asked.
    hidden_BTC = model.model(
        input_ids=input_ids[:, :-1].to(device),
        attention_mask=mask[:, :-1].to(device),
        use_cache=False,
    ).last_hidden_state
    rows_B1 = torch.arange(len(batch)).unsqueeze(1)
    hidden_MC = hidden_BTC[rows_B1, columns_BA][real_BA.to(device)]
    log_p_MV = model.lm_head(hidden_MC).float().log_softmax(-1)
    nll_BA = torch.zeros(real_BA.shape)
    nll_BA[real_BA] = -log_p_MV.gather(1, targets_M.unsqueeze(1)).squeeze(1).cpu()
    right_BA = torch.ones_like(real_BA)
    right_BA[real_BA] = (log_p_MV.argmax(-1) == targets_M).cpu()
    return nll_BA, right_BA, real_BA
