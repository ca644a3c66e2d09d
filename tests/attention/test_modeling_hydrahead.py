"""The hybrid model as a whole: caching, padding, generation, saving.

Shapes: B batch, T tokens, C hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor

from archsearch.attention.modeling_hydrahead import (
    CACHE_FIELD,
    HydraHeadConfig,
    HydraHeadForCausalLM,
)

LENGTHS = (1, 7, 63, 64, 65, 130)
MAPS = {
    "F": ["FFFF", "FFFF"],
    "G": ["GGGG", "GGGG"],
    "N": ["NNNN", "NNNN"],
    "FG": ["FGGF", "GGGF"],
    "FGN": ["GFNN", "NNGG", "FNNG"],
    "layers": ["GGGG", "FFFF", "NNNN"],
}


def build(name: str, **changes: Any) -> HydraHeadForCausalLM:
    """A random model of the head map MAPS[name] in which every head matters."""
    rows = MAPS[name]
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": len(rows),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "head_map": rows,
        "window": [24 if "N" in row else None for row in rows],
        "slots": [4 if "N" in row else None for row in rows],
        "qk_norm": True,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    model = HydraHeadForCausalLM(HydraHeadConfig(**{**sizes, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.requires_grad_(False)


@pytest.fixture(params=MAPS)
def model(request: pytest.FixtureRequest) -> HydraHeadForCausalLM:
    return build(request.param)


def draw(batch: int, tokens: int) -> Tensor:
    return torch.randint(1, 97, (batch, tokens), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_and_decode_equal_the_full_forward(
    model: HydraHeadForCausalLM, length: int
) -> None:
    ids = draw(2, length + 3)
    output = model(ids[:, :length], use_cache=True)
    logits, cache = [output.logits], output[CACHE_FIELD]
    for t in range(length, length + 3):
        logits.append(model(ids[:, t : t + 1], **{CACHE_FIELD: cache}).logits)
    assert cache.get_seq_length() == length + 3
    torch.testing.assert_close(torch.cat(logits, 1), model(ids).logits, atol=1e-4, rtol=1e-4)


def test_prefill_in_pieces_equals_the_full_forward(model: HydraHeadForCausalLM) -> None:
    ids = draw(2, 100)
    cache = model(ids[:, :41], use_cache=True)[CACHE_FIELD]
    found = model(ids[:, 41:], past_key_values=cache).logits
    torch.testing.assert_close(found, model(ids).logits[:, 41:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("length", LENGTHS)
def test_left_padded_equals_unpadded(model: HydraHeadForCausalLM, length: int) -> None:
    ids = draw(2, length + 9)
    mask = torch.ones_like(ids)
    ids[1, :9], mask[1, :9] = 0, 0
    padded = model(ids, attention_mask=mask).logits
    alone = model(ids[1:, 9:]).logits
    torch.testing.assert_close(padded[1:, 9:], alone, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(padded[:1], model(ids[:1]).logits, atol=1e-4, rtol=1e-4)


def test_generate_equals_full_forwards_step_by_step(model: HydraHeadForCausalLM) -> None:
    prompts = [draw(1, 30)[0], draw(1, 17)[0]]
    ids, mask = torch.zeros(2, 30, dtype=torch.long), torch.zeros(2, 30, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, -len(prompt) :], mask[row, -len(prompt) :] = prompt, 1
    found = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    for row, prompt in enumerate(prompts):
        sequence = prompt
        for _ in range(4):
            following = model(sequence[None]).logits[0, -1].argmax()
            sequence = torch.cat((sequence, following[None]))
        assert found[row, 30:].tolist() == sequence[len(prompt) :].tolist()


def test_generate_alone_equals_generate_without_a_cache(model: HydraHeadForCausalLM) -> None:
    ids = draw(1, 12)
    with_cache = model.generate(ids, max_new_tokens=4, do_sample=False)
    without = model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=False)
    assert with_cache.tolist() == without.tolist()


def test_beam_search_reorders_the_cache(model: HydraHeadForCausalLM) -> None:
    ids = draw(2, 12)
    beams = model.generate(ids, max_new_tokens=4, num_beams=3, do_sample=False)
    without = model.generate(ids, max_new_tokens=4, num_beams=3, do_sample=False, use_cache=False)
    assert beams.tolist() == without.tolist()


def test_run_layers_in_two_parts_equals_the_model(model: HydraHeadForCausalLM) -> None:
    ids, inner = draw(2, 20), model.model
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    hidden = inner.run_layers(inner.embed_tokens(ids), 0, 1, mask)
    hidden = inner.run_layers(hidden, 1, len(inner.layers), mask)
    expected = inner(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(inner.norm(hidden), expected)


def test_heads_are_what_o_proj_sees(model: HydraHeadForCausalLM) -> None:
    seen: list[Tensor] = []
    attention = model.model.layers[0].self_attn
    handle = attention.o_proj.register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0])
    )
    ids = draw(1, 9)
    model(ids)
    handle.remove()
    x = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
    rope = model.model.rotary.tables(torch.arange(9)[None], x.dtype)
    torch.testing.assert_close(attention.heads(x, rope).flatten(-2), seen[0])


def test_offloaded_weights_give_the_same(model: HydraHeadForCausalLM) -> None:
    """They are there only while their own module runs."""
    ids = draw(1, 9)
    expected = model(ids).logits
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.model.layers[0].input_layernorm.weight.is_meta
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("tied", [False, True])
def test_saved_and_reloaded_gives_the_same_logits(tmp_path: Path, tied: bool) -> None:
    model = build("FGN", tie_word_embeddings=tied)
    ids = draw(2, 40)
    model.save_pretrained(tmp_path)
    again = HydraHeadForCausalLM.from_pretrained(tmp_path).eval()
    assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied
    assert again.config.head_map == MAPS["FGN"]
    torch.testing.assert_close(again(ids).logits, model(ids).logits, atol=0, rtol=0)


def test_loss_is_the_next_token_cross_entropy() -> None:
    model, ids = build("FG"), draw(2, 12)
    labels = ids.clone()
    labels[0, :5] = -100
    output = model(ids, labels=labels)
    logs = output.logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    kept = labels[:, 1:] != -100
    torch.testing.assert_close(output.loss, -logs[kept].mean())


def test_logits_to_keep_and_embeddings_and_hidden_states() -> None:
    model, ids = build("FG"), draw(2, 12)
    whole = model(ids, output_hidden_states=True)
    assert len(whole.hidden_states) == 3
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, whole.logits[:, -2:])
    chosen = model(ids, logits_to_keep=torch.tensor([3, 7])).logits
    torch.testing.assert_close(chosen, whole.logits[:, [3, 7]])
    embeds = model.model.embed_tokens(ids)
    torch.testing.assert_close(model(inputs_embeds=embeds).logits, whole.logits)
    assert torch.equal(model(ids, return_dict=False)[0], whole.logits)


def test_impossible_calls_are_refused() -> None:
    model, ids = build("FG"), draw(1, 4)
    with pytest.raises(ValueError, match="exactly one"):
        model()
    with pytest.raises(ValueError, match="HydraHeadCache"):
        model(ids, past_key_values=object())
    with pytest.raises(ValueError, match="attention_mask has shape"):
        model(ids, attention_mask=torch.ones(1, 3))
    with pytest.raises(ValueError, match="output_attentions"):
        model(ids, output_attentions=True)


def test_the_same_map_in_bf16_stays_close() -> None:
    model, ids = build("FGN"), draw(2, 70)
    expected = model(ids).logits
    found = model.bfloat16()(ids).logits
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).abs().mean() < 0.05 * expected.abs().mean()


@pytest.mark.parametrize("rope_type", ["linear", "llama3", "yarn"])
def test_scaled_rope_decodes_as_it_prefills(rope_type: str) -> None:
    rope = {"rope_theta": 1e4, "rope_type": rope_type, "factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    if rope_type == "linear":
        del rope["original_max_position_embeddings"]
    if rope_type == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model, ids = build("FGN", rope_parameters=rope, max_position_embeddings=256), draw(1, 60)
    cache = model(ids[:, :50], use_cache=True)[CACHE_FIELD]
    found = model(ids[:, 50:], past_key_values=cache).logits
    torch.testing.assert_close(found, model(ids).logits[:, 50:], atol=1e-4, rtol=1e-4)


def test_a_window_as_long_as_the_input_is_full_attention() -> None:
    full, native = build("F"), build("N", window=[70, 70])
    source = {name.replace(".full.", ".nha."): tensor for name, tensor in full.state_dict().items()}
    missing = native.load_state_dict(source, strict=False).missing_keys
    assert all(name.endswith("slot_proj.weight") for name in missing)
    ids = draw(2, 70)
    torch.testing.assert_close(native(ids).logits, full(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"head_map": ["FF"]},
        {"head_map": ["FFFX", "FFFF"]},
        {"head_map": ["NFFF", "FFFF"], "window": [None, None]},
        {"num_key_value_heads": 3},
        {"head_dim": 7},
        {"hidden_act": "gelu"},
        {"gdn": {"rpoe": True}},
        {"nha": {"norm": True}},
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}},
    ],
)
def test_impossible_configs_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=next(iter(changes)).split("_")[-1] + "|NHA|switches|multiple"
    ):
        build("F", **changes)
