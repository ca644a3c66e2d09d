"""Linear algebra of proposals takes one thread, and gives back what it found."""

from __future__ import annotations

import pytest

from archsearch.search.proposals import guided, threads
from archsearch.search.proposals.choice import make_proposals
from tests.search.proposals.damage import SHAPE, Damage, bits_config, search_with

needs_openblas = pytest.mark.skipif(
    threads.openblas() is None, reason="numpy's linear algebra is no OpenBLAS of its own"
)


@needs_openblas
def test_threads_are_given_back_after_an_error_too() -> None:
    found = threads.openblas()
    assert found is not None
    get, set_threads = found
    before = get()
    try:
        set_threads(2)
        with threads.one_thread():
            assert get() == 1
        assert get() == 2
        with pytest.raises(KeyError), threads.one_thread():
            raise KeyError
        assert get() == 2
    finally:
        set_threads(before)


@needs_openblas
def test_a_proposal_takes_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    found = threads.openblas()
    assert found is not None
    get, set_threads = found
    seen = []
    breed = guided.breed

    def watched(*given: object) -> object:
        seen.append(get())
        return breed(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(guided, "breed", watched)
    before = get()
    try:
        set_threads(2)
        damage, config = Damage(0), bits_config(trials=30)
        proposals = make_proposals(config, SHAPE, damage.scores, "bits@0")
        search_with(proposals, config, damage, 26)
        assert get() == 2
    finally:
        set_threads(before)
    assert set(seen) == {1}


def test_without_openblas_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "openblas", lambda: None)
    with threads.one_thread():
        pass
    with pytest.raises(KeyError), threads.one_thread():
        raise KeyError
