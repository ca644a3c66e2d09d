"""GGUF files as ordinary model folders, converted once and kept in the user's cache directory.

Reading a GGUF file through transformers takes half a minute, a folder of safetensors one or two seconds; a
run with several workers would pay the former once a worker.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from ..errors import ConfigError, EnvironmentFault
from .adapters import count_parameters
from .sources import Source, reading


def cache_root() -> Path:
    """ARCHSEARCH_CACHE, or archsearch in the user's cache directory."""
    given = os.environ.get("ARCHSEARCH_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given) if given else base / "archsearch"


def cache_folder(path: Path) -> Path:
    """Where the folder made from a GGUF file lies or will lie: its name holds the file's hash.

    The version of transformers is part of it, since that does the conversion.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:20]
    return cache_root() / "gguf" / f"{path.stem}-{digest}-transformers-{transformers.__version__}"


def cached(source: Source) -> Source:
    """The source itself, or its converted folder where one is there already."""
    if source.gguf_path is None or not (folder := cache_folder(source.gguf_path)).is_dir():
        return source
    return replace(source, name=str(folder), gguf_file=None)


def convert(source: Source) -> Source:
    """Converts a GGUF source into a cached folder and returns that; other sources come back as they are.

    Where the cache cannot be written it warns and returns the source, which then loads slowly. Raises
    EnvironmentFault for a file that cannot be read or an architecture that is not supported.
    """
    ready = cached(source)
    if ready.gguf_path is None:
        return ready
    config = read_config(source)
    folder = cache_folder(ready.gguf_path)
    try:
        _check_space(folder, 4 * count_parameters(config))
        temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    except OSError as error:
        warnings.warn(f"converted GGUF not kept in {folder.parent}: {error}", stacklevel=2)
        return source
    try:
        _write_folder(source, temporary)
        _publish(temporary, folder)
    except OSError as error:
        warnings.warn(f"converted GGUF not kept in {folder.parent}: {error}", stacklevel=2)
        return source
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return cached(source)


def read_config(source: Source) -> PretrainedConfig:
    """The config of any source. Raises EnvironmentFault where it cannot be read, and for a GGUF file of an
    architecture that is not supported."""
    if source.gguf_path is not None:
        _check_packages()
    with reading(source, "config"):
        config: PretrainedConfig = AutoConfig.from_pretrained(source.name, **source.arguments())
    if source.gguf_path is not None:
        try:
            count_parameters(config)
        except ConfigError as error:
            raise EnvironmentFault(f"{source.gguf_path}: {error}") from error
    return config


def _check_packages() -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentFault(
            f"teacher: a GGUF file needs the packages {' and '.join(missing)} (pip install {' '.join(missing)})"
        )


def _check_space(folder: Path, needed_bytes: int) -> None:
    """Makes the cache directory. Raises OSError where it cannot hold the converted weights."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < needed_bytes + 2**28:
        raise OSError(f"{needed_bytes / 2**20:.0f} MiB needed, {free / 2**20:.0f} MiB free")


def _write_folder(source: Source, folder: Path) -> None:
    with reading(source, "tokenizer"):
        AutoTokenizer.from_pretrained(source.name, **source.arguments()).save_pretrained(folder)
    with reading(source, "weights"):
        model = AutoModelForCausalLM.from_pretrained(
            source.name, dtype=torch.float32, **source.arguments()
        )
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # The weights are plain now; the entry left by the GGUF reader would make transformers de-quantise again.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.save_pretrained(folder)


def _publish(temporary: Path, folder: Path) -> None:
    """Renames the finished folder into place; another process that was first wins."""
    try:
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
