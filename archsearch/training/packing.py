"""A batch as the losses take it: its ids on the device, labels, and where its documents end.

Shapes: B sequences, T tokens, M = B * T positions, N documents.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..data.corpora import PackedBatch
from .losses import next_tokens
from .targets import IGNORED

RawBatch = Tensor | PackedBatch
"""Token ids [B, T] on the CPU, or with the starts of their documents."""


def ids_of(batch: RawBatch) -> Tensor:
    """The token ids of a batch."""
    return batch if isinstance(batch, Tensor) else batch.input_ids


@dataclass(frozen=True)
class Batch:
    """Token ids and what follows from them; tensors lie on the device, key tells batches apart by what they hold."""

    ids_BT: Tensor
    labels_M: Tensor
    num_labels: int
    bounds_N: Tensor | None
    """Bounds [N + 1] of documents that do not see each other, of the rows laid end to end; None for rows as they are."""
    key: str

    @classmethod
    def of(cls, batch: RawBatch, device: torch.device, end_token: int | None = None) -> Batch:
        """From a batch on the CPU; where it does not say where documents start, end_token ends one, None leaves rows whole."""
        ids_BT, starts_BT = ids_of(batch), None
        if isinstance(batch, PackedBatch):
            starts_BT = batch.starts
        elif end_token is not None:
            starts_BT = document_starts(ids_BT, end_token)
        labels_M = next_tokens(ids_BT, starts_BT)
        bounds_N = None if starts_BT is None else document_bounds(starts_BT)
        return cls(
            _moved(ids_BT, device),
            _moved(labels_M, device),
            int((labels_M != IGNORED).sum()),
            None if bounds_N is None else _moved(bounds_N, device),
            _digest(ids_BT, starts_BT),
        )


def document_starts(ids_BT: Tensor, end_token: int) -> Tensor:
    """Whether a document starts at a token, [B, T]: at a row's first and after each end_token."""
    return F.pad(ids_BT[:, :-1] == end_token, (1, 0), value=True)


def document_bounds(starts_BT: Tensor) -> Tensor:
    """The bounds [N + 1] in int32 of the N documents of all rows laid end to end."""
    places = starts_BT.flatten().nonzero().flatten().int()
    return F.pad(places, (0, 1), value=starts_BT.numel())


def _moved(x: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def _digest(ids_BT: Tensor, starts_BT: Tensor | None) -> str:
    digest = hashlib.blake2b(repr(tuple(ids_BT.shape)).encode(), digest_size=16)
    digest.update(ids_BT.numpy().tobytes())
    if starts_BT is not None:
        digest.update(starts_BT.numpy().tobytes())
    return digest.hexdigest()
