"""The folder of a comparison: what it takes from a run, what it makes itself, and what its figures depend on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from archsearch.errors import ConfigError
from archsearch.lab.bench_folder import BenchFolder, read_config
from archsearch.rundir import RunDir


def folder_of(run: Path, name: str, *overrides: str) -> BenchFolder:
    run_dir = RunDir(run)
    return BenchFolder(run_dir, run.parent / name, read_config(run_dir, overrides))


def test_what_the_run_has_is_linked(scored_run: Path) -> None:
    folder = folder_of(scored_run, "same")
    assert folder.prepare() == 0
    for name in ("supernet.safetensors", "train.npy", "heldout.npy"):
        assert (folder.dir / name).resolve() == (scored_run / name).resolve()
    # niah_share is 0.5 and the run has no prompts: one for each row of text.
    assert np.load(folder.dir / "retrieval.npy").shape == (24, 96)
    assert folder.epochs(4608) == pytest.approx(1.0)


def test_a_run_may_be_moved_with_its_folder(scored_run: Path) -> None:
    folder = folder_of(scored_run, "run/bench")
    folder.prepare()
    moved = scored_run.rename(scored_run.with_name("moved"))
    there = folder_of(moved, "moved/bench")
    assert there.prepare() == 0
    assert there.settings() == folder_of(moved, "moved/bench").settings()
    assert (there.dir / "train.npy").resolve() == (moved / "train.npy").resolve()
    alone = folder_of(moved, "alone")
    alone.prepare()
    (alone.dir / "train.npy").unlink()
    (alone.dir / "train.npy").symlink_to("nowhere.npy")
    alone.prepare()
    assert alone.settings() == there.settings()


def test_rows_that_share_text_with_other_held_out_text_are_left_out(scored_run: Path) -> None:
    train = np.load(scored_run / "train.npy")
    other = np.random.default_rng(5).integers(2, 60, (3, 96)).astype(np.uint16)
    other[1, :80], other[2, 10:96] = train[7, :80], train[20, 10:96]
    path = scored_run.parent / "other.npy"
    np.save(path, other)
    options = [f"data.heldout={{source: file, path: {path}}}", "data.heldout_sequences=3"]
    folder = folder_of(scored_run, "other", *options)
    assert folder.prepare() == 2
    assert np.array_equal(np.load(folder.dir / "heldout.npy"), other)
    assert np.array_equal(np.load(folder.dir / "train.npy"), np.delete(train, [7, 20], axis=0))
    again = folder_of(scored_run, "other", *options)
    assert again.prepare() == 2
    assert again.settings() == folder.settings()
    with pytest.raises(ConfigError, match=r"heldout.*another folder"):
        folder_of(scored_run, "other").prepare()


def test_settings_tell_apart_what_changes_a_figure(scored_run: Path) -> None:
    first = folder_of(scored_run, "a")
    first.prepare()
    same = folder_of(scored_run, "a", "distill.cache_gib=1", "execution.workers=2")
    assert same.settings() == first.settings()
    found = {first.settings()}
    for option in ("distill.learning_rate=0.02", "probes.prompts=3", "student.full.gate=true"):
        found.add(folder_of(scored_run, "a", option).settings())
    assert len(found) == 4
    np.save(scored_run / "train.npy", np.load(scored_run / "train.npy")[::-1])
    assert first.settings() not in found


def test_a_run_without_twins_is_refused(scored_run: Path) -> None:
    (scored_run / "supernet.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"supernet\.safetensors: missing"):
        folder_of(scored_run, "none").prepare()
