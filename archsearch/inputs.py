"""Looks into the files that a run will read, before any work: teacher, supernet, text, and probes."""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerBase

from .config import GdnConfig, RunConfig, TeacherConfig, TextConfig
from .data.corpora import load_tokens
from .data.documents import Corpus, open_corpus
from .errors import ConfigError, EnvironmentFault
from .evaluation.harness import check_tasks
from .footprint import TRAIN
from .models.gguf_cache import cached, read_config
from .models.sources import Source, locate, resolve_path
from .models.supernet import read_meta
from .models.teacher import (
    TeacherInfo,
    check_vocabulary,
    load_tokenizer,
    quiet_transformers,
)
from .plan import heldout_rows, training_rows
from .probe_inputs import check_probes, naming

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
"""Fields of a model's config that must be 1 or more where it has them."""
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Files that transformers takes weights from, in its order, each whole or as an index of shards."""
COUNTED_TOKENS = 500_000
"""Text of so many tokens is read and tokenized before any work, which takes about a second."""
SAMPLED_CHARS = 200_000
"""Of more text, characters from which its tokens are estimated."""
MOST_CHARS = 8
"""Characters a token; text that has so many is read no further."""
ROUGHLY = 0.8
"""Share of the tokens needed with which, by that estimate, a text is let pass."""


def check_teacher_files(config: TeacherConfig) -> None:
    """Checks the sizes in the teacher's config, and that a local folder has weights that open.

    Raises ConfigError for an impossible size, EnvironmentFault for files that are missing or damaged.
    """
    source = _locate(config)
    if source.gguf_path is not None:
        return
    with quiet_transformers():
        hf_config = read_config(source)
    for name in SIZES:
        size = getattr(hf_config, name, None)
        if isinstance(size, int) and size < 1:
            raise ConfigError(f"teacher: {name} = {size} is not possible; allowed: 1 or more")
    folder = Path(source.name)
    if folder.is_dir() and not config.random_weights:
        _check_weights(folder)


def check_inputs(config: RunConfig, info: TeacherInfo) -> None:
    """Checks supernet, tokenizer, text and own pairs against the teacher, and draws probes of each kind and length.

    Raises ConfigError with the field, EnvironmentFault for a file that is missing or damaged.
    """
    if config.supernet.source != TRAIN:
        _check_supernet(config, info)
    with quiet_transformers():
        tokenizer = load_tokenizer(_locate(config.teacher), config.teacher.random_weights)
    check_vocabulary(tokenizer, info.vocab_size)
    data, length = config.data, config.data.sequence_length
    rows = training_rows(config)
    uses = [
        ("heldout" if index < 0 else f"extra_heldout[{index}]", text, count, 0)
        for index, (text, count) in enumerate(heldout_rows(config), -1)
    ]
    if rows.text:
        uses.append(("train", data.train, rows.text, rows.skip))
    for name, text, sequences, skipped in uses:
        if text.source == "file":
            with naming(f"data.{name}.path"):
                _check_text(text, tokenizer, info.vocab_size, sequences, length, skipped)
    check_probes(config, tokenizer, info.max_context, rows.prompts)
    search = config.search
    wanted = {f"search.objectives[{i}].metric": o.metric for i, o in enumerate(search.objectives)}
    wanted |= {
        f"search.constraints[{i}].metric": c.metric for i, c in enumerate(search.constraints)
    }
    check_tasks(config.harness, wanted)


def scored_inputs(config: RunConfig) -> dict[str, str]:
    """SHA-256 of the files that scores and trials are made from and that a run keeps no copy of, by the config's field.

    Raises ConfigError where one cannot be read.
    """
    sources = {f"probes.files[{i}].path": file.path for i, file in enumerate(config.probes.files)}
    if config.scoring.pairs_file is not None:
        sources["scoring.pairs_file"] = config.scoring.pairs_file
    found = {}
    for field, source in sources.items():
        with naming(field):
            path = resolve_path(source)
            try:
                found[field] = hashlib.sha256(path.read_bytes()).hexdigest()
            except OSError as error:
                raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    return found


def _locate(config: TeacherConfig) -> Source:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Whoever loads the teacher says the same.
        return cached(locate(config))


def _check_weights(folder: Path) -> None:
    found = [folder / n for n in WEIGHTS if (folder / n).exists() or _index(folder, n).exists()]
    if not found:
        ggufs = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"to use {ggufs[0]}, name that file itself" if ggufs else f"it needs {WEIGHTS[0]}"
        raise EnvironmentFault(f"teacher.source: {folder} holds no weights; {hint}")
    files, index = [found[0]], _index(folder, found[0].name)
    if not found[0].exists():
        try:
            names = json.loads(index.read_text())["weight_map"].values()
            files = [folder / name for name in sorted(set(names))]
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise EnvironmentFault(f"teacher.source: {index}: damaged ({error!r})") from error
    for path in files:
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, "pt"):
                    pass
            else:
                path.open("rb").close()
        except FileNotFoundError as error:
            raise EnvironmentFault(f"teacher.source: {path}: no such file") from error
        except (SafetensorError, OSError) as error:
            raise EnvironmentFault(f"teacher.source: {path}: damaged ({error})") from error


def _index(folder: Path, name: str) -> Path:
    return folder / f"{name}.index.json"


def _check_supernet(config: RunConfig, info: TeacherInfo) -> None:
    """Refuses a supernet of another geometry, or trained with other options than the config sets."""
    source, gdn = config.supernet.source, config.supernet.gdn
    with naming("supernet.source"):
        path = resolve_path(source)
        meta = read_meta(path)
        try:
            geometry = meta["model"] | {"revision": None}
            trained = GdnConfig(**meta["gdn"])
        except (TypeError, ValueError) as error:
            raise EnvironmentFault(f"{path}: damaged supernet ({error!r})") from error
        wanted = asdict(info.shape) | {"revision": None}
        differing = [name for name in wanted if geometry.get(name) != wanted[name]]
        if differing:
            pairs = (f"{n} {geometry.get(n)} (teacher: {wanted[n]})" for n in differing)
            raise ConfigError(f"{source} was made for a model with {', '.join(pairs)}")
    for name in sorted(gdn.model_fields_set):
        option, used = getattr(gdn, name), getattr(trained, name)
        if used != option:
            raise ConfigError(
                f"supernet.gdn.{name}: {option}, but {source} was trained with {used}; leave it out, or set supernet.source to {TRAIN}"
            )


def _check_text(
    text: TextConfig,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    sequences: int,
    length: int,
    skip: int,
) -> None:
    """Reads what the run needs; of much text the tokens are estimated, from those of its beginning.

    Raises ConfigError where a part that the run reads is malformed, or the text is too short.
    """
    path, needed = resolve_path(str(text.path)), (skip + sequences) * length
    if path.suffix != ".npy" and not path.is_dir() and needed > COUNTED_TOKENS:
        _check_corpus(open_corpus(text, path), tokenizer, needed, length)
        return
    rows = load_tokens(text, tokenizer, None, sequences=sequences, length=length, seed=0, skip=skip)
    # A tokenizer may have added tokens that the embedding lacks.
    if int(rows.max()) >= vocab_size:
        raise ConfigError(f"token ids up to {rows.max()}; the teacher has 0 to {vocab_size - 1}")


def _check_corpus(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, needed: int, length: int
) -> None:
    """Reads the corpus until it has tokens enough. Raises ConfigError where it ends far from that."""
    sample, num_chars, num_texts = list[str](), 0, 0
    for one in corpus.texts:
        if num_chars < SAMPLED_CHARS:
            sample.append(one[:SAMPLED_CHARS])
        num_chars, num_texts = num_chars + len(one), num_texts + 1
        if num_chars >= needed * MOST_CHARS:
            return
    ids = tokenizer(sample, add_special_tokens=False)["input_ids"]
    a_char = sum(map(len, ids)) / max(1, sum(map(len, sample)))
    found = round(num_chars * a_char) + corpus.separate * num_texts
    if found < ROUGHLY * needed:
        raise ConfigError(
            f"{corpus.name}: holds about {found // length:,} sequences of {length} tokens, {needed // length:,} are "
            "needed; give more text, or lower the tokens or the sequence length"
        )
