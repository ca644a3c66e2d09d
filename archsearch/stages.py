"""What each stage of a run does, from the teacher to the report."""

from __future__ import annotations

import gc
import hashlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from .config import RunConfig, ScoreMethod
from .console import StageProgress
from .data.corpora import training_batches
from .errors import ConfigError, EnvironmentFault
from .footprint import TRAIN
from .models.supernet import Supernet, read_meta
from .models.teacher import Teacher, inspect_teacher, load_teacher, resolve_path
from .report.files import write_report
from .report.records import bytes_text
from .report.score_records import read_pair_counts
from .rundir import PAIRS_FILE, SIMILARITY_FILE, RunDir, score_file
from .scoring.head_scores import HeadScores
from .scoring.inputs import ScoreInputs, SubProbe, pair_counts
from .scoring.methods import METHODS
from .scoring.pairs import draw_pairs
from .scoring.similarity import Similarity, measure_similarity
from .search.driver import SearchOutcome, run_search, scored_methods
from .search.seeds import read_scores
from .search.trial import (
    HELDOUT_FILE,
    RETRIEVAL_FILE,
    SUPERNET_FILE,
    TEACHER_LOGITS,
    TRAIN_FILE,
)
from .texts import write_texts
from .timings import record_method
from .training.align import align
from .training.loop import BatchSource

SCHEMA = 1
MISSING = "missing"
ALIGNMENT_FILE = "alignment.json"
CHECKPOINT_FILE = "align.checkpoint.safetensors"


