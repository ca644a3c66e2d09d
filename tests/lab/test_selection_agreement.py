"""Rank correlations between readings, of figures whose order is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from archsearch.errors import ConfigError
from archsearch.lab import selection_agreement


def figures(tmp_path: Path, tokens: tuple[int, ...]) -> Path:
    """Ten maps of each of two shares; KL keeps its order, retrieval is turned round."""
    rows: list[dict[str, Any]] = [{"metric": "kl, teacher", "value": 0.0}]
    for share in (0.25, 0.125):
        for number in range(10):
            for at, count in enumerate(tokens):
                rows.append(
                    {
                        "metric": f"kl, random/head/{share}/{number}, {count} tokens, seed 0",
                        "value": share + number - at,
                        "selectors": [f"random/head/{share}/{number}"],
                        "tokens": count,
                        "fa_share": share + 0.001,
                        "head_map": [str(number), str(share)],
                        "retrieval_nll": number * (-1) ** at,
                        "figures": {"kl_docs": number**2},
                        "seed": 0,
                        "machine": "one",
                        "versions": {},
                    }
                )
    path = tmp_path / "selection.json"
    path.write_text(json.dumps(rows))
    return path


def test_correlations_are_by_metric_and_by_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    words = [str(figures(tmp_path, (0, 500))), "--figures", str(out)]
    monkeypatch.setattr("sys.argv", ["selection_agreement", *words])
    selection_agreement.main()
    found = {row["metric"]: row for row in json.loads(out.read_text())}
    of = "Spearman, {} at 0 tokens with {} at 500, FA share 0.125".format
    assert found[of("kl", "kl")]["value"] == pytest.approx(1)
    assert found[of("kl", "kl")]["maps"] == 10
    assert found[of("retrieval_nll", "retrieval_nll")]["value"] == pytest.approx(-1)
    assert found[of("kl", "retrieval_nll")]["value"] == pytest.approx(-1)
    assert "| all | 20 |" in capsys.readouterr().out


def test_one_reading_is_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [str(figures(tmp_path, (0,))), "--figures", str(tmp_path / "out.json")]
    monkeypatch.setattr("sys.argv", ["selection_agreement", *words])
    with pytest.raises(ConfigError, match="one reading alone"):
        selection_agreement.main()
