"""Clean and corrupt pairs: those that the teacher answers, and batches of them with their readout.

Legend: P pairs, T tokens, A answer tokens (the longest answer's), C hidden size, V vocabulary, S streams.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..config import ProbeKind, RunConfig, ScoringConfig
from ..data.niah import Probe
from ..data.pairs_file import read_pairs
from ..data.tasks import make_probes
from ..errors import ConfigError
from ..models.sources import resolve_path
from ..models.teacher import Teacher
from ..progress import Progress, ignore_progress
from .inputs import GIB, SubProbe

MIN_GAP = 0.1
"""Least m(x) - m(x'), in logits, at which a pair says anything about heads."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class PairBatch:
    """Pairs as rows padded on the right: under causal attention, padding there changes nothing before it."""

    ids_2PT: Tensor
    """Clean rows, then corrupt ones [2P, T]: prompt and the clean answer but for its last token."""
    columns_PA: Tensor
    """The column that predicts answer token j; a shorter answer repeats its last one."""
    answers_PA: Tensor
    distractors_PA: Tensor
    weight_PA: Tensor
    """decay**j over its sum; 0 beyond a shorter answer's end."""

    @classmethod
    def of(cls, probes: Sequence[Probe], decay: float, device: torch.device) -> PairBatch:
        """Raises ValueError where a pair's prompts or answers differ in length."""
        rows = [*map(_clean_row, probes), *map(_corrupt_row, probes)]
        ids_2PT = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        for index, row in enumerate(rows):
            ids_2PT[index, : len(row)] = torch.tensor(row)
        longest = max(len(probe.answer) for probe in probes)
        places = [[min(j, len(p.answer) - 1) for j in range(longest)] for p in probes]
        weight_PA = torch.tensor([_weights(len(p.answer), longest, decay) for p in probes])
        values = (
            [[len(p.prompt) - 1 + j for j in row] for p, row in zip(probes, places, strict=True)],
            [[p.answer[j] for j in row] for p, row in zip(probes, places, strict=True)],
            [[p.distractor[j] for j in row] for p, row in zip(probes, places, strict=True)],
        )
        columns_PA, answers_PA, distractors_PA = (torch.tensor(v, device=device) for v in values)
        return cls(ids_2PT.to(device), columns_PA, answers_PA, distractors_PA, weight_PA.to(device))

    def at_answers(self, values: Tensor) -> Tensor:
        """The answer columns of [2P, T, ..], or of the clean rows' [P, T, ..]: [2P, A, ..] or [P, A, ..]."""
        times = len(values) // len(self.columns_PA)
        rows = torch.arange(len(values), device=values.device).unsqueeze(1)
        return values[rows, self.columns_PA.repeat(times, 1)]

    def readout(self, model: HydraHeadForCausalLM, hidden_SPAC: Tensor) -> Tensor:
        """m of each stream and pair, [S, P] in logits, from the final normed hidden states.

        The lm_head has no bias, so that m is linear in them and logits are never needed in full.
        """
        weight_VC = model.lm_head.weight
        contrast_PAC = weight_VC[self.answers_PA].float() - weight_VC[self.distractors_PA].float()
        m_SP: Tensor = torch.einsum(
            "spac,pac,pa->sp", hidden_SPAC.float(), contrast_PAC, self.weight_PA
        )
        return m_SP

    def answered(self, model: HydraHeadForCausalLM, hidden_PAC: Tensor) -> Tensor:
        """Whether greedy decoding gives the whole answer, [P], from the clean rows' hidden states."""
        right_PA = model.lm_head(hidden_PAC).argmax(-1) == self.answers_PA
        answered_P: Tensor = right_PA.all(-1)
        return answered_P


def _clean_row(probe: Probe) -> tuple[int, ...]:
    same_prompts = len(probe.prompt) == len(probe.corrupt_prompt)
    if not same_prompts or len(probe.answer) != len(probe.distractor) or not probe.answer:
        raise ValueError("a pair needs prompts of one length and answers of one length")
    return probe.prompt + probe.answer[:-1]


def _corrupt_row(probe: Probe) -> tuple[int, ...]:
    return probe.corrupt_prompt + probe.answer[:-1]


def _weights(size: int, longest: int, decay: float) -> list[float]:
    raw = [decay**j if j < size else 0.0 for j in range(longest)]
    return [value / sum(raw) for value in raw]


def pair_batches(probes: Sequence[Probe], most: int, max_tokens: int) -> Iterator[list[int]]:
    """Indices of probes, similar lengths together: at most `most` pairs and max_tokens tokens of both rows.

    A pair that is longer still comes alone.
    """
    batch: list[int] = []
    for index in sorted(range(len(probes)), key=lambda i: len(probes[i].prompt)):
        tokens = 2 * len(_clean_row(probes[index]))
        if batch and (len(batch) >= most or (len(batch) + 1) * tokens > max_tokens):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def forward_tokens(teacher: Teacher, memory_bytes: int) -> int:
    """Tokens of a forward whose activations take at most about memory_bytes."""
    config = teacher.model.config
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    numbers = 6 * config.hidden_size + 3 * config.intermediate_size + 3 * heads * config.head_dim
    return max(1, int(memory_bytes // (numbers * teacher.model.dtype.itemsize)))


def usable(
    teacher: Teacher, probes: Sequence[Probe], *, decay: float, memory_bytes: int
) -> list[bool]:
    """For each pair: whether the teacher answers the clean prompt (greedily, every token), and its preference for
    that answer over the distractor falls by more than MIN_GAP logits on the corrupt one."""
    good = [False] * len(probes)
    tokens = forward_tokens(teacher, memory_bytes)
    with torch.inference_mode():
        for indices in pair_batches(probes, 64, tokens):
            batch = PairBatch.of([probes[i] for i in indices], decay, teacher.device)
            output = teacher.model.model(input_ids=batch.ids_2PT, use_cache=False)
            hidden_2PAC = batch.at_answers(output.last_hidden_state)
            m_2P = batch.readout(teacher.model, hidden_2PAC.unflatten(0, (2, -1)))
            right_P = batch.answered(teacher.model, hidden_2PAC[: len(indices)])
            for index, fine in zip(
                indices, (right_P & (m_2P[0] - m_2P[1] > MIN_GAP)).tolist(), strict=True
            ):
                good[index] = fine
    return good


def draw_pairs(
    teacher: Teacher, config: RunConfig, *, seed: int, progress: Progress = ignore_progress
) -> dict[str, dict[str, SubProbe]]:
    """The pairs of every sub-probe of every capability: drawn until scoring.pairs of them are usable.

    Sub-probes without a usable pair are left out, with a warning. progress counts sub-probes. Raises ConfigError
    where a capability keeps fewer than scoring.min_pairs, and for prompts that cannot be written.
    """
    scoring, found = config.scoring, {}
    total, done = len(scoring.retrieval) + len(scoring.general), 0
    for capability in ("retrieval", "general"):
        kinds: Sequence[ProbeKind] = getattr(scoring, capability)
        kept: dict[str, SubProbe] = {}
        for kind in kinds:
            kept[kind] = _draw(teacher, config, kind, seed)
            done += 1
            progress(done, total)
        if kinds:
            found[capability] = _checked(kept, capability, f"scoring.{capability}", scoring)
    if scoring.pairs_file is not None:
        path = resolve_path(scoring.pairs_file)
        for capability, probes in read_pairs(path, teacher.tokenizer).items():
            own = {name: _filtered(teacher, pairs, scoring) for name, pairs in probes.items()}
            other = found.get(capability, {})
            if twice := set(own) & set(other):
                raise ConfigError(
                    f"{path}: probe {min(twice)} is one of ours; allowed: another name"
                )
            found[capability] = other | _checked(own, capability, str(path), scoring)
    return found


def _draw(teacher: Teacher, config: RunConfig, kind: ProbeKind, seed: int) -> SubProbe:
    """Draws pairs of a kind, retrieval contexts by turns, until enough are usable or max_draws is reached."""
    scoring, probes = config.scoring, config.probes
    kept: list[Probe] = []
    drawn, most = 0, scoring.pairs * scoring.max_draws
    while len(kept) < scoring.pairs and drawn < most:
        wanted = range(drawn, min(most, drawn + scoring.pairs - len(kept)))
        pairs = [
            probe
            for i in wanted
            for probe in make_probes(
                teacher.tokenizer,
                kind,
                1,
                scoring.contexts[i % len(scoring.contexts)],
                keys=probes.multi_keys,
                digits=probes.digits,
                seed=seed,
                start=i,
            )
        ]
        kept += _filtered(teacher, pairs, scoring).pairs
        drawn += len(pairs)
    return SubProbe(tuple(kept), drawn)


def _filtered(teacher: Teacher, pairs: Sequence[Probe], scoring: ScoringConfig) -> SubProbe:
    memory = round(scoring.memory_gib * GIB)
    good = usable(teacher, pairs, decay=scoring.decay, memory_bytes=memory)
    return SubProbe(tuple(p for p, fine in zip(pairs, good, strict=True) if fine), len(pairs))


def _checked(
    probes: Mapping[str, SubProbe], capability: str, field: str, scoring: ScoringConfig
) -> dict[str, SubProbe]:
    """The sub-probes that have pairs. Raises ConfigError where those are too few."""
    counts = ", ".join(f"{name} {len(p.pairs)} of {p.drawn}" for name, p in probes.items())
    kept = sum(len(probe.pairs) for probe in probes.values())
    if kept < scoring.min_pairs:
        raise ConfigError(
            f"{field}: the teacher answers too few pairs of {capability} ({counts}); allowed: "
            f"{scoring.min_pairs} or more together (scoring.min_pairs), of sub-probes that it can answer"
        )
    for name, probe in probes.items():
        if not probe.pairs:
            _LOG.warning("scores: the teacher answers no pair of %s, which is left out", name)
    return {name: probe for name, probe in probes.items() if probe.pairs}
