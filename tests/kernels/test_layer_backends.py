"""Our prologue and fusion kernels as backends: behind the table's calls, and inside the heads' modules and a mixed layer.

Everything is compared with the torch path on the same module: outputs and the gradients of the input and every parameter.
On a machine without a GPU: TRITON_INTERPRET=1 python -m pytest tests/kernels, with triton installed.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from archsearch import kernel_proofs
from archsearch.attention.backends import INFERENCE, STEP, TRAINING, Operator, Situation
from archsearch.attention.cache import GatedDeltaState, KeyValueStore, LayerCache
from archsearch.attention.configuration_hydrahead import HydraHeadConfig
from archsearch.attention.dispatch import OPERATORS, norm_and_rotate
from archsearch.attention.full import FullHeads, Mask, build_mask
from archsearch.attention.gdn import GatedDeltaHeads
from archsearch.attention.modeling_hydrahead import HybridAttention
from archsearch.attention.rotary import Rotary

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
AROUND = ("prologue", "fusion")
BARE = {"rope": False, "norm": False, "gate": False, "bias": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "all": {"qk_norm": True},
    "conv": {"qk_norm": True, "gdn": {"conv": True}},
    "no qk norm": {},
    "no gate": {"qk_norm": True, "gdn": {"gate": False}},
    "no bias": {"gdn": {"bias": False}},
    "no rope": {"qk_norm": True, "gdn": {"rope": False}},
    "no norm": {"gdn": {"norm": False}},
    "bare": {"gdn": BARE},
    "bf16": {"qk_norm": True, "dtype": torch.bfloat16},
}
SLACK = 2.0 if DEVICE.type == "cpu" else 1.2
"""Of errors in bf16: Triton's interpreter cuts off where a GPU rounds, which doubles them."""
TOKENS, PADDING = 21, 5
Run = Callable[[Any, Tensor], list[Tensor]]
"""What a module gives of its input."""


def config(row: str = "FGGF", **changes: Any) -> HydraHeadConfig:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": len(row),
        "num_key_value_heads": 2,
        "head_dim": 16,
        "head_map": [row],
        "window": [8 if "N" in row else None],
        "slots": [4 if "N" in row else None],
    }
    return HydraHeadConfig(**{**sizes, **changes})


def built(build: Callable[[HydraHeadConfig], nn.Module], row: str, variant: str) -> nn.Module:
    """A module in which every parameter is drawn at random, so that none is at an identity start."""
    changes = dict(VARIANTS[variant])
    dtype = changes.pop("dtype", torch.float32)
    torch.manual_seed(0)
    module = build(config(row, **changes)).to(DEVICE)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return module.to(dtype)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Forces who computes what is around the heads, torch in them; returns the list in which that backend's calls are noted."""
    table = dict(OPERATORS)

    def force(name: str) -> list[str]:
        calls: list[str] = []
        for key, operator in table.items():
            plain = operator.backend("torch")
            backend = operator.backend(name) if key in AROUND else plain

            def run(call: Any, key: str = key, run: Any = backend.run) -> Any:
                calls.append(key)
                return run(call)

            # On the CPU the table would refuse it.
            able = replace(backend, run=run, cannot=lambda situation: None)
            monkeypatch.setitem(OPERATORS, key, Operator(key, key, "NO", (able, plain)))
        return calls

    return force


def rotary_tables(tokens: int, dtype: torch.dtype, first: int = 0) -> tuple[Tensor, Tensor]:
    positions = torch.arange(first, first + tokens, device=DEVICE)[None]
    return Rotary(config()).tables(positions, dtype)


def draw(dtype: torch.dtype, tokens: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, tokens, 32, generator=generator).to(DEVICE, dtype)


def padding(tokens: int = TOKENS) -> Tensor:
    """Two rows, the second with padding before its tokens."""
    mask = torch.ones(2, tokens, dtype=torch.long, device=DEVICE)
    mask[1, :PADDING] = 0
    return mask


