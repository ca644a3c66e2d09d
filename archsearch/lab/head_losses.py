"""What a teacher loses on pairs without some of its heads, taken away in two ways.

Legend: P pairs, R rows, T tokens, A answer tokens, H query heads, D head dim, C hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..data.niah import Probe
from ..evaluation.divergence import head_weight
from ..headmap import Head, HeadMap
from ..models.cut import cut
from ..models.supernet import Supernet
from ..models.teacher import Teacher
from ..scoring.pairs import PairBatch, forward_tokens, pair_batches

WAYS = ("corrupt", "twin")
"""What stands in for a head: its output on the corrupt prompt, or its twin."""
MEASURES = {"answer NLL rise": "nats/token", "exact match fall": "share"}
"""What is lost, and its unit."""
ALL = "all"
"""The scope of all pairs, beside those of single capabilities."""
MOST_PAIRS = 64

Heads = frozenset[Head]
Key = tuple[str, str, str, str]
"""Name of the sets of heads, way, capability or "all", measure."""


@dataclass(frozen=True)
class Bench:
    """A teacher, its twins, and pairs in batches."""

    teacher: Teacher
    supernet: Supernet
    batches: list[PairBatch]
    capabilities: list[str]
    """Of each pair, in the order of the batches."""
    base_2P: Tensor
    """NLL and exact match of every pair with no head taken away."""

    @classmethod
    def of(
        cls,
        teacher: Teacher,
        supernet: Supernet,
        pairs: Mapping[str, Sequence[Probe]],
        *,
        decay: float,
        memory_bytes: int,
    ) -> Bench:
        """Batches pairs of similar length, both of whose rows a forward within memory_bytes takes at once."""
        labelled = [(name, pair) for name, found in pairs.items() for pair in found]
        every = [pair for _, pair in labelled]
        tokens = forward_tokens(teacher, every, memory_bytes)
        places = list(pair_batches(every, MOST_PAIRS, tokens))
        batches = [
            PairBatch.of([labelled[i][1] for i in chosen], decay, teacher.device)
            for chosen in places
        ]
        names = [labelled[i][0] for chosen in places for i in chosen]
        return cls(teacher, supernet, batches, names, answers(teacher.model, batches))

    def without(self, heads: Heads, way: str) -> Tensor:
        """NLL and exact match of every pair, fp64 [2, P], where heads are taken away in one of WAYS."""
        if way == "corrupt":
            return answers(self.teacher.model, self.batches, heads)
        shape = self.teacher.shape
        head_map = HeadMap.from_full_heads(shape, set(shape.heads()) - heads)
        return answers(cut(self.teacher, self.supernet, head_map), self.batches)

    def losses(self, name: str, group: Sequence[Heads]) -> dict[Key, float]:
        """What is lost without the heads of a set, by way, scope and measure; the mean over the sets of a group."""
        sign_21 = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
        found: dict[Key, float] = {}
        for way in WAYS:
            values = torch.stack([self.without(heads, way) for heads in group])
            loss_2P = (values.mean(0) - self.base_2P) * sign_21
            for scope in (*dict.fromkeys(self.capabilities), ALL):
                chosen = [i for i, own in enumerate(self.capabilities) if scope in (own, ALL)]
                means = loss_2P[:, chosen].mean(1).tolist()
                for measure, mean in zip(MEASURES, means, strict=True):
                    found[name, way, scope, measure] = mean
        return found


def answers(
    model: HydraHeadForCausalLM, batches: Sequence[PairBatch], knocked: Heads = frozenset()
) -> Tensor:
    """Each pair's mean NLL an answer token after the clean prompt, and whether all are the argmax: fp64 [2, P].

    knocked heads give what they give on the corrupt prompt, at every position; all that follows is computed anew.
    """
    weight_VC, parts = head_weight(model), []
    with torch.inference_mode(), from_corrupt(model, knocked):
        for batch in batches:
            num_pairs = len(batch.columns_PA)
            rows = batch.ids_2PT if knocked else batch.ids_2PT[:num_pairs]
            hidden_RTC = model.model(input_ids=rows, use_cache=False).last_hidden_state
            hidden_PAC = batch.at_answers(hidden_RTC[:num_pairs])
            logits_PAV = hidden_PAC.float() @ weight_VC.T
            nll_PA = F.cross_entropy(
                logits_PAV.flatten(0, 1), batch.answers_PA.flatten(), reduction="none"
            ).view_as(batch.answers_PA)
            real_PA = batch.weight_PA > 0
            nll_P = (nll_PA.double() * real_PA).sum(1) / real_PA.sum(1)
            # A shorter answer repeats its last token, so that every entry has to be right.
            match_P = (logits_PAV.argmax(-1) == batch.answers_PA).all(1).double()
            parts.append(torch.stack([nll_P, match_P]).cpu())
    return torch.cat(parts, 1)


@contextmanager
def from_corrupt(model: HydraHeadForCausalLM, heads: Heads) -> Iterator[None]:
    """In forwards of clean rows followed by their corrupt ones, the clean rows take these heads' corrupt outputs."""
    by_layer: dict[int, list[int]] = {}
    for layer, head in sorted(heads):
        by_layer.setdefault(layer, []).append(head)
    handles = []
    for layer, chosen in by_layer.items():

        def swap(_: Any, args: tuple[Any, ...], chosen: list[int] = chosen) -> tuple[Tensor]:
            mixed_RTHD = args[0].unflatten(-1, (-1, model.config.head_dim)).clone()
            clean_PTHD, corrupt_PTHD = mixed_RTHD.chunk(2)
            clean_PTHD[:, :, chosen] = corrupt_PTHD[:, :, chosen]
            return (mixed_RTHD.flatten(-2),)

        o_proj = model.model.layers[layer].self_attn.o_proj
        handles.append(o_proj.register_forward_pre_hook(swap))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
