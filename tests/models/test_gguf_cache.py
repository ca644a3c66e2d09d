"""GGUF files: converted once, same weights, and clear errors for those that cannot be read."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PretrainedConfig

from archsearch.config import TeacherConfig
from archsearch.errors import EnvironmentFault
from archsearch.models import gguf_cache
from archsearch.models.gguf_cache import convert
from archsearch.models.sources import locate
from archsearch.models.teacher import inspect_teacher, load_teacher

HIDDEN, DIM, HEADS, KV_HEADS, INNER, VOCABULARY = 64, 16, 4, 2, 96, 260


def write_gguf(path: Path, architecture: str = "llama") -> dict[str, np.ndarray]:
    """A model of one layer with random weights and a tokenizer of bytes; returns its tensors."""
    rng, writer = np.random.default_rng(0), gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(DIM)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", *sorted(ByteLevel.alphabet()), "ab", "cd"])
    writer.add_token_types([3, 3, *[1] * 258])
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {
        "token_embd": (VOCABULARY, HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.attn_q": (HEADS * DIM, HIDDEN),
        "blk.0.attn_k": (KV_HEADS * DIM, HIDDEN),
        "blk.0.attn_v": (KV_HEADS * DIM, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HEADS * DIM),
        "blk.0.ffn_gate": (INNER, HIDDEN),
        "blk.0.ffn_up": (INNER, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INNER),
    }
    tensors = {f"{n}.weight": rng.standard_normal(s, np.float32) for n, s in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of its own."""
    monkeypatch.setenv("ARCHSEARCH_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_load_teacher_converts_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = root / "model.gguf"
    tensors = write_gguf(path)
    config = TeacherConfig(source=str(path), device="cpu")
    before = inspect_teacher(config)
    first = load_teacher(config)
    up = first.model.model.layers[0].mlp.up_proj.weight
    assert torch.equal(up, torch.from_numpy(tensors["blk.0.ffn_up.weight"]))
    assert first.model.lm_head.weight is first.model.model.embed_tokens.weight
    assert first.tokenizer.decode(first.tokenizer("On 7 May").input_ids) == "On 7 May"
    (folder,) = (root / "cache" / "gguf").iterdir()
    assert not folder.name.startswith(".")

    monkeypatch.setattr(gguf_cache, "_write_folder", None)
    second = load_teacher(config)
    assert second.fingerprint == first.fingerprint
    assert inspect_teacher(config) == before
    ids = torch.arange(2, 50)[None]
    with torch.no_grad():
        assert torch.equal(first.model(ids).logits, second.model(ids).logits)


def test_load_teacher_without_a_writable_cache(root: Path) -> None:
    path = root / "model.gguf"
    write_gguf(path)
    (root / "cache").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="converted GGUF not kept"):
        teacher = load_teacher(TeacherConfig(source=str(path), device="cpu"))
    assert teacher.shape.num_kv_heads == KV_HEADS


@pytest.mark.parametrize("architecture", ["gemma2", "no_such_architecture"])
def test_inspect_teacher_refuses_other_architectures(root: Path, architecture: str) -> None:
    path = root / "model.gguf"
    write_gguf(path, architecture)
    with pytest.raises(EnvironmentFault, match=r"model\.gguf: .*not supported"):
        inspect_teacher(TeacherConfig(source=str(path)))


def test_inspect_teacher_refuses_damaged_files(root: Path) -> None:
    path = root / "model.gguf"
    path.write_bytes(b"GGUF and nothing more")
    with pytest.raises(EnvironmentFault, match=r"cannot read the config of .*model\.gguf"):
        inspect_teacher(TeacherConfig(source=str(path)))


def test_convert_names_missing_packages(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = root / "model.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setattr(gguf_cache.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match="needs the packages gguf and accelerate"):
        convert(locate(TeacherConfig(source=str(path))))


def test_convert_leaves_folders_alone(tmp_path: Path) -> None:
    PretrainedConfig().save_pretrained(tmp_path)
    source = locate(TeacherConfig(source=str(tmp_path)))
    assert convert(source) is source
