"""What a study of proxies holds, and its file fidelity.json. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from ..errors import ConfigError
from ..headmap import HeadMap, ModelShape
from ..rundir import RunDir

SCHEMA = 1
FIDELITY_FILE = "fidelity.json"

Group = Literal["good", "mixed"]
"""Good maps of one FA share, which are hard to tell apart; maps at shares of all sizes."""
Key = tuple[tuple[str, ...], int]
"""A run of a study: the map's layers, and 0 for the first seed or 1 for the second."""


@dataclass(frozen=True)
class Settings:
    """How every map of a study is trained."""

    lengths: tuple[int, ...]
    """Tokens at which a map is read, from 0 to the end."""
    decay_share: float
    """Share of a reading's tokens, the last ones, over which its fork's rate falls."""
    batch_tokens: int
    proxies: tuple[int, ...] = ()
    """Those of the lengths that are the search's own proxies: there a map is trained as a trial is, by itself. Studies of
    earlier versions have none, and read all lengths off one trunk."""
    proxy_decay_share: float = 1.0
    """distill.decay_share, which says what a trial of a later proxy goes on from."""

    @property
    def tokens(self) -> int:
        """Those of a whole run."""
        return self.lengths[-1]

    @property
    def trunk_lengths(self) -> tuple[int, ...]:
        """Lengths that are read off one run at a constant rate."""
        return tuple(length for length in self.lengths if length not in self.proxies)

    @property
    def trained_tokens(self) -> int:
        """Tokens of a whole run, of the forks that its shorter readings take, and of the proxies."""
        forks = self.decay_share * sum(self.trunk_lengths[:-1])
        again = self.proxy_decay_share * sum(self.proxies[:-1])
        proxies = max(self.proxies, default=0) + (again if self.proxy_decay_share < 1 else 0)
        return self.tokens + round(forks + proxies)


@dataclass(frozen=True)
class LongSpec:
    """What a worker has to train. seed: 0 for the batches of every candidate, 1 for others."""

    head_map: dict[str, Any]
    """HeadMap.to_json()."""
    settings: Settings
    seed: int = 0
    checkpoint: str | None = None
    """Where training is kept that takes long, to go on from after a kill."""


@dataclass(frozen=True)
class Subject:
    """A head map that is trained long. origin says where it comes from; predictors cost no training, smaller is better."""

    origin: str
    group: Group
    head_map: HeadMap
    predictors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Reading:
    """What is measured of a student after so many tokens. loss is that of its last steps, None without any."""

    tokens: int
    metrics: Mapping[str, float]
    loss: float | None = None
    seconds: float = 0.0
    """Of training up to here, forks of shorter readings left out."""


@dataclass(frozen=True)
class Run:
    """A map that was trained from its supernet weights to the end. seconds: all in all, readings too."""

    readings: tuple[Reading, ...]
    seconds: float

    def value(self, metric: str, tokens: int) -> float:
        """A metric of the reading at so many tokens. Raises KeyError where there is none."""
        for reading in self.readings:
            if reading.tokens == tokens:
                return reading.metrics[metric]
        raise KeyError(tokens)


@dataclass(frozen=True)
class Agreement:
    """How well a proxy orders the maps of a group as the long training's metric does."""

    metric: str
    group: str
    proxy: str
    tokens: int
    """What the proxy costs a map in training."""
    maps: int
    spearman: float
    spearman_range: tuple[float, float]
    """That of 95% of bootstrap draws of maps."""
    regret: float | None = None
    """What choosing the best by the proxy costs, in the metric; None where FA shares differ."""
    regret_range: tuple[float, float] | None = None
    regret_of_three: float | None = None
    """The same with the best three by the proxy going on to long training."""
    front_lost: float | None = None
    """Where FA shares differ: the share of the long runs' hypervolume (metric, cache) that the proxy's front lacks."""


