"""The supernet: for every layer a bank of GDN twins, one a query head, that candidates are cut from.

Shapes: L layers, H query heads, G KV heads, C hidden size, D head_dim.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..attention.full import FullHeads
from ..attention.gdn import GatedDeltaHeads
from ..config import GdnConfig
from ..errors import EnvironmentFault
from ..headmap import HeadMap, ModelShape, Operator
from ..rundir import replacing
from .compression import LEFT, ROWS, SCALE, dequantise, factorise, multiply, quantise
from .convert import config_of, with_head_map
from .teacher import Teacher

SCHEMA = 1
METADATA_KEY = "archsearch_supernet"


class Supernet(nn.Module):
    """GDN twins of every head: twins[l] holds layer l's H heads, in fp32, without gradients until it is trained.

    options are the twins' switches; meta is what is known of their training (tokens, seed, metrics ...), plain
    JSON data that save and load carry along.
    """

    def __init__(
        self, teacher: Teacher, options: GdnConfig, meta: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        everywhere = HeadMap.uniform(teacher.shape, Operator.GDN)
        config = with_head_map(config_of(teacher.model), everywhere, options)
        self.options = options
        self.meta = dict(meta or {})
        self.twins = nn.ModuleList(
            GatedDeltaHeads(config, teacher.shape.num_heads)
            for _ in range(teacher.shape.num_layers)
        )

    @classmethod
    def migrated(cls, teacher: Teacher, options: GdnConfig) -> Supernet:
        """Untrained twins on the teacher's device: its q, k, v and their norms, K and V repeated to every query
        head; the rest as a new GatedDeltaHeads starts, neutral."""
        with torch.device(teacher.device):
            supernet = cls(teacher, options).float()
        for layer, twin in enumerate(supernet.twins):
            weights = migrated_weights(_full_heads(teacher, layer), teacher.shape)
            twin.load_state_dict(weights, strict=False)
        return supernet.eval().requires_grad_(False)

    def save(
        self,
        path: Path,
        teacher: Teacher,
        rank: int = 0,
        *,
        bits: int = 8,
        input_gram_LCC: Tensor | None = None,
    ) -> None:
        """Writes a safetensors file, atomically.

        rank 0 stores the parameters whole. Otherwise the large matrices become rank-`rank` factors of their
        difference from the teacher's (quantised to `bits`), the other matrices 8-bit rows, the rest fp16 or fp32;
        input_gram_LCC, each layer's second moment of its input, makes the factors fit those inputs best.
        Raises ValueError where a parameter is not finite, or too large for fp16.
        """
        meta = self.meta | {"rank": rank, "bits": bits if rank else None}
        meta |= {
            "schema": SCHEMA,
            "fingerprint": teacher.fingerprint,
            "model": asdict(teacher.shape),
            "gdn": self.options.model_dump(),
        }
        stacks = self._stacks()
        if rank:
            base = _migrated_stacks(teacher)
            stacks = _compress(stacks, base, rank, bits, input_gram_LCC)
        for name, stack in stacks.items():
            if stack.is_floating_point() and not bool(torch.isfinite(stack).all()):
                raise ValueError(f"supernet: {name} is not finite and is not saved")
        tensors = {name: stack.cpu().contiguous() for name, stack in stacks.items()}
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata={METADATA_KEY: json.dumps(meta)})

    @classmethod
    def load(cls, path: Path, teacher: Teacher, *, any_teacher: bool = False) -> Supernet:
        """Reads a file written by save onto the teacher's device.

        any_teacher accepts twins trained for another teacher of the same geometry (another checkpoint).
        Raises EnvironmentFault for a file that is missing, damaged, of another schema, or for another teacher.
        """
        meta = read_meta(path)
        _check_teacher(path, meta, teacher, any_teacher)
        with torch.device("meta"):
            supernet = cls(teacher, _options(path, meta), meta)
        try:
            stored = load_file(path, device=str(teacher.device))
            base = _migrated_stacks(teacher) if meta["rank"] else {}
            for name, parameter in supernet.twins[0].named_parameters():
                shape = torch.Size((teacher.shape.num_layers, *parameter.shape))
                stack = _expand(stored, base, name, shape).reshape(shape)
                for layer, twin in enumerate(supernet.twins):
                    owner, _, leaf = name.rpartition(".")
                    setattr(twin.get_submodule(owner), leaf, nn.Parameter(stack[layer]))
        except (SafetensorError, KeyError, RuntimeError) as error:
            raise EnvironmentFault(f"{path}: damaged supernet ({error!r})") from error
        return supernet.eval().requires_grad_(False)

    def _stacks(self) -> dict[str, Tensor]:
        """Each parameter of a twin, stacked over layers: the file has one entry a name, which loads fast."""
        states = [twin.state_dict() for twin in self.twins]
        return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def read_meta(path: Path) -> dict[str, Any]:
    """What a supernet file says of itself, its tensors unread.

    Raises EnvironmentFault where it is missing, no supernet, or of another schema.
    """
    try:
        with safe_open(path, "pt") as file:
            meta = json.loads((file.metadata() or {})[METADATA_KEY])
    except FileNotFoundError as error:
        raise EnvironmentFault(f"{path}: no such supernet file") from error
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise EnvironmentFault(f"{path}: not a supernet file, or damaged ({error!r})") from error
    if not isinstance(meta, dict) or meta.get("schema") != SCHEMA:
        raise EnvironmentFault(f"{path}: its supernet schema is not {SCHEMA}; train it again")
    missing = {"fingerprint", "model", "gdn", "rank"} - meta.keys()
    if missing:
        raise EnvironmentFault(f"{path}: damaged supernet (no {', '.join(sorted(missing))})")
    return meta


def _options(path: Path, meta: dict[str, Any]) -> GdnConfig:
    try:
        return GdnConfig(**meta["gdn"])
    except (TypeError, ValueError) as error:
        raise EnvironmentFault(
            f"{path}: its twins have options {meta['gdn']}, unknown here"
        ) from error


def migrated_weights(full: FullHeads, shape: ModelShape) -> dict[str, Tensor]:
    """A layer's q, k and v parameters as fp32 rows of H heads: K and V repeated to the query heads that read them."""
    weights = {}
    for name, value in full.state_dict().items():
        rows = value.float()
        if name.partition(".")[0] in ("k_proj", "v_proj"):
            by_head = rows.view(shape.num_kv_heads, shape.head_dim, *rows.shape[1:])
            rows = by_head.repeat_interleave(shape.group_size, dim=0).flatten(0, 1)
        weights[name] = rows
    return weights


