"""What a model loses or gains when a few heads of one layer change operator, for many such swaps in one sweep.

A swap adds a difference to the residual stream of its layer, and only the layers from there on run again. The other
operators read what the layer itself reads, so one pass over a layer gives the differences of all its swaps.

Legend: N sequences, B sequences of a batch, T tokens, S swaps, K swaps at once, H query heads, D head dim, X = H * D,
L layers, G KV heads, C hidden size, M positions of a batch that are read, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..attention.rotary import PositionEmbeddings
from ..data.niah import Probe
from ..evaluation.divergence import final_hidden, head_weight
from ..headmap import Head, ModelShape
from ..models.teacher import Teacher
from ..progress import Progress, ignore_progress
from .head_scores import HeadScores
from .inputs import GIB
from .streams import feed_forward
from .swap_readouts import AnswerNll, Kl, Read

MEMORY_BYTES = 4 * GIB
"""Working memory of a sweep where the caller names none."""

MOST_TOKENS = {"cpu": 8192, "cuda": 65536}
"""Tokens at once beyond which a larger batch is no faster."""

GDN_NUMBERS = 24
"""fp32 numbers that the torch path of a GDN head holds at once, a token and channel of its output."""

Swap = tuple[Head, ...]
"""Heads of one layer that change operator together."""


def heads_and_groups(shape: ModelShape) -> list[Swap]:
    """Every head alone and every whole KV group: a group of one head is the head's own swap."""
    return list(dict.fromkeys([*((head,) for head in shape.heads()), *shape.groups()]))


def scores_of(
    method: str, shape: ModelShape, swaps: Sequence[Swap], effects_SN: Tensor
) -> HeadScores:
    """The mean effect of each head and group over sequences, with its standard error, as scores.

    swaps are heads_and_groups(shape), in any order.
    """
    row_of = {swap: row for row, swap in enumerate(swaps)}
    heads = [row_of[head,] for head in shape.heads()]
    mean_S = effects_SN.mean(-1)
    groups_LG = mean_S[[row_of[group] for group in shape.groups()]].view(shape.num_layers, -1)
    scores_LH, spread_LH = (
        values_S[heads].view(shape.num_layers, -1)
        for values_S in (mean_S, standard_error(effects_SN))
    )
    return HeadScores.of(method, scores_LH, groups_LG, spread_LH)


def standard_error(effects_SN: Tensor) -> Tensor:
    """Standard error of the mean over sequences, [S]; zero for a single sequence, which says nothing of it."""
    count = effects_SN.shape[-1]
    if count == 1:
        return torch.zeros_like(effects_SN[:, 0])
    spread_S: Tensor = effects_SN.std(-1) / count**0.5
    return spread_S


