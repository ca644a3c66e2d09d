"""Cutting one candidate out of the teacher (FA heads) and the supernet (their linear twins).

Shapes: C hidden size, D head_dim, M slots, m KV heads that an operator reads in one layer.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..attention.configuration_hydrahead import HydraHeadConfig
from ..attention.gdn import GatedDeltaHeads
from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..attention.nha import NativeHybridHeads
from ..config import GdnConfig
from ..headmap import HeadMap, Operator
from ..studentconfig import FullConfig
from .convert import assign, config_of, empty_model, with_head_map
from .full_heads import FullBranch, full_switches
from .teacher import Teacher

if TYPE_CHECKING:
    from .supernet import Supernet

ROWS_BY_QUERY_HEAD = ("q_proj",)
ROWS_BY_KV_HEAD = ("k_proj", "v_proj")


def cut(
    teacher: Teacher,
    supernet: Supernet | None,
    head_map: HeadMap,
    *,
    copy: bool = False,
    full: FullBranch | None = None,
) -> HydraHeadForCausalLM:
    """The hybrid model of a head map: FA heads from the teacher, GDN heads from the supernet.

    copy=False is for evaluation: eval mode, no gradients, tensors shared with the teacher wherever rows lie
    together; never train it. copy=True is for training: nothing shared, gradients on. NHA heads take the
    teacher's q, k and v, so that with a window over the whole context they are FA. full: what FA heads are beside the
    teacher's, as it is at the start of training: with all of RoPE unless it goes at once.
    Raises ValueError for a head map of another geometry, or one that needs twins (or a gamma) that are not there.
    """
    options = supernet.options if supernet is not None else GdnConfig()
    full = full or FullBranch(FullConfig())
    config = with_head_map(config_of(teacher.model), head_map, options, full_switches(full.options))
    student = empty_model(config)
    source = teacher.model.state_dict()
    tensors = {name: value for name, value in source.items() if ".self_attn.full." not in name}
    for layer in range(head_map.model.num_layers):
        own = f"model.layers.{layer}.self_attn.full."
        rows = {name.removeprefix(own): source[name] for name in source if name.startswith(own)}
        tensors |= {own + name: value for name, value in full.added(config, layer).items()}
        for branch, parameters in _branches(rows, supernet, config, head_map, layer).items():
            prefix = f"model.layers.{layer}.self_attn.{branch}."
            tensors |= {prefix + name: value for name, value in parameters.items()}
    dtype = teacher.model.dtype
    tensors = {name: value.to(teacher.device, dtype) for name, value in tensors.items()}
    if copy:
        tensors = {name: value.clone() for name, value in tensors.items()}
    assign(student, tensors)
    student.generation_config = deepcopy(teacher.model.generation_config)
    student.requires_grad_(copy).train(copy)
    return student


def _branches(
    full: dict[str, Tensor],
    supernet: Supernet | None,
    config: HydraHeadConfig,
    head_map: HeadMap,
    layer: int,
) -> dict[str, dict[str, Tensor]]:
    """The parameters of each operator's module in one layer; full holds those of the teacher's FA heads."""
    branches = {}
    if Operator.FULL in head_map.layers[layer]:
        branches["full"] = _full_rows(full, head_map, layer)
    if Operator.GDN in head_map.layers[layer]:
        if supernet is None:
            raise ValueError(f"layer {layer} has GDN heads, which need a supernet")
        twin = supernet.twins[layer]
        assert isinstance(twin, GatedDeltaHeads)
        branches["gdn"] = twin.select(head_map.heads(layer, Operator.GDN)).state_dict()
    if Operator.NHA in head_map.layers[layer]:
        branches["nha"] = _native_hybrid(full, config, head_map, layer).state_dict()
    return branches


def _full_rows(full: dict[str, Tensor], head_map: HeadMap, layer: int) -> dict[str, Tensor]:
    """The teacher's q rows of the FA heads, k and v rows of the KV heads that those read."""
    picks = dict.fromkeys(ROWS_BY_QUERY_HEAD, head_map.heads(layer, Operator.FULL))
    picks |= dict.fromkeys(ROWS_BY_KV_HEAD, head_map.kv_heads(layer, Operator.FULL))
    rows = {}
    for name, value in full.items():
        heads = picks.get(name.partition(".")[0])
        rows[name] = value if heads is None else take_heads(value, heads, head_map.model.head_dim)
    return rows


def _native_hybrid(
    full: dict[str, Tensor], config: HydraHeadConfig, head_map: HeadMap, layer: int
) -> NativeHybridHeads:
    """A layer's NHA heads with the teacher's q, k and v.

    The slot gate [m * M, C] starts from k_proj, as in the conversion of NHA (arXiv 2510.07019); which M rows of a KV
    head it takes is our choice: evenly spaced ones.
    """
    window, slots, dim = head_map.window[layer], head_map.slots[layer], head_map.model.head_dim
    assert window is not None
    assert slots is not None
    k_rows = full["k_proj.weight"]
    picked = torch.arange(slots, device=k_rows.device) * dim // slots
    gate = k_rows.view(-1, dim, k_rows.shape[-1]).index_select(1, picked).flatten(0, 1)
    with torch.device("meta"):
        every = NativeHybridHeads(config, range(head_map.model.num_heads), window, slots)
    every.load_state_dict(full | {"slot_proj.weight": gate}, assign=True)
    shared = head_map.kv_heads(layer, Operator.FULL)
    return every.select(head_map.heads(layer, Operator.NHA), shared)


def take_heads(rows: Tensor, heads: tuple[int, ...], head_dim: int) -> Tensor:
    """The rows [len(heads) * D, ...] of the given ascending heads; a view where those lie side by side."""
    first, last = heads[0], heads[-1]
    if last - first + 1 == len(heads):
        return rows[first * head_dim : (last + 1) * head_dim]
    by_head = rows.view(-1, head_dim, *rows.shape[1:])
    return by_head.index_select(0, torch.tensor(heads, device=rows.device)).flatten(0, 1)
