"""The teacher's answers kept: the same training as without, in memory and on disk, and never those to other questions."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from archsearch.config import DistillConfig
from archsearch.errors import ConfigError
from archsearch.evaluation.divergence import final_hidden
from archsearch.models.teacher import Teacher
from archsearch.training import target_cache
from archsearch.training.packing import Batch
from archsearch.training.targets import Chunk
from archsearch.training.teacher_logits import FORMS, TeacherLogits
from tests.random_models import VOCABULARY, random_tokens

CPU = torch.device("cpu")


class Watched:
    """TeacherLogits that count how often the teacher runs."""

    def __init__(self, teacher: Teacher, folder: Path | None = None, **fields: object) -> None:
        self.logits = TeacherLogits(teacher, DistillConfig(**fields), folder=folder)
        self.runs = 0
        inner = self.logits._hidden

        def counted(batch: Batch) -> Tensor:
            self.runs += 1
            return inner(batch)

        self.logits._hidden = counted  # type: ignore[method-assign]

    def loss(self, batch: Batch) -> float:
        """The divergence of a fixed student, which tells targets apart."""
        target = self.logits.target(self.logits.arrays(batch))
        generator = torch.Generator().manual_seed(3)
        hidden = torch.randn(batch.ids_BT.numel(), 32, generator=generator)
        logits = self.logits._head.logits(hidden)
        log_q = logits.log_softmax(-1)
        chunk = Chunk(slice(0, len(hidden)), hidden, log_q, logits.logsumexp(-1))
        return float(target.on_chunk(chunk).loss)


def batch_of(seed: int, shape: tuple[int, int] = (4, 24)) -> Batch:
    return Batch.of(random_tokens(*shape, seed=seed), CPU)


@pytest.mark.parametrize("form", ["exact", *FORMS])
def test_what_is_kept_is_what_was_made(form: str, teacher: Teacher, tmp_path: Path) -> None:
    uncached = Watched(teacher, teacher_logits="exact")
    kept = Watched(teacher, teacher_logits=form, top_k=VOCABULARY)
    stored = Watched(teacher, tmp_path, teacher_logits=form, top_k=VOCABULARY, cache_gib=1e-9)
    batches = [batch_of(seed) for seed in range(3)]
    expected = [uncached.loss(batch) for batch in batches]
    for watched in (kept, stored):
        first = [watched.loss(batch) for batch in batches]
        assert [watched.loss(batch) for batch in batches] == first
        assert watched.runs == (6 if form == "exact" else 3)
        relative = 2e-3 if form == "topk" else 0 if form in ("exact", "hidden") else 1e-5
        assert first == [pytest.approx(value, rel=relative, abs=0) for value in expected]


def test_top_k_is_close_and_below(teacher: Teacher) -> None:
    batch = batch_of(0)
    whole = Watched(teacher).loss(batch)
    found = [
        Watched(teacher, teacher_logits="topk", top_k=k).loss(batch) for k in (1, 16, 128, 299)
    ]
    assert found == sorted(found)
    assert found[-1] <= whole * (1 + 1e-3)
    assert found[2] > 0.9 * whole


def test_memory_comes_first_and_the_disk_takes_the_rest(teacher: Teacher, tmp_path: Path) -> None:
    # Room for two batches of 96 positions of 32 fp32 numbers.
    gib = 2.5 * 96 * 32 * 4 / 2**30
    watched = Watched(teacher, tmp_path, cache_gib=gib)
    for seed in range(4):
        watched.loss(batch_of(seed))
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2
    without = Watched(teacher, cache_gib=gib)
    for _ in range(2):
        for seed in range(4):
            without.loss(batch_of(seed))
    assert without.runs == 4 + 2


def test_workers_share_what_is_on_disk(teacher: Teacher, tmp_path: Path) -> None:
    first, second = (Watched(teacher, tmp_path, cache_gib=0.0) for _ in range(2))
    value = first.loss(batch_of(0))
    assert second.loss(batch_of(0)) == value
    assert (first.runs, second.runs) == (1, 0)


def test_nothing_is_taken_for_something_else(teacher: Teacher, tmp_path: Path) -> None:
    options = {"cache_gib": 0.0}
    Watched(teacher, tmp_path, **options).loss(batch_of(0))
    other = replace(teacher, fingerprint="another")
    for watched, batch in (
        (Watched(other, tmp_path, **options), batch_of(0)),
        (Watched(teacher, tmp_path, **options), batch_of(1)),
        (Watched(teacher, tmp_path, **options), batch_of(0, (8, 12))),
        (Watched(teacher, tmp_path, teacher_logits="topk", **options), batch_of(0)),
        (Watched(teacher, tmp_path, teacher_logits="topk", top_k=9, **options), batch_of(0)),
        (Watched(teacher, tmp_path, **options), Batch.of(random_tokens(4, 24, seed=0), CPU, 7)),
    ):
        watched.loss(batch)
        assert watched.runs == 1


def test_a_damaged_or_foreign_file_is_made_again(
    teacher: Teacher, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    value = Watched(teacher, tmp_path, cache_gib=0.0).loss(batch_of(0))
    (path,) = tmp_path.rglob("*.safetensors")
    whole = path.read_bytes()
    for broken in (whole[:-40], b"", whole.replace(teacher.fingerprint.encode(), b"random-9")):
        path.write_bytes(broken)
        watched = Watched(teacher, tmp_path, cache_gib=0.0)
        with caplog.at_level(logging.WARNING):
            assert watched.loss(batch_of(0)) == value
        assert watched.runs == 1
        assert path.read_bytes() == whole
    assert "made again" in caplog.text


def test_a_full_disk_costs_time_only(
    teacher: Teacher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(target_cache, "SPARED_DISK_BYTES", 2**60)
    watched = Watched(teacher, tmp_path, cache_gib=0.0)
    with caplog.at_level(logging.WARNING):
        values = [watched.loss(batch_of(0)) for _ in range(3)]
    assert len(set(values)) == 1
    assert watched.runs == 3
    assert caplog.text.count("the disk is full") == 1
    assert not list(tmp_path.rglob("*.safetensors"))


def test_bytes_are_those_of_the_arrays(teacher: Teacher) -> None:
    batch = batch_of(0)
    hidden = final_hidden(teacher.model, batch.ids_BT, batch.bounds_N).detach()
    for name, form in FORMS.items():
        arrays = form.keep(hidden, TeacherLogits(teacher, DistillConfig())._head, 8)
        size = sum(array.nbytes for array in arrays.values())
        assert size == batch.ids_BT.numel() * form.bytes_a_token(32, 4, 8), name


def test_more_tokens_than_there_are_cannot_be_kept(teacher: Teacher) -> None:
    with pytest.raises(ConfigError, match=r"distill\.top_k: 301; allowed: up to .* 300"):
        TeacherLogits(teacher, DistillConfig(teacher_logits="topk", top_k=301))
