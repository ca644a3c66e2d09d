"""Layer restoration against whole models cut with one layer of full attention."""

from __future__ import annotations

import pytest
import torch

from archsearch.config import ScoringConfig
from archsearch.evaluation.divergence import TeacherReference, divergence
from archsearch.headmap import HeadMap, Operator
from archsearch.models.cut import cut
from archsearch.scoring.inputs import ScoreInputs
from archsearch.scoring.restoration import restoration
from tests.random_models import random_supernet, random_teacher, random_tokens


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_head_has_the_gain_of_its_layer(family: str) -> None:
    teacher = random_teacher(family)
    supernet, tokens_NT = random_supernet(teacher), random_tokens(3, 40)
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
    scores = restoration(inputs)
    references = [TeacherReference(teacher, row_1T) for row_1T in tokens_NT.split(1)]

    def kl(head_map: HeadMap) -> torch.Tensor:
        student = cut(teacher, supernet, head_map)
        return torch.tensor([divergence(student, r)["kl"] for r in references]).double()

    linear = HeadMap.uniform(teacher.shape, Operator.GDN)
    for layer in range(teacher.shape.num_layers):
        restored = linear.with_operator([(layer, head) for head in range(4)], Operator.FULL)
        gain_N = kl(linear) - kl(restored)
        assert abs(float(gain_N.mean())) > 1e-3
        mean, error = float(gain_N.mean()), float(gain_N.std()) / 3**0.5
        assert scores.composite[layer] == pytest.approx([mean] * 4, abs=2e-5)
        assert scores.groups[layer] == pytest.approx([mean] * 2, abs=2e-5)
        assert scores.spread[layer] == pytest.approx([error] * 4, abs=2e-5)
        assert len({*scores.composite[layer], *scores.groups[layer]}) == 1
    assert scores.method == "restoration"
    assert calls[-1] == (9, 9)
