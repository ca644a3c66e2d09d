"""Who found how much front after how many trials: the tables and figures of search_bench."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import moocore
import numpy as np

from ..search.front import Scale
from .records import LabBook

CHECKPOINTS = (50, 100, 200, 400)
STEP = 5
"""Trials between two readings of the hypervolume."""
RIVAL, WITHIN = "nsga2", 100
"""Whose last hypervolume is to be reached, and within how many trials."""

SHARE = "share of box"


@dataclass(frozen=True)
class Row:
    """One search: values has volumes by trials (as text), front as losses' objectives, seconds, seeds, maps, deviation."""

    contestant: str
    seed: int
    values: Mapping[str, Any]

    def volume(self, trials: int) -> float | None:
        """Its hypervolume after so many trials."""
        found: float | None = self.values["volumes"].get(str(trials))
        return found


@dataclass(frozen=True)
class Standing:
    """All searches of a setting; everything is the hypervolume of all their fronts together."""

    setting: str
    rows: tuple[Row, ...]
    everything: float

    @classmethod
    def of(cls, setting: str, rows: Sequence[Row], scale: Scale) -> Standing:
        """Sorts them by contestant."""
        points = np.array([point for row in rows for point in row.values["front"]])
        ideal, reference = np.array(scale.ideal), np.array(scale.reference)
        losses = (points - ideal) / (reference - ideal)
        volume = float(moocore.hypervolume(losses, ref=np.ones(losses.shape[1])))
        return cls(setting, tuple(rows), volume)

    def contestants(self) -> dict[str, list[Row]]:
        """Their rows by contestant."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.contestant, []).append(row)
        return found

    def target(self) -> float | None:
        """The rival's mean hypervolume at its end, None where it has not got there."""
        last = [row.volume(CHECKPOINTS[-1]) for row in self.rows if row.contestant == RIVAL]
        reached = [volume for volume in last if volume is not None]
        return statistics.fmean(reached) if reached else None

    def trials_to_target(self, row: Row) -> int | None:
        """Trials after which a search has the target's hypervolume, to STEP trials; None where it never has."""
        target = self.target()
        if target is None:
            return None
        reached = [int(n) for n, volume in row.values["volumes"].items() if volume >= target]
        return min(reached, default=None)

    def add_to(self, book: LabBook, **facts: Any) -> None:
        """Adds every figure: of each checkpoint the mean, deviation and values by seed."""
        facts = {"setting": self.setting, **facts}
        for name, rows in self.contestants().items():
            for trials in CHECKPOINTS:
                values = [v for row in rows if (v := row.volume(trials)) is not None]
                if values:
                    book.add(
                        f"hypervolume of {name} after {trials} trials",
                        round(statistics.fmean(values), 5),
                        SHARE,
                        deviation=round(statistics.stdev(values), 5) if len(values) > 1 else None,
                        by_seed=[round(value, 5) for value in values],
                        seeds=rows[0].values["seeds"],
                        **facts,
                    )
            seconds = [row.values["seconds"] / max(map(int, row.values["volumes"])) for row in rows]
            book.add(f"time of {name}", round(statistics.fmean(seconds), 4), "s a trial", **facts)
            deviations = [row.values["deviation"] for row in rows]
            book.add(
                f"deviation of the evaluator on the front of {name}",
                round(statistics.fmean(deviations), 4),
                "nats of log",
                **facts,
            )
            if self.target() is not None:
                reached = [self.trials_to_target(row) for row in rows]
                median = sorted(n if n is not None else np.inf for n in reached)[len(reached) // 2]
                book.add(
                    f"trials of {name} to {RIVAL}'s hypervolume after {CHECKPOINTS[-1]}",
                    float(median) if np.isfinite(median) else -1.0,
                    "trials, median; -1 is never",
                    f"{RIVAL} {self.target():.5f}",
                    by_seed=reached,
                    **facts,
                )
        book.add("hypervolume of all fronts together", round(self.everything, 5), SHARE, **facts)


def print_standing(standing: Standing) -> None:
    """A line a contestant: mean hypervolume and its deviation over seeds at each checkpoint."""
    target = standing.target()
    print(f"\n{standing.setting}: all fronts together {standing.everything:.4f}", end="")
    print(f", {RIVAL} after {CHECKPOINTS[-1]} trials {target:.4f}" if target else "")
    heads = "".join(f"{trials:>16}" for trials in CHECKPOINTS)
    print(f"{'':16}{'seeds':>6}{heads}{f'to {RIVAL}':>22}{'s a trial':>11}{'deviation':>11}")
    for name, rows in standing.contestants().items():
        cells = ""
        for trials in CHECKPOINTS:
            values = [v for row in rows if (v := row.volume(trials)) is not None]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells += f"{statistics.fmean(values):>9.4f} {spread:.4f}" if values else f"{'-':>16}"
        reached = ",".join(str(standing.trials_to_target(row) or "-") for row in rows)
        last = [max(map(int, row.values["volumes"])) for row in rows]
        seconds = sum(row.values["seconds"] for row in rows) / sum(last)
        deviation = statistics.fmean(row.values["deviation"] for row in rows)
        print(f"{name:16}{len(rows):>6}{cells}{reached:>22}{seconds:>11.3f}{deviation:>11.4f}")
    guided = [row for row in standing.rows if row.contestant.startswith("guided")]
    within = [row for row in guided if (standing.trials_to_target(row) or WITHIN + 1) <= WITHIN]
    if guided and target:
        print(f"guided searches there within {WITHIN} trials: {len(within)} of {len(guided)}")