@dataclass(frozen=True)
class Ceiling:
    """How far two long runs with different seeds agree themselves."""

    metric: str
    group: str
    maps: int
    """Those that were trained twice."""
    spearman: float
    reliability: float
    """Share of the group's variance that is no noise."""
    deviation: float
    """That of one run, in the metric."""


@dataclass(frozen=True)
class Study:
    """Maps, their long runs, and what they say of cheaper proxies."""

    shape: ModelShape
    settings: Settings
    subjects: tuple[Subject, ...] = ()
    runs: Mapping[Key, Run] = field(default_factory=dict)
    failures: Mapping[Key, str] = field(default_factory=dict)
    agreements: tuple[Agreement, ...] = ()
    ceilings: tuple[Ceiling, ...] = ()

    def with_run(self, key: Key, run: Run) -> Study:
        """The study with one more run."""
        failures = {other: reason for other, reason in self.failures.items() if other != key}
        return replace(self, runs={**self.runs, key: run}, failures=failures)

    def with_failure(self, key: Key, reason: str) -> Study:
        """The study with a run that failed."""
        return replace(self, failures={**self.failures, key: reason})

    def of(self, subject: Subject, seed: int = 0) -> Run | None:
        """A subject's run."""
        return self.runs.get((subject.head_map.layers, seed))

    def to_json(self) -> dict[str, Any]:
        """The content of fidelity.json."""
        return {
            "schema": SCHEMA,
            "model": asdict(self.shape),
            "settings": asdict(self.settings),
            "subjects": [{**asdict(s), "head_map": list(s.head_map.layers)} for s in self.subjects],
            "runs": [
                {"head_map": list(layers), "seed": seed, **asdict(run)}
                for (layers, seed), run in self.runs.items()
            ],
            "failures": [
                {"head_map": list(layers), "seed": seed, "reason": reason}
                for (layers, seed), reason in self.failures.items()
            ],
            "agreements": [asdict(row) for row in self.agreements],
            "ceilings": [asdict(row) for row in self.ceilings],
        }

    @classmethod
    def from_json(cls, data: Any) -> Study:
        """Reads to_json's form. Raises ValueError on another schema or a malformed study."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"schema {found!r} is not {SCHEMA}")
        try:
            shape = ModelShape(**data["model"])
            settings = Settings(**_tuples(data["settings"], "lengths", "proxies"))
            ranges = ("spearman_range", "regret_range")
            return cls(
                shape,
                settings,
                tuple(_subject(shape, row) for row in data["subjects"]),
                {_key(row): _run(row) for row in data["runs"]},
                {_key(row): row["reason"] for row in data["failures"]},
                tuple(Agreement(**_tuples(row, *ranges)) for row in data["agreements"]),
                tuple(Ceiling(**row) for row in data["ceilings"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"malformed ({error!r})") from error


def read_study(run_dir: RunDir, name: str = FIDELITY_FILE) -> Study | None:
    """The study of a run, None where there is none. Raises ConfigError where its file is damaged."""
    if not (run_dir / name).exists():
        return None
    try:
        return Study.from_json(run_dir.read_json(name))
    except ValueError as error:
        raise ConfigError(f"{run_dir / name}: damaged or of another version: {error}") from error


def write_study(run_dir: RunDir, study: Study) -> None:
    """Writes fidelity.json in one step."""
    run_dir.write_json(FIDELITY_FILE, study.to_json())


def _subject(shape: ModelShape, row: dict[str, Any]) -> Subject:
    return Subject(**{**row, "head_map": HeadMap(shape, tuple(row["head_map"]))})


def _key(row: dict[str, Any]) -> Key:
    return tuple(row["head_map"]), row["seed"]


def _run(row: dict[str, Any]) -> Run:
    return Run(tuple(Reading(**reading) for reading in row["readings"]), row["seconds"])


def _tuples(row: dict[str, Any], *names: str) -> dict[str, Any]:
    lists = {name: tuple(row[name]) for name in names if row.get(name) is not None}
    return {**row, **lists}
