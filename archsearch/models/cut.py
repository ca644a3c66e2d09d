"""Cutting one candidate out of the teacher (FA heads) and the supernet (their linear twins).

Shapes: C hidden size, D head_dim, M slots, m KV heads that an operator reads in one layer.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..config import GdnConfig
from ..headmap import HeadMap, Operator
from .convert import assign, empty_model, with_head_map
from .teacher import Teacher

if TYPE_CHECKING:
    from .supernet import Supernet

ROWS_BY_QUERY_HEAD = ("q_proj",)
ROWS_BY_KV_HEAD = ("k_proj", "v_proj")


def cut(
    teacher: Teacher, supernet: Supernet | None, head_map: HeadMap, *, copy: bool = False
) -> HydraHeadForCausalLM:
    """The hybrid model of a head map: FA heads from the teacher, GDN heads from the supernet.

    copy=False is for evaluation: eval mode, no gradients, tensors shared with the teacher wherever rows lie
    together; never train it. copy=True is for training: nothing shared, gradients on. NHA heads take the
    teacher's q, k and v, so that with a window over the whole context they are FA.
    Raises ValueError for a head map of another geometry, or one that needs twins that are not there.
    """
    options = supernet.options if supernet is not None else GdnConfig()
    student = empty_model(with_head_map(teacher.model.config, head_map, options))
    source = teacher.model.state_dict()
    tensors = {name: value for name, value in source.items() if ".self_attn.full." not in name}
    for layer in range(head_map.model.num_layers):
        full = f"model.layers.{layer}.self_attn.full."
        rows = {name.removeprefix(full): source[name] for name in source if name.startswith(full)}
        for branch, parameters in _branches(rows, supernet, head_map, layer).items():
            prefix = f"model.layers.{layer}.self_attn.{branch}."
            tensors |= {prefix + name: value for name, value in parameters.items()}
    dtype = teacher.model.dtype
    tensors = {name: value.to(teacher.device, dtype) for name, value in tensors.items()}
    if copy:
        tensors = {name: value.clone() for name, value in tensors.items()}
    assign(student, tensors)
    student.generation_config = deepcopy(teacher.model.generation_config)
    return student.requires_grad_(copy).train(copy)


def _branches(
    full: dict[str, Tensor], supernet: Supernet | None, head_map: HeadMap, layer: int
) -> dict[str, dict[str, Tensor]]:
    """The parameters of each operator's module in one layer; full holds those of the teacher's FA heads."""
    branches = {}
    if Operator.FULL in head_map.layers[layer]:
        branches["full"] = _softmax_rows(full, head_map, layer, Operator.FULL)
    if Operator.GDN in head_map.layers[layer]:
        if supernet is None:
            raise ValueError(f"layer {layer} has GDN heads, which need a supernet")
        twins = supernet.twins[layer].select(head_map.heads(layer, Operator.GDN))
        branches["gdn"] = twins.state_dict()
    if Operator.NHA in head_map.layers[layer]:
        rows = _softmax_rows(full, head_map, layer, Operator.NHA)
        gate = _slot_gate(rows["k_proj.weight"], head_map, layer)
        branches["nha"] = rows | {"slot_proj.weight": gate}
    return branches


def _softmax_rows(
    full: dict[str, Tensor], head_map: HeadMap, layer: int, op: Operator
) -> dict[str, Tensor]:
    """The teacher's q rows of the heads that run op, k and v rows of the KV heads that those read."""
    picks = dict.fromkeys(ROWS_BY_QUERY_HEAD, head_map.heads(layer, op))
    picks |= dict.fromkeys(ROWS_BY_KV_HEAD, head_map.kv_heads(layer, op))
    rows = {}
    for name, value in full.items():
        heads = picks.get(name.partition(".")[0])
        rows[name] = value if heads is None else take_heads(value, heads, head_map.model.head_dim)
    return rows


def _slot_gate(k_rows: Tensor, head_map: HeadMap, layer: int) -> Tensor:
    """The start of the NHA heads' slot gate [m * M, C]: M rows of each KV head's k_proj, evenly spaced.

    Source: the conversion of NHA (arXiv 2510.07019) starts the gate from k_proj; which rows is our choice.
    """
    dim, slots = head_map.model.head_dim, head_map.slots[layer]
    assert slots is not None
    picked = torch.arange(slots, device=k_rows.device) * dim // slots
    return k_rows.unflatten(0, (-1, dim))[:, picked].flatten(0, 1)


def take_heads(rows: Tensor, heads: tuple[int, ...], head_dim: int) -> Tensor:
    """The rows [len(heads) * D, ...] of the given ascending heads; a view where those lie side by side."""
    first, last = heads[0], heads[-1]
    if last - first + 1 == len(heads):
        return rows[first * head_dim : (last + 1) * head_dim]
    by_head = rows.unflatten(0, (-1, head_dim))
    return by_head[torch.tensor(heads, device=rows.device)].flatten(0, 1)
