"""Scores of heads and the similarity of layers as a report shows them: plain data from a run's files, no torch.

Legend: L layers, H query heads a layer, G KV heads a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..errors import ConfigError
from ..headmap import ModelShape
from ..rundir import PAIRS_FILE, SCORES, SIMILARITY_FILE, RunDir, score_file

SCORE_SCHEMAS = (1, 2)
"""Files of schema 1 may lack groups."""
SIMILARITY_SCHEMAS = (1,)

T = TypeVar("T")

Rows = list[list[float]]
"""A number a head as [L][H], or a KV group as [L][G]."""

PairCounts = Mapping[str, Mapping[str, Mapping[str, int]]]
"""Capability -> sub-probe -> pairs `kept` and `drawn`."""

_CAPABILITY_ROWS = ("recv", "send", "consistency", "score", "recv_spread", "send_spread")


@dataclass(frozen=True)
class CapabilityScores:
    """The evidence on one capability, [L][H] each; None where the file has none."""

    recv: Rows | None = None
    send: Rows | None = None
    consistency: Rows | None = None
    score: Rows | None = None
    recv_spread: Rows | None = None
    send_spread: Rows | None = None
    probes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Sub-probe -> pairs `kept` and `drawn`."""

    @property
    def shown(self) -> Rows | None:
        """What a picture shows: the score, or the receiver effect where there is none."""
        return self.recv if self.score is None else self.score


@dataclass(frozen=True)
class Scores:
    """What one method says of every head: composite and spread [L][H], groups [L][G]."""

    method: str
    num_kv_heads: int
    composite: Rows
    spread: Rows | None = None
    groups: Rows | None = None
    capabilities: Mapping[str, CapabilityScores] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.composite)

    @property
    def num_heads(self) -> int:
        """Query heads of a layer."""
        return len(self.composite[0])

    def kv_head(self, head: int) -> int:
        """The KV head that a query head reads."""
        return head // (self.num_heads // self.num_kv_heads)


@dataclass(frozen=True)
class Similarity:
    """How alike the attention blocks of two layers are, [L][L], and two heads of one layer, [L][H][H], by a measure."""

    blocks: Rows
    heads: list[Rows] | None = None
    measure: str = ""


@dataclass(frozen=True)
class ScoreFiles:
    """All that a run has on its heads."""

    causal: Scores | None = None
    others: tuple[Scores, ...] = ()
    similarity: Similarity | None = None
    pairs: PairCounts = field(default_factory=dict)
    """Pairs that heads were scored by, whatever the methods."""

    def __bool__(self) -> bool:
        return bool(self.causal or self.others or self.similarity)


def read_score_files(run_dir: RunDir) -> ScoreFiles:
    """scores.json, scores/*.json and similarity.json, as far as they are there.

    Raises ConfigError where a file is damaged, of another schema, or not of the teacher's shape.
    """
    others = sorted(path.stem for path in (run_dir / SCORES).glob("*.json"))
    has_causal, has_similarity = (
        (run_dir / name).exists() for name in (score_file("causal"), SIMILARITY_FILE)
    )
    if not (has_causal or has_similarity or others):
        return ScoreFiles()
    shape = ModelShape(**run_dir.read_json("teacher.json")["model"])
    return ScoreFiles(
        _read(run_dir, score_file("causal"), shape, scores_from_json) if has_causal else None,
        tuple(_read(run_dir, score_file(name), shape, scores_from_json) for name in others),
        _read(run_dir, SIMILARITY_FILE, shape, similarity_from_json) if has_similarity else None,
        read_pair_counts(run_dir),
    )


def read_pair_counts(run_dir: RunDir) -> PairCounts:
    """pairs.json or, in a run of before there was one, what the causal scores tell; none where there is neither.

    Raises ConfigError where the file is damaged.
    """
    try:
        if (run_dir / PAIRS_FILE).exists():
            capabilities = run_dir.read_json(PAIRS_FILE)["capabilities"]
        elif (run_dir / score_file("causal")).exists():
            found = run_dir.read_json(score_file("causal")).get("capabilities") or {}
            capabilities = {name: value.get("probes") or {} for name, value in found.items()}
        else:
            capabilities = {}
        return {
            name: {
                probe: {key: int(counts[key]) for key in ("kept", "drawn")}
                for probe, counts in probes.items()
            }
            for name, probes in capabilities.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{run_dir / PAIRS_FILE}: damaged ({error!r})") from error


def scores_from_json(data: Any, shape: ModelShape) -> Scores:
    """Scores from the data of a scores file; what is optional may be missing or null.

    Raises ValueError that names the part that is malformed.
    """
    _check_schema(data, SCORE_SCHEMAS)
    size = (shape.num_layers, shape.num_heads)
    return Scores(
        method=str(data.get("method", "causal")),
        num_kv_heads=shape.num_kv_heads,
        composite=_table("composite", data.get("composite"), *size),
        spread=_measured(_rows(data, "spread", *size)),
        groups=_rows(data, "groups", shape.num_layers, shape.num_kv_heads),
        capabilities={
            name: CapabilityScores(
                **{key: _rows(value, key, *size) for key in _CAPABILITY_ROWS},
                probes=value.get("probes") or {},
            )
            for name, value in (data.get("capabilities") or {}).items()
        },
    )


def similarity_from_json(data: Any, shape: ModelShape) -> Similarity:
    """Similarity from the data of its file. Raises ValueError that names the part that is malformed."""
    _check_schema(data, SIMILARITY_SCHEMAS)
    blocks = _table("blocks", data.get("blocks"), shape.num_layers, shape.num_layers)
    measure, heads = str(data.get("measure", "")), data.get("heads")
    if heads is None:
        return Similarity(blocks, measure=measure)
    if not isinstance(heads, list) or len(heads) != shape.num_layers:
        raise ValueError(f"heads is not of {shape.num_layers} layers")
    size = shape.num_heads
    return Similarity(blocks, [_table("heads", table, size, size) for table in heads], measure)


def _read(run_dir: RunDir, name: str, shape: ModelShape, parse: Callable[..., T]) -> T:
    try:
        return parse(run_dir.read_json(name), shape)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{run_dir / name}: damaged: {error}") from error


def _check_schema(data: Any, known: Sequence[int]) -> None:
    found = data.get("schema") if isinstance(data, dict) else type(data).__name__
    if found not in known:
        raise ValueError(f"schema {found!r} is not {' or '.join(map(str, known))}")


def _rows(data: Any, key: str, height: int, width: int) -> Rows | None:
    rows = data.get(key)
    return None if rows is None else _table(key, rows, height, width)


def _table(name: str, rows: Any, height: int, width: int) -> Rows:
    is_table = isinstance(rows, list) and len(rows) == height
    if not is_table or any(not isinstance(row, list) or len(row) != width for row in rows):
        raise ValueError(f"{name} is not {height} x {width}")
    for value in (value for row in rows for value in row):
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} holds {value!r}, which is no finite number")
    return [[float(value) for value in row] for row in rows]


def _measured(rows: Rows | None) -> Rows | None:
    """None for a spread of zero everywhere, which says that it was not measured."""
    return rows if rows is not None and any(any(row) for row in rows) else None