def with_gradients(module: nn.Module, run: Run) -> list[Tensor]:
    """What run gives of a random input, and the gradients of that input and of every parameter."""
    x_BTC = draw(next(module.parameters()).dtype).requires_grad_()
    outputs = run(module, x_BTC)
    generator = torch.Generator().manual_seed(2)
    loss = sum(
        (x.float() * torch.randn(x.shape, generator=generator).to(DEVICE)).sum() for x in outputs
    )
    return [*outputs, *torch.autograd.grad(loss, [x_BTC, *module.parameters()])]


def assert_alike(
    found: list[Tensor], expected: list[Tensor], exact: list[Tensor] | None = None
) -> None:
    """By the norm of the difference over the norm. exact: what fp32 gives, from which ours is no farther than bf16's torch ops."""
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if exact is None:
            assert error_of(one, other) < 1e-4, place
        else:
            right = exact[place]
            assert error_of(one, right) < SLACK * error_of(other, right) + 2e-3, place


def error_of(x: Tensor, right: Tensor) -> float:
    right = right.detach().double()
    return float((x.detach().double() - right).norm() / right.norm().clamp_min(1e-12))


def compare(use: Callable[[str], list[str]], module: nn.Module, run: Run) -> list[str]:
    """Our kernels against torch's ops, outputs and gradients; returns what our kernels were called for."""
    use("torch")
    expected, exact = with_gradients(module, run), None
    if expected[0].dtype != torch.float32:
        exact = with_gradients(copy.deepcopy(module).float(), run)
    calls = use("triton")
    assert_alike(with_gradients(module, run), expected, exact)
    return calls


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("purpose", [TRAINING, INFERENCE, STEP])
def test_backend_agrees_with_the_reference(name: str, purpose: str) -> None:
    situation = Situation(DEVICE, torch.float32, 16, purpose)
    call, right = kernel_proofs.CASES[name](situation)
    run = OPERATORS[name].backend("triton").run
    errors = kernel_proofs._errors(run, call, right, purpose == TRAINING)
    assert max(errors.values()) < 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
def test_linear_heads(use: Callable[[str], list[str]], variant: str) -> None:
    """With padding and a state, which the next call reads."""
    heads = built(lambda found: GatedDeltaHeads(found, 3), "FGGF", variant)

    def run(module: Any, x_BTC: Tensor) -> list[Tensor]:
        state, rope = GatedDeltaState(), rotary_tables(TOKENS, x_BTC.dtype)
        valid_BT = padding().bool()
        parts = ((0, 15), (15, TOKENS))
        o = [
            module(x_BTC[:, a:b], [table[:, a:b] for table in rope], valid_BT[:, a:b], state)
            for a, b in parts
        ]
        assert state.memory_BnDD is not None
        return [*o, state.memory_BnDD]

    calls = compare(use, heads, run)
    assert calls.count("prologue") == (0 if variant == "bare" else 2)
    assert calls.count("fusion") == 2


@pytest.mark.parametrize("variant", ["all", "no qk norm", "bf16"])
def test_full_heads(use: Callable[[str], list[str]], variant: str) -> None:
    """KV heads with unequal numbers of readers, padding, a cache; what others unpack of keys and values."""
    heads = built(lambda found: FullHeads(found, (0, 1, 2)), "FFFF", variant)

    def run(module: Any, x_BTC: Tensor) -> list[Tensor]:
        mask, rope = build_mask(padding(), TOKENS, 0, DEVICE), rotary_tables(TOKENS, x_BTC.dtype)
        store, kv = KeyValueStore(), module.keys_values(x_BTC)
        o = module(x_BTC, rope, mask, store, kv)
        normed_k, v = kv
        return [o, *store.before(0, TOKENS), normed_k, v]

    calls = compare(use, heads, run)
    assert calls.count("prologue") == 1


