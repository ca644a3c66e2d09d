"""What decoding keeps between calls: keys and values for FA heads, recurrent state for the others.

Stands apart from transformers' Cache classes on purpose: their layer interface is renamed from version to version,
and generate() needs no more than get_seq_length, reorder_cache and is_compileable of a cache that the model makes.

Shapes: B batch, S tokens, m KV heads, n query heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

SPARE_TOKENS = 256
"""A key-value store grows by this many tokens at a time, so that a decoding step copies nothing."""


class KeyValueStore:
    """Keys and values [B, m, S, D] of one layer, appended in place."""

    def __init__(self) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self.length = 0

    def append(self, k_BmTD: Tensor, v_BmTD: Tensor) -> tuple[Tensor, Tensor]:
        """Adds T tokens and returns all S keys and values."""
        stop = self.length + k_BmTD.shape[2]
        self._keys = _write(self._keys, k_BmTD, self.length)
        self._values = _write(self._values, v_BmTD, self.length)
        self.length = stop
        return self._keys[:, :, :stop], self._values[:, :, :stop]

    def before(self, new: int, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the `count` tokens that precede the last `new` ones."""
        assert self._keys is not None
        assert self._values is not None
        stop = self.length - new
        return self._keys[:, :, stop - count : stop], self._values[:, :, stop - count : stop]

    def reorder(self, index_B: Tensor) -> None:
        """Takes the batch rows index_B."""
        if self._keys is not None and self._values is not None:
            self._keys = self._keys.index_select(0, index_B.to(self._keys.device))
            self._values = self._values.index_select(0, index_B.to(self._values.device))

    def num_bytes(self) -> int:
        """Bytes of the tokens held, spare room not counted."""
        if self._keys is None:
            return 0
        batch, heads, _, dim = self._keys.shape
        return 2 * batch * heads * self.length * dim * self._keys.element_size()


def _write(buffer: Tensor | None, new_BmTD: Tensor, start: int) -> Tensor:
    batch, heads, count, dim = new_BmTD.shape
    if torch.is_grad_enabled() and (
        new_BmTD.requires_grad or (buffer is not None and buffer.requires_grad)
    ):
        # Writing in place would break the backward pass of an earlier call.
        return new_BmTD if buffer is None else torch.cat((buffer[:, :, :start], new_BmTD), dim=2)
    if buffer is None or buffer.shape[2] < start + count:
        grown = new_BmTD.new_empty(batch, heads, start + count + SPARE_TOKENS, dim)
        if buffer is not None:
            grown[:, :, :start] = buffer[:, :, :start]
        buffer = grown
    buffer[:, :, start : start + count] = new_BmTD
    return buffer


@dataclass
class GatedDeltaState:
    """Recurrent state of a layer's GDN heads."""

    memory_BnDD: Tensor | None = None
    """S of each head, rows are key dimensions; fp32."""
    conv_BTn3D: Tensor | None = None
    """The last inputs of the short convolution, where it is on."""


@dataclass
class NativeHybridState:
    """Window and slots of a layer's NHA heads, per KV head."""

    k_BoPD: Tensor | None = None
    """Keys of the window, not rotated; of the o KV heads that no FA head of the layer keeps anyway."""
    v_BoPD: Tensor | None = None
    g_BmPM: Tensor | None = None
    """Log decays of the tokens still in the window, to be used when they leave it."""
    valid_BP: Tensor | None = None
    """Which of the window's tokens are no padding."""
    slot_keys_BmDM: Tensor | None = None
    slot_values_BmMD: Tensor | None = None
    open_B: Tensor | None = None
    """Whether any token has entered the slots."""

    @property
    def held(self) -> int:
        """Tokens in the window, P."""
        return 0 if self.valid_BP is None else self.valid_BP.shape[1]


@dataclass
class LayerCache:
    """All that one layer keeps."""

    full: KeyValueStore = field(default_factory=KeyValueStore)
    gdn: GatedDeltaState = field(default_factory=GatedDeltaState)
    nha: NativeHybridState = field(default_factory=NativeHybridState)


class HydraHeadCache:
    """The cache of a whole model. Made by the model at the first call with use_cache; not shared between models."""

    is_compileable = False

    def __init__(self, num_layers: int) -> None:
        self.layers = [LayerCache() for _ in range(num_layers)]
        self._length = 0

    def __len__(self) -> int:
        return len(self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen so far, padding included; the same for every layer."""
        return self._length

    def advance(self, num_tokens: int) -> None:
        """Counts tokens that every layer has taken in."""
        self._length += num_tokens

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Takes the batch rows beam_idx, as beam search asks for."""
        for layer in self.layers:
            layer.full.reorder(beam_idx)
            for state in (layer.gdn, layer.nha):
                for name, tensor in _tensors(state):
                    setattr(state, name, tensor.index_select(0, beam_idx.to(tensor.device)))

    def num_bytes(self) -> int:
        """Bytes held for all sequences of the batch: what archsearch's cost model prices.

        Not counted: spare room, and the bookkeeping of an NHA window (log decays and flags of its tokens).
        """
        skipped = ("g_BmPM", "valid_BP", "open_B")
        total = 0
        for layer in self.layers:
            total += layer.full.num_bytes()
            for state in (layer.gdn, layer.nha):
                total += sum(
                    tensor.numel() * tensor.element_size()
                    for name, tensor in _tensors(state)
                    if name not in skipped
                )
        return total


def _tensors(state: GatedDeltaState | NativeHybridState) -> Iterator[tuple[str, Tensor]]:
    for entry in fields(state):
        tensor = getattr(state, entry.name)
        if tensor is not None:
            yield entry.name, tensor