def _full_heads(teacher: Teacher, layer: int) -> FullHeads:
    full = teacher.model.model.layers[layer].self_attn.full
    assert isinstance(full, FullHeads)
    return full


def _migrated_stacks(teacher: Teacher) -> dict[str, Tensor]:
    layers = [
        migrated_weights(_full_heads(teacher, layer), teacher.shape)
        for layer in range(teacher.shape.num_layers)
    ]
    return {name: torch.stack([layer[name] for layer in layers]) for name in layers[0]}


def _compress(
    stacks: Mapping[str, Tensor],
    base: Mapping[str, Tensor],
    rank: int,
    bits: int,
    input_gram_LCC: Tensor | None,
) -> dict[str, Tensor]:
    packed: dict[str, Tensor] = {}
    for name, stack in stacks.items():
        # Numbers a head and biases are few, and a decay of long half-life needs their precision.
        parts = {"": stack.half() if stack.dim() > 2 else stack}
        if name.endswith("_proj.weight"):
            rows, columns = stack.shape[-2:]
            delta = stack - base[name] if name in base else stack
            if rank * (rows + columns) < rows * columns:
                parts = factorise(delta, rank, input_gram_LII=input_gram_LCC, bits=bits)
            else:
                parts = {ROWS + key: value for key, value in quantise(delta).items()}
        packed |= {name + key: value for key, value in parts.items()}
    return packed


def _expand(
    stored: Mapping[str, Tensor], base: Mapping[str, Tensor], name: str, shape: torch.Size
) -> Tensor:
    """The stack of a parameter in fp32, however it is stored."""
    if name in stored:
        return stored[name].float()
    if name + LEFT in stored:
        delta = multiply(stored, name, shape)
    else:
        delta = dequantise(stored[name + ROWS], stored[name + ROWS + SCALE], shape[-1])
    return base[name] + delta if name in base else delta


def _check_teacher(path: Path, meta: dict[str, Any], teacher: Teacher, any_teacher: bool) -> None:
    geometry = asdict(teacher.shape) | {"revision": None}
    if meta["model"] | {"revision": None} != geometry:
        raise EnvironmentFault(
            f"{path}: made for a model of shape {meta['model']}, the teacher has {geometry}"
        )
    if meta["fingerprint"] != teacher.fingerprint and not any_teacher:
        raise EnvironmentFault(
            f"{path}: trained for another teacher (fingerprint {meta['fingerprint']}, "
            f"this one has {teacher.fingerprint}); set supernet.source to train for a new one"
        )