@pytest.mark.parametrize(
    ("row", "variant", "fusions"),
    [
        ("FGGF", "all", 1),
        ("GFGG", "no gate", 1),
        ("GGFG", "no bias", 1),
        ("FGGG", "no norm", 1),
        ("GGGF", "bare", 1),
        ("FFGF", "bf16", 1),
        ("GGGG", "conv", 1),
        ("FFFF", "all", 0),
        ("FGNG", "all", 1),
        ("FNGF", "no qk norm", 1),
    ],
)
def test_mixed_layers(
    use: Callable[[str], list[str]], row: str, variant: str, fusions: int
) -> None:
    layer = built(lambda found: HybridAttention(found, 0), row, variant)

    def run(module: Any, x_BTC: Tensor) -> list[Tensor]:
        mask, rope = build_mask(padding(), TOKENS, 0, DEVICE), rotary_tables(TOKENS, x_BTC.dtype)
        heads_BTHD = module.heads(x_BTC, rope, mask)
        assert heads_BTHD.shape == (2, TOKENS, 4, 16)
        return [module.o_proj(heads_BTHD.flatten(-2))]

    calls = compare(use, layer, run)
    assert calls.count("fusion") == fusions


@pytest.mark.parametrize("row", ["FGGF", "GGGG", "GFNG"])
def test_a_cache_filled_by_kernels_serves_steps_in_torch(
    use: Callable[[str], list[str]], row: str
) -> None:
    layer = built(lambda found: HybridAttention(found, 0), row, "all")
    x_BTC, attended, outputs = draw(torch.float32), padding(), []

    def call(start: int, stop: int, cache: LayerCache | None) -> Tensor:
        mask = build_mask(attended[:, :stop], stop - start, start, DEVICE)
        rope = rotary_tables(stop - start, x_BTC.dtype, start)
        output: Tensor = layer(x_BTC[:, start:stop], rope, mask, cache)
        return output

    with torch.inference_mode():
        use("torch")
        expected = call(0, TOKENS, None)
        calls, cache = use("triton"), LayerCache()
        outputs.append(call(0, TOKENS - 3, cache))
        filled = sum(name in AROUND for name in calls)
        outputs += [call(t, t + 1, cache) for t in range(TOKENS - 3, TOKENS)]
    assert_alike([torch.cat(outputs, 1)], [expected])
    assert filled == sum(name in AROUND for name in calls) > 0


def test_autocast_keeps_the_types_of_the_torch_path(use: Callable[[str], list[str]]) -> None:
    """fp32 weights and tables beside bf16 heads, as twins are trained."""
    heads = built(lambda found: GatedDeltaHeads(found, 4), "GGGG", "all")

    def run(module: Any, x_BTC: Tensor) -> list[Tensor]:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            o = module(x_BTC, rotary_tables(TOKENS, torch.float32))
        return [o.float()]

    use("torch")
    expected = with_gradients(heads, run)
    calls = use("triton")
    found = with_gradients(heads, run)
    assert calls.count("prologue") == calls.count("fusion") == 1
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).norm() < 3e-2 * other.norm()


def test_norms_whose_weights_lie_elsewhere_run_as_modules(
    use: Callable[[str], list[str]],
) -> None:
    """As accelerate leaves them between calls when it offloads a model."""
    heads = built(lambda found: FullHeads(found, range(4)), "FFFF", "all")
    x_BTC, rope = draw(torch.float32), rotary_tables(TOKENS, torch.float32)
    with torch.no_grad():
        use("torch")
        expected = heads(x_BTC, rope, Mask())
        use("triton")
        for norm in (heads.q_norm, heads.k_norm):
            weight = norm.weight
            norm.weight = nn.Parameter(weight.to("meta"))
            norm.register_forward_pre_hook(
                lambda module, args, weight=weight: setattr(module, "weight", weight)
            )
        assert_alike([heads(x_BTC, rope, Mask())], [expected])


def test_nothing_to_do_is_not_a_call(use: Callable[[str], list[str]]) -> None:
    calls, x = use("triton"), torch.randn(1, 3, 2, 16, device=DEVICE)
    assert norm_and_rotate(x, x, None, None, None) == (x, x)
    assert not calls
