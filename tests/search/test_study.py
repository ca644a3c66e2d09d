"""A study belongs to one config, also where that was written before some of today's fields were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from archsearch.errors import ConfigError
from archsearch.rundir import RunDir
from archsearch.search.storage import open_storage
from archsearch.search.study import RungStudy, open_study
from tests.search.fakes import SHAPE, fake_config


def stored(tmp_path: Path, change: dict[str, Any] | None, *drop: tuple[str, str]) -> str:
    """The URL of a study database whose config lacks fields, or has others."""
    url = f"sqlite:///{tmp_path / 'study.db'}"
    study = open_study(open_storage(url), "one", fake_config(), RunDir(tmp_path))
    config = dict(study.user_attrs["config"])
    for section, field in drop:
        config[section] = {k: v for k, v in config[section].items() if k != field}
        if not field:
            del config[section]
    study.set_user_attr("config", config | (change or {}))
    return url


def test_a_study_from_before_a_field_goes_on(tmp_path: Path) -> None:
    url = stored(tmp_path, None, ("harness", ""), ("probes", "unseen"), ("data", "extra_heldout"))
    assert open_study(open_storage(url), "one", fake_config(), RunDir(tmp_path)).study_name == "one"


def test_a_field_that_is_new_and_set_is_a_change(tmp_path: Path) -> None:
    url = stored(tmp_path, None, ("probes", "unseen"))
    config = fake_config()
    changed = config.model_copy(
        update={"probes": config.probes.model_copy(update={"unseen": ("single",)})}
    )
    with pytest.raises(
        ConfigError, match=r"another config \(probes\.unseen: \[\] -> \['single'\]\)"
    ):
        open_study(open_storage(url), "one", changed, RunDir(tmp_path))


def test_a_config_that_is_none_of_todays_is_compared_as_it_is(tmp_path: Path) -> None:
    url = stored(tmp_path, {"seed": "seven"})
    with pytest.raises(ConfigError, match=r"another config \(seed: 'seven' -> 0\)"):
        open_study(open_storage(url), "one", fake_config(), RunDir(tmp_path))


def test_seconds_that_were_kept_as_a_sum_are_the_first_proxys(tmp_path: Path) -> None:
    storage = open_storage(f"sqlite:///{tmp_path / 'study.db'}")
    records = RungStudy(open_study(storage, "one", fake_config(), RunDir(tmp_path)), storage, SHAPE)
    assert records.seconds() == []
    for kept, read in ((12.5, [12.5]), ([1.0, 2.0], [1.0, 2.0])):
        records.remember("seconds", kept)
        assert records.seconds() == read
