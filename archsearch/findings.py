"""What doctor says, line by line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "open", "lacks", "WRONG"]
"""open: nobody knows, since the time was up. lacks: what was asked for by name cannot serve on this machine."""


@dataclass(frozen=True)
class Finding:
    """One line of doctor's report. needed: a run goes through it, or it was asked about by name."""

    topic: str
    text: str
    verdict: Verdict = "ok"
    needed: bool = True
