"""FLOPs a token of a training step: those of the products that it needs, each once; what is computed again does not count.

Legend: T tokens of a sequence, D head_dim, V vocabulary, C hidden size.
"""

from __future__ import annotations

from torch import nn

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..models.supernet import Supernet
from ..models.teacher import Teacher
from .kernel_timing import FLOOR


def products(module: nn.Module) -> int:
    """Weights of its linear layers: two FLOPs each for a token."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


def core_flops(model: HydraHeadForCausalLM, tokens: int) -> tuple[float, float]:
    """FLOPs a token of all heads' operators over a context of T tokens, forward and backward.

    FA: 2 T D a head and token, backward 2.5 times that. GDN: the figures of D 128, growing with its square.
    """
    dim, layers = model.config.head_dim, model.config.head_map
    letters = "".join("".join(row) for row in layers)
    full, linear = letters.count("F"), letters.count("G")
    scale = (dim / 128) ** 2
    forward = full * 2 * tokens * dim + linear * FLOOR["forward"][0] * scale
    return forward, full * 5 * tokens * dim + linear * FLOOR["backward"][0] * scale


def alignment_flops(teacher: Teacher, supernet: Supernet, tokens: int) -> float:
    """FLOPs a token: the teacher's layers forward, the twins forward and backward, without gradients of their inputs."""
    shape = teacher.shape
    heads, dim = shape.num_layers * shape.num_heads, shape.head_dim
    twins = products(supernet)
    scale = (dim / 128) ** 2
    cores = heads * scale * (FLOOR["forward"][0] + FLOOR["backward"][0])
    # The error as o_proj sees it: one product with a matrix a head, and its gradient.
    errors = heads * 4 * dim * dim
    layers = 2 * products(teacher.model.model.layers) + core_flops(teacher.model, tokens)[0]
    return layers + 4 * twins + cores + errors


def distillation_flops(
    teacher: Teacher,
    student: HydraHeadForCausalLM,
    tokens: int,
    *,
    form: str = "exact",
    trainable: str = "attention",
) -> float:
    """FLOPs a token: what form asks of the teacher, the student forward, and backward with gradients of what is trained."""
    inside, head = products(student.model.layers), products(student.lm_head)
    attention = sum(products(layer.self_attn) for layer in student.model.layers)
    trained = attention if trainable == "attention" else inside + head
    forward, backward = core_flops(student, tokens)
    ours = 4 * (inside + head) + 2 * trained + forward + backward
    theirs = {
        "exact": 2 * (products(teacher.model.model.layers) + head)
        + core_flops(teacher.model, tokens)[0],
        "hidden": 2 * head,
    }
    return ours + theirs.get(form, 0)
