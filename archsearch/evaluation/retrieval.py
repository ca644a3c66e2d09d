"""Answers to probes, retrieval from long prompts and general ones: their likelihood and exact match.

Legend: B probes of a batch, T tokens, A answer tokens, C hidden size, M answer tokens of a batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..data.niah import Probe, stack
from ..data.tasks import GENERAL_KINDS
from ..errors import ConfigError
from ..metrics import FIGURES, metric_name


class Answer(NamedTuple):
    """What a model says to a probe: nats of all answer tokens, their number, and whether greedy decoding gives them."""

    nll: float
    tokens: int
    match: bool


def retrieval(
    model: HydraHeadForCausalLM, probes: Sequence[Probe], *, batch_tokens: int = 4096
) -> dict[str, float]:
    """`NAME_nll` and `NAME_match` for every kind among the probes, NAME as metric_name calls it.

    nll: mean nats an answer token, teacher-forced. match: share of probes at which every answer token is
    the argmax, which is when greedy decoding gives the answer. A kind with prompts of several contexts also has
    `NAME_nll@CONTEXT` and `NAME_match@CONTEXT`, one with several groups `NAME_GROUP_nll` and so on. With general probes
    among them also `general_nll` and `general_match`, the means over their kinds. batch_tokens bounds the tokens of a
    forward, padding included; a single longer probe still runs alone. The model runs in evaluation mode. Raises
    ConfigError as check_names does.
    """
    return summarize(answers(model, probes, batch_tokens=batch_tokens))


def answers(
    model: HydraHeadForCausalLM, probes: Sequence[Probe], *, batch_tokens: int = 4096
) -> dict[Place, list[Answer]]:
    """What the model says to each probe, at every place where that counts."""
    was_training = model.training
    model.train(False)
    places = _places(probes)
    found: dict[Place, list[Answer]] = defaultdict(list)
    with torch.inference_mode():
        for batch in batches(probes, batch_tokens):
            nll_BA, right_BA, real_BA = answer_scores(model, batch)
            for index, probe in enumerate(batch):
                answer = Answer(
                    float(nll_BA[index].sum(dtype=torch.float64)),
                    int(real_BA[index].sum()),
                    bool(right_BA[index].all()),
                )
                for place in places(probe):
                    found[place].append(answer)
    model.train(was_training)
    return found


def summarize(found: Mapping[Place, Sequence[Answer]]) -> dict[str, float]:
    """The metrics of answers by their names."""
    return name_figures({place: _figures(found[place]) for place in sorted(found)})


def _figures(found: Sequence[Answer]) -> dict[str, float]:
    """Mean NLL of an answer token, and share of probes that match."""
    tokens = sum(answer.tokens for answer in found)
    return {
        "nll": sum(answer.nll for answer in found) / tokens,
        "match": sum(answer.match for answer in found) / len(found),
    }


def check_names(probes: Sequence[Probe]) -> None:
    """Raises ConfigError where two kinds or groups of the probes would give metrics of one name."""
    places = _places(probes)
    found = dict.fromkeys(place for probe in probes for place in places(probe))
    name_figures(dict.fromkeys(found, dict.fromkeys(FIGURES, 0.0)))


class Place(NamedTuple):
    """Whose figures they are: all probes of a kind, or those of one group, of one context, or of both."""

    kind: str
    group: str = ""
    context: int = 0


def _places(probes: Sequence[Probe]) -> Callable[[Probe], list[Place]]:
    """Gives the places at which a probe counts: groups and contexts only where its kind has several."""
    contexts, groups = defaultdict(set), defaultdict(set)
    for probe in probes:
        groups[probe.kind].add(probe.group)
        # General prompts are as long as they happen to be.
        contexts[probe.kind].add(0 if probe.kind in GENERAL_KINDS else probe.context)

    def places(probe: Probe) -> list[Place]:
        several = len(groups[probe.kind]) > 1 and probe.group
        found = [Place(probe.kind), *([Place(probe.kind, probe.group)] if several else [])]
        if len(contexts[probe.kind]) > 1:
            found += [place._replace(context=probe.context) for place in found]
        return found

    return places


def name_figures(found: Mapping[Place, Mapping[str, float]]) -> dict[str, float]:
    """Each place's figures under its name, and the means over the general kinds. Raises ConfigError as check_names does."""
    named: dict[str, float] = {}
    for place, figures in found.items():
        own = {figure_name(place, key): value for key, value in figures.items()}
        if taken := sorted(own.keys() & named.keys()):
            raise ConfigError(
                f"probes.files: {taken[0]} would be the metric of two groups of prompts; allowed: other names of "
                "files, or other kinds in them"
            )
        named |= own
    general = [found[place] for place in general_places(found)]
    if general:
        named |= {f"general_{key}": fmean(row[key] for row in general) for key in general[0]}
    return named


def figure_name(place: Place, figure: str) -> str:
    """What a place's figure is called as a metric."""
    group = f"_{place.group}" if place.group else ""
    where = f"@{place.context}" if place.context else ""
    return f"{metric_name(place.kind)}{group}_{figure}{where}"


def general_places(found: Collection[Place]) -> list[Place]:
    """Those whose mean the figures of `general` are."""
    return [Place(kind) for kind in GENERAL_KINDS if Place(kind) in found]


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
    # Padding on the right is never looked at, so that no mask of T x T is needed and long prompts stay cheap.
    input_ids, _, positions_BA = stack(batch, right=True)
    real_BA = positions_BA >= 0
    columns_BA = positions_BA.clamp(min=0)
    targets_M = input_ids.gather(1, columns_BA + 1)[real_BA].to(device)
    # The last column predicts nothing that is asked.
    hidden_BTC = model.model(
        input_ids=input_ids[:, :-1].to(device), use_cache=False
    ).last_hidden_state
    rows_B1 = torch.arange(len(batch)).unsqueeze(1)
    hidden_MC = hidden_BTC[rows_B1, columns_BA][real_BA.to(device)]
    log_p_MV = model.lm_head(hidden_MC).float().log_softmax(-1)
    nll_BA = torch.zeros(real_BA.shape)
    nll_BA[real_BA] = -log_p_MV.gather(1, targets_M.unsqueeze(1)).squeeze(1).cpu()
    right_BA = torch.ones_like(real_BA)
    right_BA[real_BA] = (log_p_MV.argmax(-1) == targets_M).cpu()
    return nll_BA, right_BA, real_BA
