"""The teacher's answers by kind, keys and context, on the tiny teacher."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from archsearch.configfile import load_config
from archsearch.evaluation.retrieval import retrieval
from archsearch.lab import yardsticks
from archsearch.models.teacher import load_teacher
from archsearch.search.trial import evaluation_probes

TINY = "search_spaces/tiny.yaml"


def test_figures_are_those_of_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = tmp_path / "own.jsonl"
    line = {"prompt": "The special magic number for shark is 8978.", "kind": "multikey"}
    rows = [line | {"answer": " It", "keys": keys} for keys in (2, 4)]
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["probes.prompts=4", f"probes.files=[{{name: own, path: {answers}}}]"]
    command = ["yardsticks", TINY, "--keys", "4", "24", "--contexts", "384", "512"]
    for option in options:
        command += ["--set", option]
    figures = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", [*command, "--figures", str(figures)])
    yardsticks.main()
    found = {
        (row["kind"], row["keys"], row["context"], row["metric"]): row
        for row in json.loads(figures.read_text())
    }
    kinds = [("single", 1), ("multikey", 4), ("multikey", 24)]
    cells = [(kind, keys, context) for kind, keys in kinds for context in (384, 512)]
    cells += [("own multikey2", 0, 16), ("own multikey4", 0, 16)]
    figures_of_each = ("share answered", "answer NLL")
    assert set(found) == {(*cell, name) for cell in cells for name in figures_of_each}
    for (*_, name), row in found.items():
        if name == "share answered":
            assert row["decides"] == (row["value"] >= yardsticks.DECIDES)
    config = load_config(TINY, [*options, "probes.contexts=[384, 512]", "probes.multi_keys=24"])
    teacher = load_teacher(config.teacher)
    measured = retrieval(teacher.model, evaluation_probes(teacher, config))
    for kind, keys in (("single", 1), ("multikey", 24)):
        for context in (384, 512):
            value = found[kind, keys, context, "answer NLL"]["value"]
            assert value == pytest.approx(measured[f"niah_{kind}_nll@{context}"], abs=1e-5)
            share = found[kind, keys, context, "share answered"]["value"]
            assert share == measured[f"niah_{kind}_match@{context}"]
