"""The switches of the full-attention heads: share of RoPE, log-scale, norm and gate, alone and together.

Shapes: B batch, T tokens, n heads, D head_dim.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor

from archsearch.attention.configuration_hydrahead import (
    FA_DEFAULTS,
    HydraHeadConfig,
)
from archsearch.attention.full import FullHeads
from archsearch.attention.modeling_hydrahead import CACHE_FIELD, HydraHeadForCausalLM
from archsearch.attention.positions import full_positions, set_rope_share
from archsearch.attention.rotary import FADES, Rotary
from tests.attention.test_modeling_hydrahead import build, draw

WINDOW = 32
"""max_position_embeddings of these models: most of their inputs go beyond."""
SCALES: dict[str, dict[str, Any]] = {
    "none": {},
    "shifted": {"log_scale": True},
    "clipped": {"log_scale": True, "log_scale_form": "clipped", "log_scale_tokens": 20},
}
SHARES = [
    {"rope_share": 1.0},
    *({"rope_share": 0.4, "rope_fade": fade} for fade in FADES),
    {"rope_share": 0.0},
]
COMBINATIONS: list[dict[str, Any]] = [
    {**share, **scale, "norm": norm, "gate": gate}
    for share, scale, norm, gate in itertools.product(
        SHARES, SCALES.values(), (False, True), (False, True)
    )
]


def name_of(fa: dict[str, Any]) -> str:
    scale = fa.get("log_scale_form", "shifted") if fa.get("log_scale") else "none"
    fade = fa.get("rope_fade", "")
    flags = "".join(f"-{name}" for name in ("norm", "gate") if fa[name])
    return f"rope{fa['rope_share']:g}{fade}-{scale}{flags}"


def model_of(fa: dict[str, Any], name: str = "FG", **changes: Any) -> HydraHeadForCausalLM:
    return build(name, fa=fa, max_position_embeddings=WINDOW, **changes)


@pytest.mark.parametrize("fa", COMBINATIONS, ids=name_of)
def test_prefill_and_decode_equal_the_full_forward(fa: dict[str, Any]) -> None:
    """Beyond the window too."""
    model, ids = model_of(fa), draw(2, 45)
    output = model(ids[:, :40], use_cache=True)
    logits, cache = [output.logits], output[CACHE_FIELD]
    logits += [model(ids[:, 40:42], past_key_values=cache).logits]
    logits += [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(42, 45)]
    torch.testing.assert_close(torch.cat(logits, 1), model(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fa", COMBINATIONS, ids=name_of)
def test_left_padded_equals_unpadded(fa: dict[str, Any]) -> None:
    model, ids = model_of(fa), draw(2, 50)
    mask = torch.ones_like(ids)
    ids[1, :9], mask[1, :9] = 0, 0
    padded = model(ids[:, :48], attention_mask=mask[:, :48], use_cache=True)
    torch.testing.assert_close(
        padded.logits[1:, 9:], model(ids[1:, 9:48]).logits, atol=1e-4, rtol=1e-4
    )
    cache = padded[CACHE_FIELD]
    step = model(ids[:, 48:], attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(step[1:], model(ids[1:, 9:]).logits[:, -2:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(step[:1], model(ids[:1]).logits[:, -2:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fa", COMBINATIONS, ids=name_of)
def test_packed_documents_equal_documents_alone(fa: dict[str, Any]) -> None:
    model, ids, bounds = model_of(fa), draw(2, 50), [0, 17, 50, 59, 100]
    packed = model(ids, cu_seqlens=torch.tensor(bounds)).logits.flatten(0, 1)
    for start, stop in itertools.pairwise(bounds):
        alone = model(ids.flatten()[None, start:stop]).logits[0]
        torch.testing.assert_close(packed[start:stop], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("scale", SCALES)
def test_heads_that_share_keys_with_windows_decode(share: float, scale: str) -> None:
    """NHA heads read the FA heads' keys out of the cache, rotated or not."""
    model = model_of({"rope_share": share, **SCALES[scale]}, "FGN", qkv_bias=True)
    ids = draw(2, 60)
    cache = model(ids[:, :50], use_cache=True)[CACHE_FIELD]
    found = [model(ids[:, t : t + 2], past_key_values=cache).logits for t in range(50, 60, 2)]
    torch.testing.assert_close(torch.cat(found, 1), model(ids).logits[:, 50:], atol=1e-4, rtol=1e-4)


def test_windows_over_keys_that_are_half_rotated_are_refused() -> None:
    model, ids = model_of({"rope_share": 0.5}, "FGN"), draw(1, 12)
    cache = model(ids, use_cache=True)[CACHE_FIELD]
    with pytest.raises(ValueError, match=r"fa.rope_share 0.5: NHA heads .* at 0 and at 1 only"):
        model(ids[:, :1], past_key_values=cache)


