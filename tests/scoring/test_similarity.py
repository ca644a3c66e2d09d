"""Similarity of blocks and heads against definitions written out, on features taken from whole forwards."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from archsearch.models.teacher import Teacher
from archsearch.scoring import similarity as module
from archsearch.scoring.similarity import (
    Measure,
    Similarity,
    block_similarity,
    head_diversity,
    measure_similarity,
)
from tests.random_models import random_teacher, random_tokens


def block_outputs(teacher: Teacher, ids_T: torch.Tensor) -> torch.Tensor:
    """What each layer's attention block puts out, [L, T, C] in fp64."""
    found: list[torch.Tensor] = []
    handles = [
        layer.self_attn.register_forward_hook(lambda _, __, out: found.append(out[0].double()))
        for layer in teacher.model.model.layers
    ]
    with torch.no_grad():
        teacher.model(ids_T[None])
    for handle in handles:
        handle.remove()
    return torch.stack(found)


def head_outputs(teacher: Teacher, ids_T: torch.Tensor) -> torch.Tensor:
    """What each head adds: o_proj of the layer's heads with all but one zeroed, [L, H, T, C] in fp64."""
    dim, found = teacher.shape.head_dim, []

    def hook(projection: torch.nn.Linear, args: tuple[torch.Tensor, ...]) -> None:
        alone = []
        for head in range(teacher.shape.num_heads):
            columns = torch.zeros_like(args[0])
            columns[..., head * dim : (head + 1) * dim] = 1
            alone.append(torch.nn.functional.linear(args[0] * columns, projection.weight)[0])
        found.append(torch.stack(alone).double())

    handles = [
        layer.self_attn.o_proj.register_forward_pre_hook(hook)
        for layer in teacher.model.model.layers
    ]
    with torch.no_grad():
        teacher.model(ids_T[None])
    for handle in handles:
        handle.remove()
    return torch.stack(found)


def hsic(x_TC: torch.Tensor, y_TC: torch.Tensor) -> float:
    """Unbiased HSIC with linear kernels, equation 5 of Song et al. (2012) word by word."""
    count = len(x_TC)
    off = 1 - torch.eye(count, dtype=torch.float64)
    k, j = (x_TC @ x_TC.T) * off, (y_TC @ y_TC.T) * off
    one = torch.ones(count, dtype=torch.float64)
    value = (k @ j).trace() + (one @ k @ one) * (one @ j @ one) / ((count - 1) * (count - 2))
    value -= 2 / (count - 2) * (one @ k @ j @ one)
    return float(value) / (count * (count - 3))


def inner(x_TC: torch.Tensor, y_TC: torch.Tensor) -> float:
    return float(((x_TC - x_TC.mean(0)) * (y_TC - y_TC.mean(0))).sum())


def expected(pieces_FTC: list[torch.Tensor], measure: Measure) -> torch.Tensor:
    """The measure of every two features over pieces of tokens, by its definition."""
    count = len(pieces_FTC[0])
    sums = torch.zeros(count, count, dtype=torch.float64)
    for piece in pieces_FTC:
        size = piece.shape[1]
        for a in range(count):
            for b in range(count):
                if measure == "cosine":
                    sums[a, b] += inner(piece[a], piece[b])
                else:
                    sums[a, b] += size * (size - 3) * hsic(piece[a], piece[b])
    return sums / (sums.diagonal()[:, None] * sums.diagonal()).sqrt()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("measure", ["cka", "cosine"])
def test_equals_the_definition(family: str, measure: Measure) -> None:
    teacher, tokens_NT = random_teacher(family), random_tokens(3, 37)
    blocks = [block_outputs(teacher, ids_T) for ids_T in tokens_NT]
    heads = [head_outputs(teacher, ids_T) for ids_T in tokens_NT]
    found_LL = block_similarity(teacher, tokens_NT, measure=measure)
    torch.testing.assert_close(found_LL, expected(blocks, measure), atol=1e-5, rtol=1e-4)
    found_LHH = head_diversity(teacher, tokens_NT, measure=measure)
    for layer in range(teacher.shape.num_layers):
        expected_HH = expected([layers[layer] for layers in heads], measure)
        torch.testing.assert_close(found_LHH[layer], expected_HH, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(found_LL, torch.eye(3, dtype=torch.float64), atol=0.02)


def test_long_sequences_are_compared_in_even_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_TOKENS", 12)
    teacher, tokens_NT = random_teacher(), random_tokens(1, 37)
    blocks_LTC = block_outputs(teacher, tokens_NT[0])
    pieces = list(blocks_LTC.split([10, 9, 9, 9], dim=1))
    found_LL = block_similarity(teacher, tokens_NT)
    torch.testing.assert_close(found_LL, expected(pieces, "cka"), atol=1e-5, rtol=1e-4)


def test_cka_sees_through_a_rotation_that_cosine_does_not() -> None:
    """Head 1 repeats head 0, which reads the same KV head, and writes to other directions."""
    teacher = random_teacher()
    attention, dim = teacher.model.model.layers[1].self_attn, teacher.shape.head_dim
    rotation, _ = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(0)))
    with torch.no_grad():
        attention.full.q_proj.weight[dim : 2 * dim] = attention.full.q_proj.weight[:dim]
        attention.o_proj.weight[:, dim : 2 * dim] = rotation @ attention.o_proj.weight[:, :dim]
    tokens_NT = random_tokens(2, 40)
    assert head_diversity(teacher, tokens_NT)[1, 0, 1] == pytest.approx(1, abs=1e-4)
    assert abs(head_diversity(teacher, tokens_NT, measure="cosine")[1, 0, 1]) < 0.9


def test_a_constant_head_is_like_nothing() -> None:
    teacher = random_teacher()
    with torch.no_grad():
        teacher.model.model.layers[0].self_attn.o_proj.weight[:, :8] = 0
    heads_HH = head_diversity(teacher, random_tokens(1, 20))[0]
    assert heads_HH[0].tolist() == [0.0] * 4
    assert heads_HH[1:, 1:].diagonal().tolist() == pytest.approx([1.0] * 3)


def test_file_round_trip_and_progress(tmp_path: Path) -> None:
    teacher, calls = random_teacher(), []
    found = measure_similarity(
        teacher, random_tokens(2, 16), progress=lambda done, total: calls.append((done, total))
    )
    assert calls == [(1, 2), (2, 2)]
    path = tmp_path / "similarity.json"
    found.save(path)
    assert Similarity.load(path) == found
    assert json.loads(path.read_text())["schema"] == 1
    assert (len(found.blocks), len(found.heads), len(found.heads[0])) == (3, 3, 4)


def test_malformed_data_are_refused() -> None:
    good = Similarity([[1.0]], [[[1.0, 0.5], [0.5, 1.0]]]).to_json()
    assert Similarity.from_json(good).heads[0][0][1] == 0.5
    wrong: dict[str, dict[str, object]] = {
        "schema": {"schema": 2},
        "blocks is not 1 x 1": {"blocks": [[1.0, 0.2]]},
        "heads of layer 0 is not 2 x 2": {"heads": [[[1.0, 0.5], [0.5]]]},
        "no finite number": {"blocks": [[math.nan]]},
        "malformed": {"heads": 3},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            Similarity.from_json(good | change)
    with pytest.raises(ValueError, match="schema 'list'"):
        Similarity.from_json([])


def test_too_few_tokens_are_refused() -> None:
    teacher = random_teacher()
    for tokens in (random_tokens(2, 3), random_tokens(0, 8), random_tokens(1, 8)[0]):
        with pytest.raises(ValueError, match="tokens have shape"):
            measure_similarity(teacher, tokens)
