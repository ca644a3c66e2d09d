"""Shows what each attention layer of the teacher reads and what its heads put out, layer by layer.

Shapes: B sequences, T tokens, C hidden size, H query heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, nn

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..attention.rotary import PositionEmbeddings

Visit = Callable[[int, Tensor, PositionEmbeddings, Tensor], None]
"""(layer, x_BTC after the input norm, RoPE tables, head outputs o_BTHD before o_proj)."""


def visit_layers(
    model: HydraHeadForCausalLM,
    ids_BT: Tensor,
    visit: Visit,
    layers: Collection[int] | None = None,
) -> None:
    """Runs the model once, without logits, and calls visit in every layer, or in those of layers, while it runs.

    What lies behind the last layer to visit does not run. Nothing is kept between layers, so that memory does not grow
    with their number. Gradients are off or on in visit as the caller left them.
    """
    wanted = range(len(model.model.layers)) if layers is None else sorted(layers)
    if not wanted:
        return
    handles = []
    for index in wanted:
        attention = model.model.layers[index].self_attn
        tap = _Tap(index, model.config.head_dim, visit)
        handles += [
            attention.register_forward_pre_hook(tap.enter, with_kwargs=True),
            attention.o_proj.register_forward_pre_hook(tap.leave),
        ]
    try:
        model.model.run_layers(model.model.embed_tokens(ids_BT), 0, wanted[-1] + 1)
    finally:
        for handle in handles:
            handle.remove()


class _Tap:
    """The two hooks of one layer: at the attention's input, and at its o_proj's."""

    def __init__(self, index: int, head_dim: int, visit: Visit) -> None:
        self._index = index
        self._head_dim = head_dim
        self._visit = visit
        self._entered: tuple[Tensor, PositionEmbeddings] | None = None

    def enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*args, *kwargs.values()]
        self._entered = (given[0], given[1])

    def leave(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        assert self._entered is not None, "o_proj ran before its attention block"
        x_BTC, rope = self._entered
        self._entered = None
        o_BTHD = args[0].unflatten(-1, (-1, self._head_dim))
        self._visit(self._index, x_BTC, rope, o_BTHD)