def test_generates_past_the_window_from_padded_prompts() -> None:
    model = model_of({"rope_share": 0.0, "log_scale": True, "norm": True, "gate": True})
    prompts = [draw(1, 30)[0], draw(1, 21)[0]]
    ids, mask = torch.zeros(2, 30, dtype=torch.long), torch.zeros(2, 30, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, -len(prompt) :], mask[row, -len(prompt) :] = prompt, 1
    found = model.generate(
        ids, attention_mask=mask, max_new_tokens=12, min_new_tokens=12, do_sample=False
    )
    for row, prompt in enumerate(prompts):
        sequence = prompt
        for _ in range(12):
            logits = model(sequence[None]).logits[0, -1]
            sequence = torch.cat((sequence, logits.argmax()[None]))
        assert len(sequence) > WINDOW
        assert found[row, 30:].tolist() == sequence[len(prompt) :].tolist()


# The share of RoPE


def all_full(**fa: Any) -> HydraHeadForCausalLM:
    return model_of(fa, "F")


@pytest.mark.parametrize("fade", FADES)
def test_all_of_it_is_rope_and_none_of_it_is_none(
    monkeypatch: pytest.MonkeyPatch, fade: str
) -> None:
    """Bit by bit, from whatever share the model comes."""
    ids, plain = draw(2, 40), all_full()
    moved = all_full(rope_share=0.3, rope_fade=fade)
    set_rope_share(moved, 1.0)
    assert torch.equal(moved(ids).logits, plain(ids).logits)
    set_rope_share(moved, 0.0)
    found = moved(ids).logits
    with monkeypatch.context() as patch:
        # Angles of zero everywhere.
        patch.setattr(
            Rotary,
            "tables",
            lambda self, positions, dtype: (
                torch.ones(*positions.shape, 8, dtype=dtype),
                torch.zeros(*positions.shape, 8, dtype=dtype),
            ),
        )
        torch.testing.assert_close(found, plain(ids).logits, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(found, plain(ids).logits, atol=1e-2)


def test_without_rope_only_the_order_of_the_keys_matters_not_their_places() -> None:
    """Queries of the last token see earlier tokens as a set."""
    heads = all_full(rope_share=0.0).model.layers[0].self_attn
    x = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(0))
    order = [*torch.randperm(11, generator=torch.Generator().manual_seed(1)).tolist(), 11]
    rotary = Rotary(heads.full.config)
    tables = rotary.tables(torch.arange(12)[None], x.dtype)
    free = full_positions(rotary, torch.arange(12)[None], x.dtype, training=False)
    one, other = (heads(y, tables, own_positions=free)[:, -1] for y in (x, x[:, order]))
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    one, other = (heads(y, tables)[:, -1] for y in (x, x[:, order]))
    assert not torch.allclose(one, other, atol=1e-3)


@pytest.mark.parametrize("fade", FADES)
@pytest.mark.parametrize("rope_type", ["default", "yarn"])
def test_logits_move_on_without_jumps(rope_type: str, fade: str) -> None:
    """Ever smaller steps of the share change the logits ever less, at both ends too."""
    rope: dict[str, Any] = {"rope_theta": 1e4, "rope_type": rope_type}
    if rope_type == "yarn":
        rope |= {"factor": 4.0, "original_max_position_embeddings": 16}
    model, ids = model_of({"rope_fade": fade}, "F", rope_parameters=rope), draw(2, 40)

    def at(share: float) -> Tensor:
        set_rope_share(model, share)
        logits: Tensor = model(ids).logits
        return logits

    for share in (1.0, 0.75, 0.4, 0.0):
        here = at(share)
        sign = -1 if share == 1 else 1
        changes = [float((at(share + sign * step) - here).abs().max()) for step in (1e-2, 1e-4)]
        assert changes[1] < 0.05 * changes[0] + 1e-5
    assert float((at(0.0) - at(1.0)).abs().max()) > 0.1


