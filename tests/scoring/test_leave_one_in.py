"""Leave-one-in against whole models cut with exactly those heads of full attention."""

from __future__ import annotations

import pytest
import torch

from archsearch.config import ScoringConfig
from archsearch.evaluation.divergence import TeacherReference, divergence
from archsearch.headmap import HeadMap
from archsearch.models.cut import cut
from archsearch.models.supernet import Supernet
from archsearch.models.teacher import Teacher
from archsearch.scoring.inputs import GIB, ScoreInputs
from archsearch.scoring.leave_one_in import leave_one_in, restored_kl
from archsearch.scoring.swaps import Swap, heads_and_groups
from tests.random_models import random_supernet, random_teacher, random_tokens


def brute_force(
    teacher: Teacher, supernet: Supernet, tokens_NT: torch.Tensor, swaps: list[Swap]
) -> torch.Tensor:
    """KL(all GDN) - KL(all GDN but the swap's heads) of each sequence, [S, N]."""
    references = [TeacherReference(teacher, row_1T) for row_1T in tokens_NT.split(1)]

    def kl(full: Swap) -> torch.Tensor:
        student = cut(teacher, supernet, HeadMap.from_full_heads(teacher.shape, full))
        return torch.tensor([divergence(student, r)["kl"] for r in references]).double()

    return kl(()) - torch.stack([kl(swap) for swap in swaps])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("memory_bytes", [1, GIB])
def test_equals_the_gain_of_the_cut_model(family: str, memory_bytes: int) -> None:
    teacher = random_teacher(family)
    supernet, tokens_NT = random_supernet(teacher), random_tokens(2, 70)
    swaps = heads_and_groups(teacher.shape)
    found_SN = restored_kl(teacher, supernet, tokens_NT, swaps, memory_bytes=memory_bytes)
    expected_SN = brute_force(teacher, supernet, tokens_NT, swaps)
    assert expected_SN.abs().min() > 1e-5
    assert expected_SN.max() > 1e-2
    torch.testing.assert_close(found_SN, expected_SN, atol=2e-5, rtol=1e-4)


def test_scores_are_means_over_sequences_with_their_standard_error() -> None:
    teacher = random_teacher("qwen3")
    supernet, tokens_NT = random_supernet(teacher), random_tokens(3, 33)
    calls: list[tuple[int, int]] = []
    inputs = ScoreInputs(
        teacher,
        {},
        tokens_NT,
        lambda: supernet,
        ScoringConfig(),
        seed=0,
        progress=lambda done, total: calls.append((done, total)),
    )
    scores = leave_one_in(inputs)
    heads: list[Swap] = [(head,) for head in teacher.shape.heads()]
    heads_SN = brute_force(teacher, supernet, tokens_NT, heads)
    groups_SN = brute_force(teacher, supernet, tokens_NT, teacher.shape.groups())
    expected = {
        "composite": heads_SN.mean(1).view(3, 4),
        "spread": heads_SN.std(1).view(3, 4) / 3**0.5,
        "groups": groups_SN.mean(1).view(3, 2),
    }
    for name, values in expected.items():
        found = torch.tensor(getattr(scores, name), dtype=torch.float64)
        torch.testing.assert_close(found, values, atol=2e-5, rtol=1e-4)
    assert scores.method == "leave_one_in"
    assert calls[-1] == (3 * 18, 3 * 18)


def test_teacher_is_left_as_it_was() -> None:
    teacher = random_teacher()
    before = {name: value.clone() for name, value in teacher.model.state_dict().items()}
    swaps = heads_and_groups(teacher.shape)
    restored_kl(teacher, random_supernet(teacher), random_tokens(1, 12), swaps)
    after = teacher.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert not any(module._forward_pre_hooks for module in teacher.model.modules())