@dataclass
class RunContext:
    """What the stages of one run share."""

    config: RunConfig
    run_dir: RunDir
    loaded: Teacher | None = None
    supernet: Supernet | None = None
    outcome: SearchOutcome | None = None
    drawn: Mapping[str, Mapping[str, SubProbe]] | None = None

    def teacher(self) -> Teacher:
        """The teacher, loaded at its first use."""
        if self.loaded is None:
            self.loaded = load_teacher(self.config.teacher)
        return self.loaded

    def twins(self) -> Supernet:
        """The run's supernet, loaded at its first use."""
        if self.supernet is None:
            self.supernet = Supernet.load(self.run_dir / SUPERNET_FILE, self.teacher())
        return self.supernet

    def pairs(self, progress: StageProgress) -> Mapping[str, Mapping[str, SubProbe]]:
        """The pairs that the teacher answers, by capability and sub-probe, drawn at their first use (pairs.json).

        Raises ConfigError where they are too few.
        """
        if self.drawn is None:
            progress.begin("pairs")
            seed = self.seed("scoring")
            self.drawn = draw_pairs(self.teacher(), self.config, seed=seed, progress=progress)
            found = {"schema": SCHEMA, "capabilities": pair_counts(self.drawn)}
            self.run_dir.write_json(PAIRS_FILE, found)
        return self.drawn

    def release(self) -> None:
        """Lets go of teacher and supernet: during the search the workers hold their own."""
        self.loaded = self.supernet = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def seed(self, purpose: str) -> int:
        """A seed of its own for each purpose, from the config's."""
        digest = hashlib.sha256(f"{self.config.seed}/{purpose}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


Stage = Callable[[RunContext, StageProgress], str]
"""Does a stage's work and returns what its closing line says, and further lines if there are any."""


def _load_teacher(context: RunContext, progress: StageProgress) -> str:
    teacher = context.teacher()
    shape = teacher.shape
    facts = {"model": asdict(shape), "fingerprint": teacher.fingerprint}
    context.run_dir.write_json("teacher.json", {"schema": SCHEMA, **facts})
    return (
        f"{shape.family}, {shape.num_layers} layers x {shape.num_heads} heads, "
        f"{shape.num_kv_heads} KV heads, on {teacher.device}"
    )


def _make_data(context: RunContext, progress: StageProgress) -> str:
    """Writes heldout.npy, and train.npy and retrieval.npy where the run trains anything."""
    return write_texts(context.config, context.run_dir, context.teacher(), context.seed, progress)


def _token_tensor(rows: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(rows.astype(np.int64))


def _make_supernet(context: RunContext, progress: StageProgress) -> str:
    """Writes supernet.safetensors: trained here, or a copy of the config's."""
    config, teacher, run_dir = context.config, context.teacher(), context.run_dir
    target = run_dir / SUPERNET_FILE
    if config.supernet.source != TRAIN:
        if run_dir.stage("supernet") is not None and (lost := lost_supernet(run_dir)):
            progress.line(f"{lost}; made again")
        source = resolve_path(config.supernet.source)
        context.supernet = Supernet.load(source, teacher)
        with run_dir.replacing(target.name) as path:
            shutil.copyfile(source, path)
        _write_alignment(context)
        tokens = context.supernet.meta.get("tokens")
        trained = f", trained on {tokens:,} tokens" if tokens else ""
        return f"{bytes_text(target.stat().st_size)} from {config.supernet.source}{trained}"
    # The scores need them: a teacher that answers too few is found before the training, not after it.
    context.pairs(progress)
    progress.begin("alignment")
    checkpoint = run_dir / CHECKPOINT_FILE
    if checkpoint.exists():
        progress.line("alignment goes on from its checkpoint")
    supernet = Supernet.migrated(teacher, config.supernet.gdn)
    context.supernet = align(
        teacher,
        supernet,
        _batches(context),
        config.supernet,
        checkpoint=checkpoint,
        heldout_NT=_token_tensor(np.load(run_dir / HELDOUT_FILE)),
        seed=context.seed("align"),
        progress=progress,
        say=progress.line,
    )
    _write_alignment(context)
    context.supernet.save(target, teacher, rank=config.supernet.rank)
    checkpoint.unlink(missing_ok=True)
    error = context.supernet.meta["metrics"]["error_median"]
    if error >= 1:
        progress.line(
            f"warning: supernet: the median error of a twin is {error:.3g}, where the best constant has 1: "
            "allowed, but more supernet.tokens, or another supernet.learning_rate, make better twins"
        )
    return (
        f"{config.supernet.tokens:,} tokens, median error of a twin {error:.3f}, "
        f"{bytes_text(target.stat().st_size)}"
    )


def _batch_sequences(config: RunConfig) -> int:
    """Sequences of a batch of the alignment."""
    return max(1, config.supernet.batch_tokens // config.data.sequence_length)


def aligned_share(run_dir: RunDir, config: RunConfig) -> float:
    """How much of the alignment a checkpoint holds; 0 where there is none, or none that can be read."""
    try:
        with safe_open(run_dir / CHECKPOINT_FILE, framework="pt") as file:
            step = int((file.metadata() or {})["step"])
    except (SafetensorError, OSError, KeyError, ValueError):
        return 0.0
    tokens = step * _batch_sequences(config) * config.data.sequence_length
    return min(1.0, tokens / config.supernet.tokens)


def lost_supernet(run_dir: RunDir) -> str:
    """Why the run's supernet cannot be used, by its header and size; empty where it can."""
    try:
        read_meta(run_dir / SUPERNET_FILE)
    except EnvironmentFault as error:
        return str(error)
    return ""


def check_supernet(run_dir: RunDir, config: RunConfig) -> None:
    """Raises EnvironmentFault where the run has made its supernet and it cannot be used, with what to do about it."""
    if run_dir.stage("supernet") is None or not (lost := lost_supernet(run_dir)):
        return
    again = "the same `archsearch run` makes it again"
    if config.supernet.source == TRAIN:
        # Not by itself: it takes long, and other twins than those that the candidates had may come of it.
        again = f"put it back, or remove {run_dir / 'stages/supernet.json'}: then {again}, on a GPU up to rounding"
    raise EnvironmentFault(f"{lost}; {again}")


def _write_alignment(context: RunContext) -> None:
    """Writes alignment.json: what the supernet knows of its twins' errors, by head and over time."""
    assert context.supernet is not None
    meta = context.supernet.meta
    if found := {name: meta[name] for name in ("tokens", "init", "metrics") if name in meta}:
        context.run_dir.write_json(ALIGNMENT_FILE, {"schema": SCHEMA, **found})


def _batches(context: RunContext) -> BatchSource:
    """Training batches from a step on, the same at every call."""
    config, run_dir = context.config, context.run_dir
    text = np.load(run_dir / TRAIN_FILE, mmap_mode="r")
    has_prompts = (run_dir / RETRIEVAL_FILE).exists()
    prompts = np.load(run_dir / RETRIEVAL_FILE, mmap_mode="r") if has_prompts else None
    sequences = _batch_sequences(config)
    share = config.data.niah_share if has_prompts else 0.0
    seed = context.seed("batches")
    return lambda step: training_batches(
        text,
        prompts,
        niah_share=share,
        batch_sequences=sequences,
        seed=seed,
        start_step=step,
    )


def _score(context: RunContext, progress: StageProgress) -> str:
    """Writes the scores files of all methods that the run needs, and similarity.json."""
    run_dir, methods = context.run_dir, scored_methods(context.config)
    score_heads(context, methods, progress)
    if lost := lost_similarity(run_dir):
        _say_again(context, SIMILARITY_FILE, lost, progress)
        progress.begin("similarity")
        found = measure_similarity(context.teacher(), _score_tokens(context))
        found.save(run_dir / SIMILARITY_FILE)
    return f"{pairs_line(run_dir)}{', '.join(methods)}"


def pairs_line(run_dir: RunDir) -> str:
    """`NAME 6 of 8 pairs kept; ` of all capabilities, or nothing where none was drawn yet."""
    counts = [
        f"{name} {sum(p['kept'] for p in probes)} of {sum(p['drawn'] for p in probes)} pairs kept"
        for name, found in read_pair_counts(run_dir).items()
        if (probes := found.values())
    ]
    return f"{', '.join(counts)}; " if counts else ""


def score_heads(
    context: RunContext, methods: Sequence[ScoreMethod], progress: StageProgress
) -> list[ScoreMethod]:
    """Writes the scores file of each method that has none to keep: a run's config never changes what is in one.

    A file that cannot be read, or that a finished stage has lost, is made again and named. Returns the methods that were computed. Raises ConfigError where the teacher answers too few pairs,
    EnvironmentFault where a method runs out of the GPU's memory.
    """
    run_dir = context.run_dir
    lost = lost_scores(run_dir, methods)
    missing = [method for method in methods if method in lost]
    for method in missing:
        _say_again(context, score_file(method), lost[method], progress)
    if missing:
        needs_text = any(METHODS[method].needs_text for method in missing)
        inputs = _score_inputs(context, progress, needs_text=needs_text)
        for method in missing:
            progress.begin(method)
            start = time.monotonic()
            try:
                _score_by(method, inputs).save(run_dir / score_file(method))
            finally:
                record_method(run_dir, method, time.monotonic() - start)
    return missing


def lost_scores(run_dir: RunDir, methods: Sequence[ScoreMethod]) -> dict[ScoreMethod, str]:
    """The methods without a scores file that can be kept, and why."""
    found: dict[ScoreMethod, str] = {}
    for method in methods:
        path = run_dir / score_file(method)
        try:
            HeadScores.load(path)
        except FileNotFoundError:
            found[method] = MISSING
        except ConfigError as error:
            found[method] = str(error).removeprefix(f"{path}: ")
    return found


def lost_outputs(run_dir: RunDir, config: RunConfig) -> bool:
    """Whether the stage of scores, if it is finished, has lost any of its files."""
    return bool(lost_scores(run_dir, scored_methods(config)) or lost_similarity(run_dir))


def lost_similarity(run_dir: RunDir) -> str:
    """Why similarity.json cannot be kept; empty where it can."""
    try:
        Similarity.load(run_dir / SIMILARITY_FILE)
    except FileNotFoundError:
        return MISSING
    except ValueError as error:
        return f"damaged or of another version ({error})"
    return ""


def _say_again(context: RunContext, name: str, reason: str, progress: StageProgress) -> None:
    """Names a file that is made a second time."""
    is_output = name in {
        SIMILARITY_FILE,
        *(score_file(method) for method in scored_methods(context.config)),
    }
    was_made = is_output and context.run_dir.stage("scores") is not None
    if reason != MISSING or was_made:
        progress.line(f"{context.run_dir / name}: {reason}; made again")


def _score_by(method: ScoreMethod, inputs: ScoreInputs) -> HeadScores:
    try:
        return METHODS[method].score(inputs)
    except torch.OutOfMemoryError as error:
        said = str(error).partition("\n")[0]
        raise EnvironmentFault(
            f"scoring.memory_gib: {inputs.config.memory_gib:g} is more than the GPU has free for {method} "
            f"({said}); allowed: less"
        ) from error


def _score_inputs(context: RunContext, progress: StageProgress, *, needs_text: bool) -> ScoreInputs:
    no_text = torch.empty(0, 0, dtype=torch.long)
    return ScoreInputs(
        teacher=context.teacher(),
        capabilities=context.pairs(progress),
        heldout_NT=_score_tokens(context) if needs_text else no_text,
        supernet=context.twins,
        config=context.config.scoring,
        seed=context.seed("scoring"),
        progress=progress,
    )


def _score_tokens(context: RunContext) -> torch.Tensor:
    """The held-out tokens that scores are measured on, [N, T] on the teacher's device."""
    scoring = context.config.scoring
    rows = np.load(context.run_dir / HELDOUT_FILE)
    rows = rows[: scoring.replacement_sequences, : scoring.replacement_length]
    return _token_tensor(rows).to(context.teacher().device)


def _search(context: RunContext, progress: StageProgress) -> str:
    """Writes what run_search does. An interrupted search keeps what candidates share, a finished one has no use for it."""
    config, run_dir = context.config, context.run_dir
    context.release()
    tables = read_scores(run_dir, scored_methods(config))
    shape = inspect_teacher(config.teacher).shape
    say = progress.line
    context.outcome = run_search(config, run_dir, shape, tables, progress, say=say, watch=progress)
    shutil.rmtree(run_dir / TEACHER_LOGITS, ignore_errors=True)
    front, volume, *ends = context.outcome.lines
    return "\n".join((f"{front}; {volume}", *ends))


def _report(context: RunContext, progress: StageProgress) -> str:
    return str(write_report(context.run_dir))


STAGE_WORK: dict[str, Stage] = {
    "teacher": _load_teacher,
    "data": _make_data,
    "supernet": _make_supernet,
    "scores": _score,
    "search": _search,
    "report": _report,
}