@pytest.mark.parametrize("fade", FADES)
def test_fades_meet_rope_and_the_identity(fade: str) -> None:
    angles_BTR = torch.arange(50.0)[None, :, None] * torch.tensor([1.0, 0.3, 0.05, 0.002])
    for share, angles in ((1.0, angles_BTR), (0.0, torch.zeros_like(angles_BTR))):
        for found, expected in zip(
            FADES[fade](angles_BTR, share), (angles.cos(), angles.sin()), strict=True
        ):
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("fade", ["slow_first", "angles"])
def test_amid_a_fade_only_distances_count(fade: str) -> None:
    """A shift of all positions changes nothing; where rotations are mixed it does."""
    x = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(0))

    def shifted_by(count: int, name: str) -> Tensor:
        full = all_full(rope_share=0.4, rope_fade=name).model.layers[0].self_attn.full
        rotary, places = Rotary(full.config), torch.arange(count, count + 12)[None]
        positions = full_positions(rotary, places, x.dtype, training=False)
        output: Tensor = full(x, rotary.tables(places, x.dtype), own_positions=positions)
        return output

    torch.testing.assert_close(shifted_by(0, fade), shifted_by(7, fade), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(shifted_by(0, "mixed"), shifted_by(7, "mixed"), atol=1e-3)


def test_the_slowest_pairs_stand_still_first() -> None:
    positions = torch.arange(30)[None]
    rotary = Rotary(HydraHeadConfig(head_dim=16))
    cos, sin = rotary.tables(positions, torch.float32, 5 / 8)
    whole_cos, whole_sin = rotary.tables(positions, torch.float32)
    for pair in range(8):
        for channel in (pair, pair + 8):
            still = pair >= 5
            expected = torch.ones(1, 30) if still else whole_cos[..., channel]
            torch.testing.assert_close(cos[..., channel], expected)
            expected = torch.zeros(1, 30) if still else whole_sin[..., channel]
            torch.testing.assert_close(sin[..., channel], expected)


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_impossible_shares_are_refused(share: float) -> None:
    model = all_full()
    with pytest.raises(ValueError, match=r"share of RoPE is .*; allowed: 0 to 1"):
        set_rope_share(model, share)
    assert model.config.fa["rope_share"] == 1


# Norm and gate


def test_gate_starts_as_the_identity_and_norm_with_unit_rms() -> None:
    config = HydraHeadConfig(hidden_size=32, head_dim=8)
    plain = FullHeads(config, range(4))
    x = torch.randn(2, 9, 32)
    tables = Rotary(config).tables(torch.arange(9)[None], x.dtype)

    def like(**fa: bool) -> FullHeads:
        heads = FullHeads(HydraHeadConfig(hidden_size=32, head_dim=8, fa=fa), range(4))
        heads.load_state_dict(plain.state_dict(), strict=False)
        return heads

    expected = plain(x, tables)
    assert torch.equal(like(gate=True)(x, tables), expected)
    normed = like(norm=True)(x, tables)
    torch.testing.assert_close(normed.square().mean(-1), torch.ones(2, 9, 4), atol=1e-2, rtol=0)
    scale = expected.square().mean(-1, keepdim=True).add(config.rms_norm_eps).sqrt()
    torch.testing.assert_close(normed * scale, expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(like(norm=True, gate=True)(x, tables), normed)


def test_norm_gamma_and_gate_in_that_order() -> None:
    fa = {"norm": True, "gate": True}
    config = HydraHeadConfig(hidden_size=32, head_dim=8, fa=fa)
    heads = FullHeads(config, (0, 2, 3))
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter))
    plain = FullHeads(HydraHeadConfig(hidden_size=32, head_dim=8), (0, 2, 3))
    plain.load_state_dict(heads.state_dict(), strict=False)
    x = torch.randn(2, 9, 32)
    tables = Rotary(config).tables(torch.arange(9)[None], x.dtype)
    assert heads.gate_proj is not None
    o = plain(x, tables)
    o = o / (o.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * heads.gamma
    gate = 2 * torch.sigmoid(heads.gate_proj(x)).view(2, 9, 3, 8)
    torch.testing.assert_close(heads(x, tables), o * gate, atol=1e-5, rtol=1e-4)


def test_new_models_start_neutral_and_offloaded_ones_give_the_same() -> None:
    fa = {"rope_share": 0.0, "log_scale": True, "norm": True, "gate": True}
    fresh = HydraHeadForCausalLM(HydraHeadConfig(head_map=["FGFF", "FFFF"], fa=fa))
    for layer in fresh.model.layers:
        full = layer.self_attn.full
        assert bool((full.gamma == 1).all())
        assert not bool(full.gate_proj.weight.any())
        assert bool(full.q_proj.weight.any())
    model, ids = model_of(fa), draw(1, 40)
    expected = model(ids).logits
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert torch.equal(model(ids).logits, expected)


# Configs and files


@pytest.mark.parametrize("fa", [{}, None])
def test_folders_from_before_the_switches_load_unchanged(
    tmp_path: Path, fa: dict[str, Any] | None
) -> None:
    model, ids = build("FG"), draw(1, 20)
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored.pop("fa") == FA_DEFAULTS
    if fa is not None:
        stored["fa"] = fa
    (tmp_path / "config.json").write_text(json.dumps(stored))
    again = HydraHeadForCausalLM.from_pretrained(tmp_path).eval()
    assert again.config.fa == FA_DEFAULTS
    assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("fa", COMBINATIONS[1::5], ids=name_of)
def test_saved_with_what_the_model_has_now(tmp_path: Path, fa: dict[str, Any]) -> None:
    model, ids = model_of(fa), draw(1, 40)
    set_rope_share(model, 0.25)
    model.save_pretrained(tmp_path)
    again = HydraHeadForCausalLM.from_pretrained(tmp_path).eval()
    assert again.config.fa == {**FA_DEFAULTS, **fa, "rope_share": 0.25}
    assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("fa", "message"),
    [
        ({"rpoe": 1.0}, "fa .*'rpoe'.*allowed.*rope_share"),
        ({"rope_share": 1.5}, "fa.rope_share 1.5; allowed: 0 to 1"),
        ({"rope_fade": "fast"}, "fa.rope_fade 'fast'; allowed: slow_first, angles, mixed"),
        ({"log_scale_form": "square"}, "fa.log_scale_form 'square'; allowed: shifted, clipped"),
        ({"log_scale_tokens": 1}, "fa.log_scale_tokens 1; allowed: 2 or more"),
    ],
)
def test_impossible_switches_are_refused(fa: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HydraHeadConfig(fa=fa)
