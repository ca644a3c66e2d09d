"""What a scoring method gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..config import ScoringConfig
from ..data.niah import Probe
from ..models.supernet import Supernet
from ..models.teacher import Teacher
from ..progress import Progress, ignore_progress

GIB = 1024**3


@dataclass(frozen=True)
class SubProbe:
    """The pairs of one sub-probe that the teacher answers, perhaps none, of `drawn` that were tried.

    Of those dropped, it answers `wrong` differently, and `close` rightly but with too small a gap.
    """

    pairs: tuple[Probe, ...]
    drawn: int
    wrong: int = 0
    close: int = 0

    def __add__(self, other: SubProbe) -> SubProbe:
        return SubProbe(
            self.pairs + other.pairs,
            self.drawn + other.drawn,
            self.wrong + other.wrong,
            self.close + other.close,
        )


def pair_counts(
    capabilities: Mapping[str, Mapping[str, SubProbe]],
) -> dict[str, dict[str, dict[str, int]]]:
    """Pairs kept and drawn, by capability and sub-probe."""
    return {
        capability: {
            name: {"kept": len(probe.pairs), "drawn": probe.drawn} for name, probe in probes.items()
        }
        for capability, probes in capabilities.items()
    }


@dataclass(frozen=True)
class ScoreInputs:
    """Teacher, pairs by capability and sub-probe, held-out tokens [N, T], and the supernet, loaded when called."""

    teacher: Teacher
    capabilities: Mapping[str, Mapping[str, SubProbe]]
    heldout_NT: Tensor
    supernet: Callable[[], Supernet]
    config: ScoringConfig
    seed: int
    progress: Progress = ignore_progress

    @property
    def memory_bytes(self) -> int:
        """Working memory that a method may take beside the model."""
        return round(self.config.memory_gib * GIB)

    def counts(self) -> dict[str, dict[str, dict[str, int]]]:
        """Pairs kept and drawn, by capability and sub-probe, as a scores file tells them."""
        return pair_counts(self.capabilities)

    def pairs(self, *, capability: str | None = None) -> Sequence[Probe]:
        """All pairs, or those of one capability (none where the run leaves it out)."""
        return [
            pair
            for name, probes in self.capabilities.items()
            if capability in (None, name)
            for probe in probes.values()
            for pair in probe.pairs
        ]
