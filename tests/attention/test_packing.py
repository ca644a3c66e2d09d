"""Packed documents give what each gives alone: outputs, losses and gradients."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from archsearch.attention.modeling_hydrahead import HydraHeadForCausalLM
from archsearch.attention.packing import Documents
from tests.attention.test_modeling_hydrahead import MAPS, build

LENGTHS = ((5, 1, 70, 3), (64, 15), (79,))
"""Documents of each row; all rows have as many tokens."""
TOKENS = 79

GDN = {"rope": True, "norm": True, "gate": True, "bias": True, "conv": True}
FULL = {"rope_share": 0.0, "log_scale": True, "log_scale_tokens": 16, "gate": True}


def rows_and_bounds() -> tuple[Tensor, Tensor]:
    """Random ids [3, T], and the bounds of their documents."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(97, (len(LENGTHS), TOKENS), generator=generator)
    ends = torch.tensor([0, *(length for row in LENGTHS for length in row)]).cumsum(0)
    return ids, ends.int()


def documents_of(ids_BT: Tensor, bounds: Tensor) -> list[Tensor]:
    flat = ids_BT.flatten()
    return [flat[a:b][None] for a, b in pairwise(bounds.tolist())]


@pytest.mark.parametrize("name", ["F", "G", "FG"])
@pytest.mark.parametrize("options", [{}, {"gdn": GDN, "fa": FULL}])
def test_packed_equals_unpacked(name: str, options: dict[str, Any]) -> None:
    model = build(name, **options).requires_grad_(True)
    ids, bounds = rows_and_bounds()
    packed = model(input_ids=ids, cu_seqlens=bounds).logits
    apart = [model(input_ids=part).logits[0] for part in documents_of(ids, bounds)]
    torch.testing.assert_close(packed.flatten(0, 1), torch.cat(apart), atol=2e-5, rtol=2e-5)
    weights = torch.randn(packed.shape, generator=torch.Generator().manual_seed(5))
    parameters = list(model.parameters())
    found = torch.autograd.grad((packed * weights).sum(), parameters)
    loss = (torch.cat(apart) * weights.flatten(0, 1)).sum()
    expected = torch.autograd.grad(loss, parameters)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-4)


def test_documents_matter() -> None:
    model = build("FG")
    ids, bounds = rows_and_bounds()
    together = model(input_ids=ids).logits
    packed = model(input_ids=ids, cu_seqlens=bounds).logits
    torch.testing.assert_close(packed[0, :5], together[0, :5])
    assert float((packed[0, 6:] - together[0, 6:]).abs().amax(-1).min()) > 1e-4
    torch.testing.assert_close(packed[2], together[2])


def test_the_loss_asks_no_document_for_the_next_ones_first_token() -> None:
    model = build("FG")
    ids, bounds = rows_and_bounds()
    found = model(input_ids=ids, labels=ids, cu_seqlens=bounds).loss
    sums, count = 0.0, 0
    for part in documents_of(ids, bounds):
        if part.shape[1] > 1:
            sums += float(model(input_ids=part, labels=part).loss) * (part.shape[1] - 1)
            count += part.shape[1] - 1
    assert float(found) == pytest.approx(sums / count, rel=1e-5)


def test_positions_and_pairs_of_documents() -> None:
    documents = Documents.of(torch.tensor([0, 2, 5, 8, 10]), 2, 5)
    assert documents.positions_BT.tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 0, 1]]
    pairs = documents.pairs()[:, 0]
    assert pairs.sum((1, 2)).tolist() == [3 + 6, 6 + 3]
    assert pairs[0, 3].tolist() == [False, False, True, True, False]


@pytest.mark.parametrize("name", [name for name, rows in MAPS.items() if "N" in "".join(rows)])
def test_what_cannot_be_packed_is_refused(name: str) -> None:
    ids, bounds = rows_and_bounds()
    with pytest.raises(ValueError, match="NHA"):
        build(name)(input_ids=ids, cu_seqlens=bounds)


def test_packing_goes_with_neither_padding_nor_a_cache() -> None:
    model: HydraHeadForCausalLM = build("FG")
    ids, bounds = rows_and_bounds()
    with pytest.raises(ValueError, match="neither"):
        model(input_ids=ids, cu_seqlens=bounds, attention_mask=torch.ones_like(ids))
    cache = model.model(input_ids=ids, use_cache=True)[1]
    with pytest.raises(ValueError, match="neither"):
        model.model(input_ids=ids, cu_seqlens=bounds, past_key_values=cache)
    with pytest.raises(ValueError, match="cu_seqlens has shape"):
        model(input_ids=ids, cu_seqlens=torch.tensor([0, TOKENS]))
