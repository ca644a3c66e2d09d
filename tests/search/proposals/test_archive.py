"""Histories as arrays: in order of candidates, whatever order they ended in, and read anew where they are others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from archsearch.headmap import HeadMap
from archsearch.search.proposals.archive import FIRST_ROWS, Archive
from archsearch.search.proposals.base import Evaluated
from archsearch.search.proposals.units import Units
from tests.search.proposals.damage import SHAPE, Damage, bits_config, measure

UNITS = Units(SHAPE, whole_groups=True)
DAMAGE = Damage(6)
CONFIG = bits_config(
    representation="groups",
    objectives=[
        {"metric": "top1_agreement", "direction": "maximize"},
        {"metric": "cache_bytes", "direction": "minimize"},
    ],
    constraints=[{"metric": "fa_share", "max": 0.6}, {"metric": "kl", "max": 0.75}],
)
SIGNS = np.array([-1.0, 1.0])


def some_history(count: int, seed: int) -> list[Evaluated]:
    """Candidates in an order of their own; every fifth has no values."""
    rng = np.random.default_rng(seed)
    history = []
    for candidate in rng.permutation(count).tolist():
        head_map = UNITS.to_map(rng.random(UNITS.count) < rng.random())
        evaluated = measure(CONFIG, DAMAGE, candidate, head_map)
        history.append(Evaluated(candidate, head_map, None) if candidate % 5 == 0 else evaluated)
    return history


def check(archive: Archive, history: Sequence[Evaluated]) -> None:
    done = sorted((e for e in history if e.values), key=lambda e: e.candidate)
    found = archive.evidence()
    assert len(archive) == len(done)
    assert found.candidates == tuple(e.candidate for e in done)
    assert (found.shares_NU == UNITS.of_maps([e.head_map for e in done])).all()
    assert found.losses_ND.tolist() == [[-e.values[0], e.values[1]] for e in done if e.values]
    assert found.violations_NC.tolist() == [[e.violations[1]] for e in done]
    assert found.feasible_N.tolist() == [max(e.violations) <= 0 for e in done]
    assert 0 < found.feasible_N.sum() < len(done)
    assert archive.keys == {UNITS.key(UNITS.of_maps([e.head_map])[0]) for e in history}


def test_a_history_that_grows() -> None:
    history = some_history(3 * FIRST_ROWS, 1)
    archive = Archive(UNITS, SIGNS, [1])
    for count in (20, 21, 21, FIRST_ROWS + 30, len(history)):
        archive.read(history[:count])
        check(archive, history[:count])


@pytest.mark.parametrize("count", [30, 50])
def test_another_history_is_read_anew(count: int) -> None:
    archive = Archive(UNITS, SIGNS, [1])
    archive.read(some_history(40, 2))
    other = some_history(count, 3)
    archive.read(other)
    check(archive, other)


def test_a_map_with_a_split_group_has_no_key() -> None:
    archive = Archive(UNITS, SIGNS, [1])
    split = HeadMap.from_full_heads(SHAPE, [(1, 0)])
    archive.read([measure(CONFIG, DAMAGE, 3, split)])
    assert archive.keys == set()
    assert archive.evidence().shares_NU[0, 2] == pytest.approx(1 / 3)


def test_only_what_is_new_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    history = some_history(60, 4)
    archive = Archive(UNITS, SIGNS, [1])
    archive.read(history[:50])
    read: list[HeadMap] = []
    of_maps = UNITS.of_maps

    def watched(maps: Sequence[HeadMap]) -> object:
        read.extend(maps)
        return of_maps(maps)

    monkeypatch.setattr(UNITS, "of_maps", watched)
    archive.read(history)
    assert read == [e.head_map for e in history[50:]]
