"""How alike the attention blocks of layers are, and the heads within a layer: the picture that motivates choosing heads.

A feature is what a block, or a head through its columns of o_proj, adds to the residual stream at each token. Both
are compared by the same measure, or the picture would show the measures' difference and not the heads'. One caveat
stays: a block is a sum over its heads, and sums are more alike than what they sum.

Legend: L layers, H query heads a layer, N sequences, T tokens, U tokens of a piece, C hidden size, D head dim,
X = H * D, F features, V numbers of a feature's vector.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..attention.rotary import PositionEmbeddings
from ..models.teacher import Teacher
from ..progress import Progress, ignore_progress
from ..rundir import replacing
from ..training.taps import visit_layers
from .head_scores import Rows, rows_of

SCHEMA = 1

Measure = Literal["cka", "cosine"]
"""cka: linear CKA with the unbiased HSIC (arXiv 1905.00414, 2010.15327): do two features tell tokens apart alike,
whatever directions they write to? cosine: do they write the same vectors, up to a constant one?"""

PIECE_TOKENS = 512
"""Most tokens that are compared with each other; longer sequences are cut into even pieces, whose sums add up."""

FEWEST_TOKENS = 4
"""The unbiased HSIC needs four."""


@dataclass(frozen=True)
class Similarity:
    """Similarity of every two layers' attention blocks, [L][L], and of every two heads of each layer, [L][H][H].

    In [-1, 1], 1 on the diagonal; 0 for a feature that is the same at all tokens.
    """

    blocks: Rows
    heads: list[Rows]
    measure: Measure = "cka"

    def __post_init__(self) -> None:
        _check_square("blocks", self.blocks, len(self.heads))
        for layer, rows in enumerate(self.heads):
            _check_square(f"heads of layer {layer}", rows, len(self.heads[0]))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data, with the schema number."""
        return {"schema": SCHEMA} | asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Similarity:
        """Reads to_json's form. Raises ValueError on another schema or malformed data."""
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        if found != SCHEMA:
            raise ValueError(f"similarity: schema {found!r} is not {SCHEMA}")
        try:
            return cls(data["blocks"], data["heads"], data["measure"])
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"similarity: malformed ({error})") from error

    def save(self, path: Path) -> None:
        """Writes the file; a reader sees the old one or the whole new one."""
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(self.to_json()) + "\n")

    @classmethod
    def load(cls, path: Path) -> Similarity:
        """Reads a file written by save. Raises ValueError where it is none."""
        return cls.from_json(json.loads(path.read_text()))


def measure_similarity(
    teacher: Teacher,
    tokens_NT: Tensor,
    *,
    measure: Measure = "cka",
    progress: Progress = ignore_progress,
) -> Similarity:
    """Both tables in one pass over the tokens; progress counts sequences.

    Keeps a piece's H features of one layer, [H, U, C], and a sequence's vectors of all blocks: L * T * U numbers for
    cka, L * T * C for cosine. Raises ValueError where tokens are not [N, T] or have no four tokens a sequence.
    """
    if tokens_NT.ndim != 2 or not len(tokens_NT) or tokens_NT.shape[1] < FEWEST_TOKENS:
        shape = tuple(tokens_NT.shape)
        raise ValueError(f"tokens have shape {shape}, not [N, {FEWEST_TOKENS} or more]")
    sums = _Sums(teacher, measure)
    with torch.inference_mode():
        for index, ids_1T in enumerate(tokens_NT.long().to(teacher.device).split(1)):
            visit_layers(teacher.model, ids_1T, sums.add)
            sums.close()
            progress(index + 1, len(tokens_NT))
    heads = [rows_of(_normalised(gram_HH)) for gram_HH in sums.heads_LHH]
    return Similarity(rows_of(_normalised(sums.blocks_LL)), heads, measure)


def block_similarity(teacher: Teacher, tokens_NT: Tensor, *, measure: Measure = "cka") -> Tensor:
    """Similarity of the outputs of two layers' attention blocks, fp64 [L, L]; as measure_similarity."""
    found = measure_similarity(teacher, tokens_NT, measure=measure)
    return torch.tensor(found.blocks, dtype=torch.float64)


