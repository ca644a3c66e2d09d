"""The brute force of the cost figures is the one that the tests of receiver effects check the shortcut against."""

from __future__ import annotations

import math

import pytest
import torch

from archsearch.lab.records import LabBook
from archsearch.lab.score_cost import check, largest_batch, patched, record
from archsearch.scoring.pairs import PairBatch
from tests.random_models import random_probes, random_teacher
from tests.scoring.test_receivers import DECAY, brute_force


def test_brute_force_equals_single_patched_forwards() -> None:
    teacher = random_teacher("qwen3")
    probe = next(p for p in random_probes(9) if brute_force(teacher, p) is not None)
    with torch.inference_mode():
        batch = PairBatch.of([probe], DECAY, teacher.device)
        kept = record(teacher, batch)
        heads = list(reversed(teacher.shape.heads()))
        m_K = patched(teacher, batch, kept, heads)
    expected_LH = brute_force(teacher, probe)
    assert expected_LH is not None
    for (layer, head), m in zip(heads, m_K, strict=True):
        effect = float((kept.m[0] - m) / (kept.m[0] - kept.m[1]))
        assert effect == pytest.approx(float(expected_LH[layer, head]), abs=1e-4)


def test_check_records_the_largest_difference() -> None:
    book = LabBook(0)
    with torch.inference_mode():
        check(random_teacher(), random_probes(2), book, "random")
    [row] = book.rows
    assert 0 < row["value"] < 1e-4


def test_largest_batch_stops_below_what_does_not_fit() -> None:
    def run(size: int) -> None:
        if size > 20:
            raise torch.OutOfMemoryError

    assert largest_batch(run, 100) == 16
    assert largest_batch(run, 18) == 18
    assert largest_batch(lambda _: math.pi, 7) == 7
