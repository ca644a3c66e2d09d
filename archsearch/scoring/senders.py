"""Sender effects of every query head by path patching (Wang et al. 2022, arXiv 2211.00593, as HydraHead uses it).

A sender's output is replaced by its output on the corrupt prompt, but only along the paths into the q, k and v
inputs of the receivers found so far. Every other head keeps its clean output, MLPs are recomputed. Two streams a
sender say so exactly:

- the paths stream starts at the sender's change and passes the MLPs; a receiver attends on it, and its own change
  joins it, so that a later receiver sees it too (that is how receivers found one step further back act);
- the readout stream holds the receivers' changes alone: the sender's own direct path to the logits is not in it.
  Attention being frozen there, only the positions that predict the answer are needed.

Before the first token in which clean and corrupt prompt differ nothing changes: those positions are never run.
What no public text settles (open in the paper): receivers chain, and q, k and v inputs are patched at once.

Legend: P pairs, L layers, H query heads, D head dim, C hidden size, T tokens, U tokens from the first difference
on, A answer tokens, K senders at once, M = U + A, r receivers of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..attention.full import FullHeads
from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..attention.rotary import PositionEmbeddings
from ..data.niah import Probe
from ..headmap import Head
from ..models.teacher import Teacher
from ..progress import Progress, ignore_progress
from .inputs import GIB
from .pairs import MIN_GAP, PairBatch
from .streams import feed_forward, head_deltas, tail_precision


def sender_effects(
    teacher: Teacher,
    probes: Sequence[Probe],
    receivers: frozenset[Head],
    *,
    decay: float,
    min_gap: float = MIN_GAP,
    memory_bytes: int = 4 * GIB,
    progress: Progress = ignore_progress,
) -> Tensor:
    """IE_send of every head through `receivers` on every pair, fp32 [P, L, H] on the CPU.

    Zero for heads with no receiver in a later layer; NaN rows for pairs whose m(x) - m(x') is not above min_gap.
    m and the normalisation are those of receiver effects. Senders run in chunks of about memory_bytes.
    Raises ValueError where a pair's prompts or answers differ in length.
    """
    shape = teacher.shape
    effects_PLH = torch.zeros(len(probes), shape.num_layers, shape.num_heads)
    last = max((layer for layer, _ in receivers), default=0)
    with torch.inference_mode(), tail_precision(teacher.model.dtype):
        for index, probe in enumerate(probes):
            run = PairRun.of(teacher, probe, receivers, decay, memory_bytes)
            gap = run.gap
            stream_MC = run.start_MC
            for layer in range(last):
                middle_MC = stream_MC + run.attended(layer)
                effects_PLH[index, layer] = run.layer_effects(layer, middle_MC, memory_bytes) / gap
                stream_MC = feed_forward(teacher.model.model.layers[layer], middle_MC)
                progress(index * last + layer + 1, len(probes) * last)
            if not gap > min_gap:
                effects_PLH[index] = math.nan
    return effects_PLH


@dataclass
class LayerRecord:
    """One layer of the clean and corrupt run: from the first difference on, but for the receivers' inputs."""

    change_UHD: Tensor | None = None
    """Head outputs, corrupt less clean."""
    attended_MC: Tensor | None = None
    """What attention adds on the clean prompt; the answer positions once more at the end."""
    answers_2AC: Tensor | None = None
    """What attention adds at the answer positions, on the clean and on the corrupt prompt."""
    inputs_TC: Tensor | None = None
    """The normed input of attention on the clean prompt, kept in layers with receivers."""


@dataclass
class PairRun:
    """One pair: its records, and what it takes to run senders over them."""

    model: HydraHeadForCausalLM
    batch: PairBatch
    records: list[LayerRecord]
    heads: dict[int, list[FullHeads]]
    """The receivers of each layer that has some, a module each: no two share a grouped call, which fp32 kernels lack."""
    places: dict[int, list[int]]
    first: int
    """The first column in which the prompts differ."""
    start_MC: Tensor
    embeddings: PositionEmbeddings
    gap: float = 0.0
    answer_rows: list[int] = field(default_factory=list)
    """Where the answer positions lie among the U columns."""

    @classmethod
    def of(
        cls,
        teacher: Teacher,
        probe: Probe,
        receivers: frozenset[Head],
        decay: float,
        memory_bytes: int,
    ) -> PairRun:
        """Runs both prompts and keeps what senders need, on the CPU where it would take over half of memory_bytes."""
        model = teacher.model
        batch = PairBatch.of([probe], decay, teacher.device)
        clean, corrupt = batch.ids_2PT
        first = int((clean != corrupt).nonzero()[0]) if bool((clean != corrupt).any()) else 0
        places: dict[int, list[int]] = {}
        for layer, head in sorted(receivers):
            places.setdefault(layer, []).append(head)
        columns = batch.columns_PA[0]
        start_UC = model.model.embed_tokens(clean[first:]).float()
        run = cls(
            model,
            batch,
            [LayerRecord() for _ in model.model.layers],
            {layer: _alone(model, layer, chosen) for layer, chosen in places.items()},
            places,
            first,
            torch.cat([start_UC, start_UC[columns - first]]),
            model.model.rotary.tables(
                torch.arange(len(clean), device=clean.device)[None], torch.float32
            ),
            answer_rows=(columns - first).tolist(),
        )
        run.record(memory_bytes)
        return run

    def record(self, memory_bytes: int) -> None:
        """Fills records and gap from one forward of both prompts."""
        config = self.model.config
        columns = self.batch.ids_2PT.shape[1] - self.first
        width = config.num_attention_heads * config.head_dim + config.hidden_size
        total = len(self.records) * columns * width * self.model.dtype.itemsize
        place = self.batch.ids_2PT.device if total < memory_bytes / 2 else torch.device("cpu")
        handles = []
        for index, layer in enumerate(self.model.model.layers):
            record = self.records[index]
            handles.append(
                layer.self_attn.o_proj.register_forward_hook(self._keep_outputs(record, place))
            )
            if index in self.places:
                handles.append(layer.self_attn.register_forward_pre_hook(_keep_input(record)))
        try:
            self.model.model(input_ids=self.batch.ids_2PT, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        self.gap = self._gap()

    def _gap(self) -> float:
        """m(x) - m(x'), by the same fp32 route that senders take and receiver scores too."""
        embedded = self.model.model.embed_tokens(self.batch.ids_2PT)
        streams_2AC = self.batch.at_answers(embedded).float()
        for layer, record in zip(self.model.model.layers, self.records, strict=True):
            assert record.answers_2AC is not None
            streams_2AC = feed_forward(layer, streams_2AC + record.answers_2AC.float())
        hidden_2AC = self.model.model.norm(streams_2AC)
        m_21 = self.batch.readout(self.model, hidden_2AC.unsqueeze(1))
        return float(m_21[0, 0] - m_21[1, 0])

    def _keep_outputs(self, record: LayerRecord, place: torch.device) -> Any:
        def hook(_: Any, args: Any, output_2TC: Tensor) -> None:
            heads_2UHD = args[0][:, self.first :].unflatten(-1, (-1, self.model.config.head_dim))
            record.change_UHD = (heads_2UHD[1] - heads_2UHD[0]).to(place)
            attended_UC = output_2TC[0, self.first :]
            record.answers_2AC = self.batch.at_answers(output_2TC)
            record.attended_MC = torch.cat([attended_UC, attended_UC[self.answer_rows]]).to(place)

        return hook

    def attended(self, layer: int) -> Tensor:
        """What attention adds on the clean prompt at a layer, fp32 [M, C]."""
        kept = self.records[layer].attended_MC
        assert kept is not None
        return kept.to(self.start_MC.device).float()

    def layer_effects(self, layer: int, middle_MC: Tensor, memory_bytes: int) -> Tensor:
        """m(x) less m of every sender of a layer, [H] in logits, on the CPU; middle_MC is the clean stream there."""
        change_UHD = self.records[layer].change_UHD
        assert change_UHD is not None
        weight = self.model.model.layers[layer].self_attn.o_proj.weight
        chunks = []
        # A chunk holds its streams a few times over, and its receivers' q, k, v over all tokens.
        each = 16 * (len(middle_MC) + self.batch.ids_2PT.shape[1]) * middle_MC.shape[1]
        step = max(1, memory_bytes // (2 * each) - 1)
        for start in range(0, change_UHD.shape[1], step):
            part_UHD = change_UHD[:, start : start + step].to(middle_MC.device).float()
            columns = slice(start * part_UHD.shape[2], None)
            weight_CX = weight[:, columns][:, : part_UHD.shape[1] * part_UHD.shape[2]]
            deltas_KUC = head_deltas(weight_CX, part_UHD)
            chunks.append(self._run_chunk(layer, middle_MC, deltas_KUC))
        return torch.cat(chunks).float().cpu()

    def _run_chunk(self, layer: int, middle_MC: Tensor, deltas_KUC: Tensor) -> Tensor:
        """m of the clean stream less m of each sender's readout stream, [K]; the clean one takes the same route."""
        num_columns = deltas_KUC.shape[1]
        streams_SMC = middle_MC.repeat(1 + len(deltas_KUC), 1, 1)
        streams_SMC[1:, :num_columns] += deltas_KUC
        layers, last = self.model.model.layers, max(self.places)
        streams_SMC = feed_forward(layers[layer], streams_SMC)
        for index in range(layer + 1, len(layers)):
            if index == last + 1:
                # Past the last receiver only the readout matters.
                streams_SMC = streams_SMC[:, num_columns:].contiguous()
            attended_MC = self.attended(index)
            if index in self.places:
                changes_KUC = self._receivers_changes(index, streams_SMC[:, :num_columns])
                streams_SMC[1:, :num_columns] += changes_KUC
                streams_SMC[1:, num_columns:] += changes_KUC[:, self.answer_rows]
            streams_SMC += attended_MC[-streams_SMC.shape[1] :]
            streams_SMC = feed_forward(layers[index], streams_SMC)
        readout_SAC = streams_SMC[:, -len(self.answer_rows) :]
        hidden_SPAC = self.model.model.norm(readout_SAC).unsqueeze(1)
        m_S = self.batch.readout(self.model, hidden_SPAC)[:, 0]
        return m_S[0] - m_S[1:]

    def _receivers_changes(self, layer: int, streams_SUC: Tensor) -> Tensor:
        """What the layer's receivers add to each sender's streams beyond the clean stream's, [K, U, C]."""
        block = self.model.model.layers[layer]
        prefix_TC = self.records[layer].inputs_TC
        assert prefix_TC is not None
        normed_SUC = block.input_layernorm(streams_SUC).float()
        before_STC = prefix_TC[: self.first].float().expand(len(normed_SUC), -1, -1)
        inputs_STC = torch.cat([before_STC, normed_SUC], 1)
        outputs = [head(inputs_STC, self.embeddings) for head in self.heads[layer]]
        heads_SUrD = torch.cat(outputs, 2)[:, self.first :]
        change_KUX = (heads_SUrD[1:] - heads_SUrD[:1]).flatten(2)
        dim = heads_SUrD.shape[-1]
        columns = [head * dim + d for head in self.places[layer] for d in range(dim)]
        weight_CX = block.self_attn.o_proj.weight[:, columns].float()
        added_KUC: Tensor = change_KUX @ weight_CX.T
        return added_KUC


def _alone(model: HydraHeadForCausalLM, layer: int, heads: list[int]) -> list[FullHeads]:
    full = model.model.layers[layer].self_attn.full
    assert isinstance(full, FullHeads)
    return [full.select([head]).float() for head in heads]


def _keep_input(record: LayerRecord) -> Any:
    def hook(_: Any, args: Any) -> None:
        record.inputs_TC = args[0][0]

    return hook
