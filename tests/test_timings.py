"""Seconds by stage and method: added up over calls, whatever the calls came to."""

from __future__ import annotations

from pathlib import Path

import pytest

from archsearch.errors import ConfigError
from archsearch.rundir import RunDir
from archsearch.timings import TIMINGS_FILE, read_timings, record_method, record_stage


def test_seconds_add_up_and_rows_keep_their_place(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    record_stage(run_dir, "teacher", 1.0, 50, "loaded")
    record_stage(run_dir, "scores", 2.5, 90, "stopped")
    record_method(run_dir, "causal", 2.0)
    record_stage(run_dir, "teacher", 1.0, 40, "loaded")
    record_method(run_dir, "causal", 0.25)
    record_method(run_dir, "attribution", 3.0)
    row = record_stage(run_dir, "scores", 1.25, 80, "done")
    assert row == {"stage": "scores", "seconds": 3.75, "peak_bytes": 90, "summary": "done"}
    stages, methods = read_timings(run_dir)
    assert [(s["stage"], s["seconds"]) for s in stages] == [("teacher", 2.0), ("scores", 3.75)]
    assert methods == [
        {"method": "causal", "seconds": 2.25},
        {"method": "attribution", "seconds": 3.0},
    ]


def test_a_file_of_before_methods_were_timed_is_read(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.write_json(TIMINGS_FILE, {"schema": 1, "stages": [{"stage": "data", "seconds": 4.0}]})
    assert record_stage(run_dir, "data", 1.0, 7, "")["seconds"] == 5.0
    assert read_timings(run_dir)[1] == []


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        "[3]",
        "null",
        '{"stages": null}',
        '{"stages": {}}',
        '{"stages": [{}]}',
        '{"stages": [3]}',
        '{"stages": [null]}',
        '{"stages": [{"stage": ["data"], "seconds": 1}]}',
        '{"stages": [{"stage": "data"}]}',
        '{"stages": [{"stage": "data", "seconds": "1"}]}',
        '{"stages": [{"stage": "data", "seconds": NaN}]}',
        '{"stages": [{"stage": "data", "seconds": 1, "peak_bytes": null}]}',
        '{"stages": [], "methods": null}',
        '{"stages": [], "methods": [{}]}',
    ],
)
def test_a_damaged_file_stops_a_reader_but_no_run(tmp_path: Path, text: str) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.write_text(TIMINGS_FILE, text)
    with pytest.raises(ConfigError, match=r"stages\.json: damaged"):
        read_timings(run_dir)
    record_method(run_dir, "causal", 2.0)
    assert read_timings(run_dir) == ([], [{"method": "causal", "seconds": 2.0}])
    run_dir.write_text(TIMINGS_FILE, text)
    assert record_stage(run_dir, "data", 1.0, 7, "")["seconds"] == 1.0
