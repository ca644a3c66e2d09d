"""The table of selectors and found maps: which candidate stands in a cell."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from archsearch.headmap import HeadMap
from archsearch.lab import selector_table
from archsearch.report.records import Rung
from tests.report.runs import SHAPE, made_candidate, made_rung, made_summary


def rung_with_programs() -> Rung:
    """A quarter chosen by two methods, by one of them worse, and a seed that also has another name."""
    heads = SHAPE.heads()
    quarter = [HeadMap.from_full_heads(SHAPE, heads[start : start + 6]) for start in (0, 6, 12)]
    made = (
        made_candidate(200, "program", "seed", quarter[0], 0.3),
        made_candidate(201, "random", "seed", quarter[1], 0.5),
        replace(made_candidate(202, "random", "seed", quarter[2], 0.2), also=("program_both",)),
    )
    return replace(made_rung(), candidates=(*made_rung().candidates, *made))


def test_cells_hold_the_best_of_their_method_and_share() -> None:
    rung = rung_with_programs()

    def number(name: str, share: float) -> int | None:
        found = selector_table.column(rung, name, share, "kl")
        return None if found is None else found.candidate

    assert number("program", 0.25) == 200
    assert number("random", 0.25) == number("program_both", 0.25) == 202
    assert number("causal", 0.5) == 1
    assert number("causal", 0.25) is None
    most = [c for c in rung.candidates if c.metrics["fa_share"] <= 0.52 and c.group != "random"]
    assert number("front", 0.5) == min(most, key=lambda c: c.metrics["kl"]).candidate
    searched = [c for c in most if c.group == "search"]
    assert number("search", 0.5) == min(searched, key=lambda c: c.metrics["kl"]).candidate


def test_columns_and_shares_can_be_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = replace(made_summary(), rungs=(rung_with_programs(),), config={"seed": 7})
    (tmp_path / "provenance.json").write_text(json.dumps({"calls": [{"versions": {"torch": "x"}}]}))
    monkeypatch.setattr(selector_table, "read_summary", lambda _: summary)
    figures = tmp_path / "figures.json"
    words = ["--columns", "program", "front", "--shares", "0.25", "--figures", str(figures)]
    monkeypatch.setattr(sys, "argv", ["selector_table", str(tmp_path), *words])
    selector_table.main()
    said = capsys.readouterr().out
    assert "| run seed | proxy tokens | FA share | program | front |" in said
    assert "| 7 | 0 | 0.25 | 0.3000 (" in said
    rows = {row["metric"]: row for row in json.loads(figures.read_text())}
    found = rows["kl, program at FA share 0.25, 0 proxy tokens, run seed 7"]
    assert (found["value"], found["versions"]) == (0.3, {"torch": "x"})