@dataclass(frozen=True)
class Sweep:
    """A model, the swaps to try on it, and the memory to try them in.

    others[l] gives the outputs [B, T, H, D] of all heads of layer l under the other operator, from the layer's normed
    input and the RoPE tables. progress counts swaps times sequences. Raises ValueError for a swap that is empty or
    spans layers.
    """

    base: HydraHeadForCausalLM
    others: Sequence[nn.Module]
    swaps: Sequence[Swap]
    memory_bytes: int = MEMORY_BYTES
    progress: Progress = ignore_progress

    def __post_init__(self) -> None:
        for swap in self.swaps:
            if len({layer for layer, _ in swap}) != 1:
                raise ValueError(f"a swap needs heads of one layer, got {swap}")

    def kl(self, teacher: Teacher, tokens_NT: Tensor) -> tuple[Tensor, Tensor]:
        """KL(teacher || base) of each sequence [N], and of the base with each swap [S, N].

        Nats a token, fp64 on the CPU; the base has the teacher's lm_head. Raises ValueError where tokens are not
        [N, T] or empty.
        """
        if tokens_NT.ndim != 2 or tokens_NT.numel() == 0:
            raise ValueError(f"tokens have shape {tuple(tokens_NT.shape)}, not [N, T]")
        weight_VC = head_weight(self.base)
        step = self._logit_rows(weight_VC)

        def prepare(chosen: list[int]) -> tuple[Tensor, Read]:
            ids_BT = tokens_NT[chosen].long().to(self.base.device)
            hidden_MC = final_hidden(teacher.model, ids_BT)
            return ids_BT, Kl.of(hidden_MC, self.base.model.norm, weight_VC, step)

        return self._measure([tokens_NT.shape[1]] * len(tokens_NT), prepare)

    def answer_nll(self, probes: Sequence[Probe]) -> tuple[Tensor, Tensor]:
        """NLL of each probe's answer after its clean prompt, teacher-forced: of the base [N], with each swap [S, N].

        Nats an answer token, fp64 on the CPU. Raises ValueError for no probes, or one without an answer.
        """
        if not probes or not all(probe.answer for probe in probes):
            raise ValueError("answers to measure need probes, each with an answer")
        weight_VC = head_weight(self.base)
        step = self._logit_rows(weight_VC)

        def prepare(chosen: list[int]) -> tuple[Tensor, Read]:
            batch = [probes[index] for index in chosen]
            rows = [torch.tensor(probe.clean_row) for probe in batch]
            # Padded on the right: causal operators read nothing of it before the answer's end.
            ids_BT = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self.base.device)
            return ids_BT, AnswerNll.of(batch, self.base.model.norm, weight_VC, step)

        return self._measure([len(probe.clean_row) for probe in probes], prepare)

    def _measure(
        self, lengths: Sequence[int], prepare: Callable[[list[int]], tuple[Tensor, Read]]
    ) -> tuple[Tensor, Tensor]:
        """Reads base [N] and swaps [S, N] over sequences of those lengths."""
        count, total, done = len(self.swaps), len(self.swaps) * len(lengths), 0
        values_SN = torch.zeros(count + 1, len(lengths), dtype=torch.float64)
        most = self._tokens_at_once(max(lengths))
        with torch.inference_mode():
            for chosen in self._batches(lengths, most):
                ids_BT, read = prepare(chosen)
                for places, values_KB in self._streams(ids_BT, read, most):
                    values_SN[torch.tensor(places).unsqueeze(1), chosen] = values_KB.cpu()
                    if places != [count]:
                        done += values_KB.numel()
                        self.progress(done, total)
        return values_SN[-1], values_SN[:-1]

    def _streams(self, ids_BT: Tensor, read: Read, most: int) -> Iterator[tuple[list[int], Tensor]]:
        """Yields places in self.swaps with what was read of them, [K, B]; last of all S, the base's place.

        The base walks layer by layer, so that no layer's heads outlive it.
        """
        model = self.base.model
        num_layers, step = len(model.layers), max(1, most // ids_BT.numel())
        hidden_BTC = model.embed_tokens(ids_BT)
        tables = model.rotary.tables(
            torch.arange(ids_BT.shape[1], device=ids_BT.device)[None], hidden_BTC.dtype
        )
        for index, layer in enumerate(model.layers):
            x_BTC = layer.input_layernorm(hidden_BTC)
            heads_BTHD = layer.self_attn.heads(x_BTC, tables)
            weight_CX = layer.self_attn.o_proj.weight
            middle_BTC = hidden_BTC + layer.self_attn.o_proj(heads_BTHD.flatten(-2))
            here = [place for place, swap in enumerate(self.swaps) if swap[0][0] == index]
            if here:
                change_BTHD = _outputs(self.others[index], x_BTC, tables) - heads_BTHD
                change_BTHD = change_BTHD.to(heads_BTHD.dtype)
            for start in range(0, len(here), step):
                places = here[start : start + step]
                deltas = [_delta(weight_CX, change_BTHD, self.swaps[place]) for place in places]
                middle_MTC = (middle_BTC + torch.stack(deltas)).flatten(0, 1)
                del deltas
                out_MTC = model.run_layers(feed_forward(layer, middle_MTC), index + 1, num_layers)
                yield places, read(out_MTC.unflatten(0, (len(places), -1)))
            hidden_BTC = feed_forward(layer, middle_BTC)
        yield [len(self.swaps)], read(hidden_BTC.unsqueeze(0))

    def _batches(self, lengths: Sequence[int], most: int) -> Iterator[list[int]]:
        """Sequences of similar length, as many as let all swaps of a layer run at once."""
        per_layer = [0] * len(self.base.model.layers)
        for swap in self.swaps:
            per_layer[swap[0][0]] += 1
        batch: list[int] = []
        for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
            if batch and (len(batch) + 1) * lengths[index] * max(1, *per_layer) > most:
                yield batch
                batch = []
            batch.append(index)
        yield batch

    def _tokens_at_once(self, length: int) -> int:
        """Tokens of swapped streams, of sequences that long, whose later layers run within memory_bytes."""
        config, device = self.base.config, self.base.device.type
        heads, itemsize = config.num_attention_heads, self.base.dtype.itemsize
        width = heads * config.head_dim
        numbers = 6 * config.hidden_size + 3 * config.intermediate_size + 6 * width
        token_bytes: int = numbers * itemsize
        if any(layer.self_attn.gdn is not None for layer in self.base.model.layers):
            token_bytes += 4 * GDN_NUMBERS * width
        elif device == "cuda" and itemsize == 4:
            # Fused attention of fp32 on CUDA knows no grouped queries: torch then keeps the scores, about thrice.
            token_bytes += 3 * 4 * heads * length
        return max(1, min(MOST_TOKENS[device], self.memory_bytes // token_bytes))

    def _logit_rows(self, weight_VC: Tensor) -> int:
        """Positions whose logits, of which three copies are in use, take half of memory_bytes at most."""
        return max(1, self.memory_bytes // (2 * 3 * 4 * len(weight_VC)))


def _outputs(other: nn.Module, x_BTC: Tensor, tables: PositionEmbeddings) -> Tensor:
    """The heads' outputs under the other operator, [B, T, H, D], in that operator's own dtype."""
    dtype = next(other.parameters()).dtype
    cos, sin = tables
    outputs_BTHD: Tensor = other(x_BTC.to(dtype), (cos.to(dtype), sin.to(dtype)))
    return outputs_BTHD


def _delta(weight_CX: Tensor, change_BTHD: Tensor, swap: Swap) -> Tensor:
    """What a swap adds to the residual stream, [B, T, C]."""
    heads = [head for _, head in swap]
    weight_CHD = weight_CX.view(len(weight_CX), *change_BTHD.shape[-2:])
    chosen_CX = weight_CHD[:, heads].flatten(1)
    return change_BTHD[:, :, heads].flatten(-2) @ chosen_CX.T
