"""What a batch's loss needs of the teacher, kept between candidates: in memory up to a limit, beyond it on disk.

An entry is found by a digest of the batch itself, in a folder of all else that it depends on, so that none can be
stale: other data, another seed, another teacher make other names. Nothing is ever thrown out of memory, since
candidates go over the same batches in the same order: what came first is what the next one needs first.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..rundir import replacing

logger = logging.getLogger(__name__)

SPARED_DISK_BYTES = 2 * 2**30
"""Room on the disk that is left to others."""

Arrays = dict[str, Tensor]
"""Named tensors with a row a position."""


class TargetCache:
    """Arrays by the key of a batch. identity names all else that they depend on.

    Several processes may share a folder: files appear whole, and whoever comes second writes the same again.
    """

    def __init__(
        self, identity: str, device: torch.device, memory_bytes: float, folder: Path | None = None
    ) -> None:
        self._identity, self._device = identity, device
        self._room = memory_bytes
        digest = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
        self._folder = None if folder is None else folder / digest
        self._held: dict[str, Arrays] = {}

    def get(self, key: str, make: Callable[[], Arrays]) -> Arrays:
        """The arrays of a batch on the device, made where they are not kept yet."""
        found = self._held.get(key)
        if found is not None:
            return found
        stored = self._read(key)
        arrays = make() if stored is None else stored
        size = sum(array.nbytes for array in arrays.values())
        if size <= self._room:
            self._room -= size
            self._held[key] = arrays
        elif stored is None:
            self._write(key, arrays, size)
        return arrays

    def _read(self, key: str) -> Arrays | None:
        path = self._path(key)
        if path is None or not path.exists():
            return None
        try:
            with safe_open(path, framework="pt", device=str(self._device)) as file:
                if (file.metadata() or {}).get("identity") != self._identity:
                    return None
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            logger.warning("%s: cannot be read (%s); made again", path, error)
            return None

    def _write(self, key: str, arrays: Arrays, size: int) -> None:
        path = self._path(key)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(path.parent).free < size + SPARED_DISK_BYTES:
                raise OSError("the disk is full")
            whole = {name: array.cpu().contiguous() for name, array in arrays.items()}
            with replacing(path) as temporary:
                save_file(whole, temporary, metadata={"identity": self._identity})
        except OSError as error:
            logger.warning(
                "%s: %s; the teacher runs again for what is beyond distill.cache_gib", path, error
            )
            self._folder = None

    def _path(self, key: str) -> Path | None:
        return None if self._folder is None else self._folder / f"{key}.safetensors"
