"""The teacher's side of a distillation: run for each batch, or kept in one of three forms for all candidates.

What each form costs a token, for SmolLM2-135M (C 576, V 49152, bf16) and Qwen3-1.7B (C 2048, V 151936), K = 64:

| form | is | bytes | teacher's FLOPs |
|---|---|---|---|
| exact | nothing | 0 | 270 M, 3.4 G |
| hidden | final hidden states; logits are one product away | 1152, 4096 | 57 M, 620 M |
| mean_row | W^T p in fp32 and p's entropy | 2308, 8196 | 0 |
| topk | K log-probabilities (fp16), their tokens (int32), the tail's mass | 388, 388 | 0 |

hidden and mean_row are exact up to rounding; mean_row rounds q and p apart where the others round q - p. topk is a
lower bound of KL (targets.TopK says by how much): on 512 held-out tokens of SmolLM2-135M, 34 of 270 heads kept at random,
64 tokens leave 0.22 of the mass and find 0.81 of KL, with a gradient at a cosine of 0.995; 256 tokens 0.12, 0.90, 0.999.

Legend: M positions, C hidden size, V vocabulary, K tokens kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import DistillConfig
from ..errors import ConfigError
from ..evaluation.divergence import final_hidden
from ..models.teacher import Teacher
from .loop import full_precision, native_precision, product_dtype
from .losses import LOGIT_BYTES
from .packing import Batch
from .target_cache import Arrays, TargetCache
from .targets import Dense, HeadProducts, MeanRow, Target, TopK

SCHEMA = 1
GIB = 2**30


class Form(NamedTuple):
    """A way to keep the teacher's answer: what is made of hidden states [M, C], and the target that it is."""

    keep: Callable[[Tensor, HeadProducts, int], Arrays]
    target: Callable[[Arrays, HeadProducts], Target]
    bytes_a_token: Callable[[int, int, int], int]
    """From hidden size, bytes of an element of the model, and K."""


def keep_hidden(hidden_MC: Tensor, head: HeadProducts, top_k: int) -> Arrays:
    """The hidden states as they are."""
    return {"hidden": hidden_MC}


def keep_mean_row(hidden_MC: Tensor, head: HeadProducts, top_k: int) -> Arrays:
    """W^T p, its product in fp32 since it is made once, and the entropy of p."""
    rows, entropies = [], []
    for hidden_RC, logits_RV, log_p_RV in _chunks(hidden_MC, head):
        row_RC = head.expected_rows(log_p_RV.exp(), wide=True)
        log_sum_R = logits_RV[:, 0] - log_p_RV[:, 0]
        rows.append(row_RC)
        # The same expression as the student's, so that a student that is the teacher has no divergence.
        entropies.append(log_sum_R - (hidden_RC.float() * row_RC).sum(-1))
    return {"rows": torch.cat(rows), "entropy": torch.cat(entropies)}


def keep_topk(hidden_MC: Tensor, head: HeadProducts, top_k: int) -> Arrays:
    """The K likeliest tokens, their log-probabilities, and the mass of all others."""
    tokens, log_p, tails = [], [], []
    for _, _, log_p_RV in _chunks(hidden_MC, head):
        best = log_p_RV.topk(top_k, dim=-1)
        tokens.append(best.indices.int())
        log_p.append(best.values.half())
        tails.append(log_p_RV.exp_().scatter_(1, best.indices, 0.0).sum(-1))
    return {"tokens": torch.cat(tokens), "log_p": torch.cat(log_p), "tail": torch.cat(tails)}


FORMS: dict[str, Form] = {
    "hidden": Form(
        keep_hidden,
        lambda kept, head: Dense(kept["hidden"], head),
        lambda size, element, _: size * element,
    ),
    "mean_row": Form(
        keep_mean_row,
        lambda kept, _: MeanRow(kept["rows"], kept["entropy"]),
        lambda size, *_: 4 * size + 4,
    ),
    "topk": Form(
        keep_topk,
        lambda kept, _: TopK(kept["tokens"], kept["log_p"], kept["tail"]),
        lambda _size, _element, top_k: 6 * top_k + 4,
    ),
}
"""Every value of distill.teacher_logits but exact."""


class TeacherLogits:
    """What each batch's loss needs of the teacher, as config.teacher_logits says; one serves all candidates of a worker.

    folder takes what is beyond config.cache_gib; without one the teacher runs again for that.
    Raises ConfigError where config.top_k is more than the vocabulary.
    """

    def __init__(
        self, teacher: Teacher, config: DistillConfig, *, folder: Path | None = None
    ) -> None:
        self._teacher = teacher
        self._form = None if config.teacher_logits == "exact" else FORMS[config.teacher_logits]
        self._top_k = config.top_k
        model = teacher.model
        self.dtype = product_dtype(teacher.device, model.dtype)
        self._head = HeadProducts(model.lm_head.weight, self.dtype)
        if config.teacher_logits == "topk" and config.top_k > self._head.vocabulary:
            raise ConfigError(
                f"distill.top_k: {config.top_k}; allowed: up to the vocabulary's {self._head.vocabulary}"
            )
        self._cache = TargetCache(
            self._identity(config), teacher.device, config.cache_gib * GIB, folder
        )

    def arrays(self, batch: Batch) -> Arrays:
        """What is kept, or made now, of the teacher's answer to a batch; "hidden" are its final hidden states [M, C]."""
        if self._form is None:
            return {"hidden": self._hidden(batch)}
        return self._cache.get(batch.key, lambda: self._make(batch))

    def target(self, arrays: Arrays) -> Target:
        """What a student is to come close to, from arrays or copies of them."""
        return (self._form or FORMS["hidden"]).target(arrays, self._head)

    def _make(self, batch: Batch) -> Arrays:
        assert self._form is not None
        hidden_MC = self._hidden(batch)
        with torch.inference_mode(), full_precision(self._teacher.device):
            return self._form.keep(hidden_MC, self._head, self._top_k)

    def _hidden(self, batch: Batch) -> Tensor:
        model = self._teacher.model
        with torch.inference_mode(), native_precision(self._teacher.device, model.dtype):
            return final_hidden(model, batch.ids_BT, batch.bounds_N)

    def _identity(self, config: DistillConfig) -> str:
        model = self._teacher.model
        facts = {
            "schema": SCHEMA,
            "teacher": self._teacher.fingerprint,
            "dtype": str(model.dtype),
            "device": self._teacher.device.type,
            "form": config.teacher_logits,
            "top_k": config.top_k if config.teacher_logits == "topk" else None,
        }
        return json.dumps(facts, sort_keys=True)


def _chunks(hidden_MC: Tensor, head: HeadProducts) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(hidden states, logits, log-probabilities) of a chunk of positions after another."""
    rows = max(1, LOGIT_BYTES[hidden_MC.device.type] // (4 * head.vocabulary))
    for hidden_RC in hidden_MC.split(rows):
        logits_RV = head.logits(hidden_RC)
        yield hidden_RC, logits_RV, logits_RV.log_softmax(-1)
