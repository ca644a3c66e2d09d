"""Clean and corrupt pairs: those that the teacher answers, and batches of them with their readout.

Legend: P pairs, T tokens, A answer tokens (the longest answer's), C hidden size, V vocabulary, S streams.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import zip_longest

import torch
from torch import Tensor

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..config import ProbeKind, RunConfig, ScoringConfig
from ..data.niah import Probe
from ..data.pairs_file import read_pairs
from ..data.tasks import GENERAL_KINDS, make_probes
from ..errors import ConfigError
from ..models.sources import resolve_path
from ..models.teacher import Teacher
from ..progress import Progress, ignore_progress
from .inputs import GIB, SubProbe

MIN_GAP = 0.1
"""Least m(x) - m(x'), in logits, at which a pair says anything about heads."""

NONE = SubProbe((), 0)

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
        for probe in probes:
            _check_lengths(probe)
        rows = [*(probe.clean_row for probe in probes), *(probe.corrupt_row for probe in probes)]
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


def _check_lengths(probe: Probe) -> None:
    same_prompts = len(probe.prompt) == len(probe.corrupt_prompt)
    if not same_prompts or len(probe.answer) != len(probe.distractor) or not probe.answer:
        raise ValueError("a pair needs prompts of one length and answers of one length")


def _weights(size: int, longest: int, decay: float) -> list[float]:
    raw = [decay**j if j < size else 0.0 for j in range(longest)]
    return [value / sum(raw) for value in raw]


def pair_batches(probes: Sequence[Probe], most: int, max_tokens: int) -> Iterator[list[int]]:
    """Indices of probes, similar lengths together: at most `most` pairs and max_tokens tokens of both rows.

    A pair that is longer still comes alone.
    """
    batch: list[int] = []
    for index in sorted(range(len(probes)), key=lambda i: len(probes[i].prompt)):
        tokens = 2 * len(probes[index].clean_row)
        if batch and (len(batch) >= most or (len(batch) + 1) * tokens > max_tokens):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def forward_tokens(teacher: Teacher, probes: Sequence[Probe], memory_bytes: int) -> int:
    """Tokens of a forward over probes whose activations take at most about memory_bytes."""
    config = teacher.model.config
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    numbers = 6 * config.hidden_size + 3 * config.intermediate_size + 3 * heads * config.head_dim
    if teacher.device.type == "cuda" and teacher.model.dtype == torch.float32:
        # Fused attention of fp32 on CUDA knows no grouped queries: torch then keeps the scores, about thrice.
        longest = max((len(probe.prompt) + len(probe.answer) for probe in probes), default=0)
        numbers += 3 * config.num_attention_heads * longest
    return max(1, int(memory_bytes // (numbers * teacher.model.dtype.itemsize)))


class Verdict(Enum):
    """What a pair is good for."""

    USABLE = "usable"
    """The teacher answers the clean prompt (greedily, every token), and its preference for that answer over the
    distractor falls by more than min_gap logits on the corrupt one."""
    WRONG = "wrong"
    """It answers otherwise."""
    CLOSE = "close"
    """It answers so, but its preference falls by less."""


def usable(
    teacher: Teacher,
    probes: Sequence[Probe],
    *,
    decay: float,
    memory_bytes: int,
    min_gap: float = MIN_GAP,
) -> list[bool]:
    """For each pair: whether judge finds it usable."""
    verdicts = judge(teacher, probes, decay=decay, memory_bytes=memory_bytes, min_gap=min_gap)
    return [verdict is Verdict.USABLE for verdict in verdicts]


def judge(
    teacher: Teacher,
    probes: Sequence[Probe],
    *,
    decay: float,
    memory_bytes: int,
    min_gap: float = MIN_GAP,
) -> list[Verdict]:
    """The verdict on each pair."""
    found = [Verdict.WRONG] * len(probes)
    tokens = forward_tokens(teacher, probes, memory_bytes)
    with torch.inference_mode():
        for indices in pair_batches(probes, 64, tokens):
            batch = PairBatch.of([probes[i] for i in indices], decay, teacher.device)
            output = teacher.model.model(input_ids=batch.ids_2PT, use_cache=False)
            hidden_2PAC = batch.at_answers(output.last_hidden_state)
            m_2P = batch.readout(teacher.model, hidden_2PAC.unflatten(0, (2, -1)))
            right_P = batch.answered(teacher.model, hidden_2PAC[: len(indices)])
            wide_P = m_2P[0] - m_2P[1] > min_gap
            for index, right, wide in zip(indices, right_P.tolist(), wide_P.tolist(), strict=True):
                if right:
                    found[index] = Verdict.USABLE if wide else Verdict.CLOSE
    return found


def draw_pairs(
    teacher: Teacher, config: RunConfig, *, seed: int, progress: Progress = ignore_progress
) -> dict[str, dict[str, SubProbe]]:
    """The pairs of every sub-probe of every capability: drawn until scoring.pairs of them are usable.

    A sub-probe without a usable pair is kept for its count, with a warning. Random weights, which answer nothing,
    get pairs as they come. progress counts sub-probes. Raises ConfigError where a capability has fewer than
    scoring.min_pairs, and for prompts that cannot be written.
    """
    scoring = config.scoring
    found: dict[str, dict[str, SubProbe]] = {}
    total, done = len(scoring.retrieval) + len(scoring.general), 0
    for capability in ("retrieval", "general"):
        kinds: Sequence[ProbeKind] = getattr(scoring, capability)
        for kind in kinds:
            found.setdefault(capability, {})[kind] = _draw(teacher, config, kind, seed)
            done += 1
            progress(done, total)
    if scoring.pairs_file is not None:
        path = resolve_path(scoring.pairs_file)
        for capability, probes in read_pairs(path, teacher.tokenizer).items():
            other = found.setdefault(capability, {})
            if twice := set(probes) & set(other):
                raise ConfigError(
                    f"{path}: probe {min(twice)} is one of ours; allowed: another name"
                )
            other |= {name: _filtered(teacher, pairs, config) for name, pairs in probes.items()}
    for capability, kept in found.items():
        _check(kept, capability, scoring)
    return found


def _draw(teacher: Teacher, config: RunConfig, kind: ProbeKind, seed: int) -> SubProbe:
    """Draws pairs of a kind until enough are usable or max_draws is reached, retrieval at every context alike."""
    scoring = config.scoring
    contexts = scoring.contexts[:1] if kind in GENERAL_KINDS else scoring.contexts
    parts = []
    for place, context in enumerate(contexts):
        wanted = len(range(place, scoring.pairs, len(contexts)))
        part = _draw_at(teacher, config, kind, context, wanted, seed)
        if wanted and not part.pairs and len(contexts) > 1:
            _LOG.warning("scores: the teacher answers no %s pair of %d tokens", kind, context)
        parts.append(part)
    by_turns = zip_longest(*(part.pairs for part in parts))
    pairs = tuple(pair for turn in by_turns for pair in turn if pair is not None)
    return replace(sum(parts, NONE), pairs=pairs)


def _draw_at(
    teacher: Teacher, config: RunConfig, kind: ProbeKind, context: int, wanted: int, seed: int
) -> SubProbe:
    found, most = NONE, wanted * config.scoring.max_draws
    while len(found.pairs) < wanted and found.drawn < most:
        count = min(most - found.drawn, wanted - len(found.pairs))
        pairs = make_probes(
            teacher.tokenizer,
            kind,
            count,
            context,
            keys=config.probes.multi_keys,
            digits=config.probes.digits,
            seed=seed,
            start=found.drawn,
        )
        found += _filtered(teacher, pairs, config)
    return found


def _filtered(teacher: Teacher, pairs: Sequence[Probe], config: RunConfig) -> SubProbe:
    if config.teacher.random_weights:
        return SubProbe(tuple(pairs), len(pairs))
    scoring = config.scoring
    verdicts = judge(
        teacher,
        pairs,
        decay=scoring.decay,
        memory_bytes=round(scoring.memory_gib * GIB),
        min_gap=scoring.min_gap,
    )
    kept = [p for p, verdict in zip(pairs, verdicts, strict=True) if verdict is Verdict.USABLE]
    wrong, close = (verdicts.count(verdict) for verdict in (Verdict.WRONG, Verdict.CLOSE))
    return SubProbe(tuple(kept), len(pairs), wrong, close)


def _check(probes: Mapping[str, SubProbe], capability: str, scoring: ScoringConfig) -> None:
    """Warns of sub-probes without pairs. Raises ConfigError where all together have too few."""
    kept = sum(len(probe.pairs) for probe in probes.values())
    if kept < scoring.min_pairs:
        counts = ", ".join(f"{name} {len(p.pairs)} of {p.drawn}" for name, p in probes.items())
        ours = capability in ("retrieval", "general")
        field = f"scoring.{capability}" if ours else "scoring.pairs_file"
        raise ConfigError(
            f"{field}: the teacher answers too few pairs of {capability}, or does not tell them from the corrupt "
            f"ones ({counts}); allowed: {scoring.min_pairs} or more together (scoring.min_pairs). "
            f"{_causes(sum(probes.values(), NONE), scoring, ours=ours)}"
        )
    for name, probe in probes.items():
        if not probe.pairs:
            _LOG.warning("scores: no pair of %s is usable: it is left out", name)


def _causes(dropped: SubProbe, scoring: ScoringConfig, *, ours: bool) -> str:
    """How many pairs failed for which cause, and what to change for each."""
    easier = "leave sub-probes out or lower scoring.contexts" if ours else "ask what it knows"
    causes = (
        (dropped.wrong, f"answered wrongly ({easier})"),
        (
            dropped.close,
            f"with a gap of {scoring.min_gap:g} logits at most (lower scoring.min_gap)",
        ),
    )
    said = [f"{count} {cause}" for count, cause in causes if count]
    return f"Dropped: {', '.join(said)}" if said else "None was dropped"