def head_diversity(teacher: Teacher, tokens_NT: Tensor, *, measure: Measure = "cka") -> Tensor:
    """Similarity of two heads of one layer, fp64 [L, H, H]: the lower, the more diverse; as measure_similarity."""
    found = measure_similarity(teacher, tokens_NT, measure=measure)
    return torch.tensor(found.heads, dtype=torch.float64)


class _Sums:
    """Inner products of features' vectors, summed over pieces and sequences, in fp64."""

    def __init__(self, teacher: Teacher, measure: Measure) -> None:
        shape = teacher.shape
        self._layers = teacher.model.model.layers
        self._measure = measure
        self._blocks: list[list[Tensor]] = []
        self.blocks_LL = torch.zeros(shape.num_layers, shape.num_layers, dtype=torch.float64)
        self.heads_LHH = torch.zeros(
            shape.num_layers, shape.num_heads, shape.num_heads, dtype=torch.float64
        )

    def add(self, layer: int, _: Tensor, __: PositionEmbeddings, o_1THD: Tensor) -> None:
        """Takes in the heads of one layer; layers come in order."""
        weight_CX = self._layers[layer].self_attn.o_proj.weight.float()
        weight_HDC = weight_CX.T.unflatten(0, o_1THD.shape[-2:])
        vectors = []
        for piece_UHD in o_1THD[0].float().tensor_split(math.ceil(o_1THD.shape[1] / PIECE_TOKENS)):
            features_HUC = piece_UHD.transpose(0, 1) @ weight_HDC
            vectors_HV = _vectors(features_HUC, self._measure)
            self.heads_LHH[layer] += (vectors_HV @ vectors_HV.T).double().cpu()
            vectors.append(_vectors(features_HUC.sum(0, keepdim=True), self._measure)[0])
        self._blocks.append(vectors)

    def close(self) -> None:
        """Ends a sequence: all its layers have come."""
        for pieces in zip(*self._blocks, strict=True):
            vectors_LV = torch.stack(pieces)
            self.blocks_LL += (vectors_LV @ vectors_LV.T).double().cpu()
        self._blocks = []


def _vectors(features_FUC: Tensor, measure: Measure) -> Tensor:
    """Vectors [F, V] whose cosines are the measure: of the centred features, or of their U-centred Gram matrices.

    The inner product of two U-centred Gram matrices is U (U - 3) times their unbiased HSIC (Song et al. 2012;
    Székely and Rizzo 2014 for this form), so that CKA keeps within [-1, 1].
    """
    features_FUC = features_FUC - features_FUC.mean(1, keepdim=True)
    if measure == "cosine":
        return features_FUC.flatten(1)
    count = features_FUC.shape[1]
    gram_FUU = features_FUC @ features_FUC.mT
    gram_FUU.diagonal(dim1=1, dim2=2).zero_()
    rows_FU1 = gram_FUU.sum(-1, keepdim=True)
    gram_FUU -= (rows_FU1 + rows_FU1.mT) / (count - 2)
    gram_FUU += rows_FU1.sum(1, keepdim=True) / ((count - 1) * (count - 2))
    gram_FUU.diagonal(dim1=1, dim2=2).zero_()
    return gram_FUU.flatten(1)


def _normalised(gram_FF: Tensor) -> Tensor:
    """Inner products as cosines; a vector of zeros has none, and gets 0."""
    norm_F = gram_FF.diagonal().clamp(min=0).sqrt()
    scale_F = torch.where(norm_F > 0, 1 / norm_F, 0.0)
    return (gram_FF * scale_F.unsqueeze(1) * scale_F).clamp(-1, 1)


def _check_square(name: str, rows: Any, size: int) -> None:
    if len(rows) != size or any(len(row) != size for row in rows):
        raise ValueError(f"similarity: {name} is not {size} x {size}")
    for value in (value for row in rows for value in row):
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"similarity: {name} holds {value!r}, which is no finite number")
