"""Loading teachers from folders and GGUF files: same logits, fingerprints, tokenizers, errors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from archsearch.config import TeacherConfig
from archsearch.errors import ConfigError, EnvironmentFault
from archsearch.models.teacher import byte_tokenizer, inspect_teacher, load_teacher, pick_device

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved Qwen3 model with a tokenizer of bytes that has no pad token."""
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(Qwen3Config(**SIZES)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def change_config(folder: Path, name: str = "config.json", **changes: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_load_teacher_keeps_logits(folder: Path) -> None:
    teacher = load_teacher(TeacherConfig(source=str(folder), device="cpu"))
    hf_model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.randint(300, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (teacher.model(ids).logits - hf_model(ids).logits).abs().max() < 1e-4
    assert not teacher.model.training
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())


def test_inspect_teacher(folder: Path) -> None:
    config = TeacherConfig(source=str(folder), device="cpu")
    info, teacher = inspect_teacher(config), load_teacher(config)
    assert info.shape == teacher.shape
    assert info.num_parameters == sum(p.numel() for p in teacher.model.parameters())
    assert (info.hidden_size, info.vocab_size, info.max_context) == (32, 300, 128)


def test_fingerprint(folder: Path) -> None:
    """The same for fp32 and bf16, another for other weights."""
    whole = load_teacher(TeacherConfig(source=str(folder), device="cpu"))
    half = load_teacher(TeacherConfig(source=str(folder), device="cpu", dtype="bfloat16"))
    drawn = load_teacher(TeacherConfig(source=str(folder), device="cpu", random_weights=True))
    assert half.model.dtype == torch.bfloat16
    assert whole.fingerprint == half.fingerprint
    assert whole.fingerprint != drawn.fingerprint


def test_tokenizer_without_pad(folder: Path) -> None:
    teacher = load_teacher(TeacherConfig(source=str(folder), device="cpu"))
    assert teacher.tokenizer.pad_token_id == teacher.tokenizer.eos_token_id == 1
    assert teacher.tokenizer.padding_side == "left"
    assert (teacher.model.config.pad_token_id, teacher.model.config.bos_token_id) == (1, 0)
    assert teacher.model.generation_config.pad_token_id == 1


def test_tokenizer_without_any_special_token(folder: Path) -> None:
    change_config(folder, "tokenizer_config.json", bos_token=None, eos_token=None)
    with pytest.raises(ConfigError, match=r"set pad_token in its tokenizer_config\.json"):
        load_teacher(TeacherConfig(source=str(folder), device="cpu"))


def test_tokenizer_larger_than_the_embedding(tmp_path: Path) -> None:
    Qwen3Config(**SIZES | {"vocab_size": 200}).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="258 tokens, its embedding only 200"):
        load_teacher(TeacherConfig(source=str(tmp_path), device="cpu", random_weights=True))


def test_random_weights_need_a_config_alone(tmp_path: Path) -> None:
    Qwen3Config(**SIZES).save_pretrained(tmp_path)
    config = TeacherConfig(source=str(tmp_path), device="cpu", random_weights=True)
    teacher = load_teacher(config)
    text = "Żółw 123\n"
    assert teacher.tokenizer.decode(teacher.tokenizer(text).input_ids) == text
    assert load_teacher(config).fingerprint == teacher.fingerprint
    with pytest.raises(EnvironmentFault, match=r"cannot read the tokenizer .* files are missing"):
        load_teacher(TeacherConfig(source=str(tmp_path), device="cpu"))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model_type": "olmo2"}, ConfigError, "family 'olmo2'"),
        ({"model_type": "no_such_model"}, EnvironmentFault, "config of .*no_such_model"),
        ({"hidden_act": "gelu"}, ConfigError, "hidden_act"),
    ],
)
def test_inspect_teacher_refuses(
    folder: Path, changes: dict[str, str], error: type[Exception], message: str
) -> None:
    change_config(folder, **changes)
    with pytest.raises(error, match=message):
        inspect_teacher(TeacherConfig(source=str(folder)))


def test_load_teacher_refuses_damaged_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(EnvironmentFault, match="cannot read the weights of"):
        load_teacher(TeacherConfig(source=str(folder), device="cpu"))


def test_pick_device() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(EnvironmentFault, match="torch sees"):
        pick_device("cuda:99")
    for name in ("gpu", "cuda:x", "cpu:1"):
        with pytest.raises(ConfigError, match="allowed: auto, cpu, cuda, cuda:N"):
            pick_device(name)
