"""Writing a hybrid model as a folder that transformers loads without this package."""

from __future__ import annotations

import json
from copy import deepcopy
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from .attention.dispatch import OPERATORS
from .attention.modeling_hydrahead import HydraHeadForCausalLM
from .errors import ConfigError, EnvironmentFault
from .headmap import HeadMap, Operator
from .rundir import RunDir, nearest_folder

AUTO_MAP = {
    "AutoConfig": "configuration_hydrahead.HydraHeadConfig",
    "AutoModel": "modeling_hydrahead.HydraHeadModel",
    "AutoModelForCausalLM": "modeling_hydrahead.HydraHeadForCausalLM",
}
"""Which class of the copied code each Auto class of transformers takes."""

KERNELS = {
    "gdn": "archsearch's own (`triton`), FlashQLA, fla-core",
    "full": "torch's SDPA, cuDNN's within it, flash-attn",
    "prologue": "archsearch's own (`triton`)",
    "fusion": "archsearch's own (`triton`)",
}
"""What serves each operator on a GPU."""

README = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [hydrahead, linear-attention, hybrid]
---
# Hybrid of full and linear attention

{counts} of {total} query heads ({layers} layers of {heads}). `head_map.json` says which operator each head
runs: F full attention, G Gated DeltaNet, N Native Hybrid Attention. A KV cache is kept only for KV heads that an F
head reads; the others keep a state of fixed size. {positions}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True)
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0]))
```

It needs torch and transformers >= 5.6.2. The code is in this folder: read it before you trust it. Without
anything else it runs in plain torch, on any device. On a GPU faster kernels serve where they are installed; an
environment variable forces a backend:

| operator | kernels | variable | allowed |
|---|---|---|---|
{operators}

## What can serve it
| runtime | |
|---|---|
| transformers, `generate` included | yes, with `trust_remote_code=True` |
| `transformers serve`, text-generation pipelines, lm-evaluation-harness (`--model hf`) | yes, through transformers; static caches and `torch.compile` of decoding are not supported |
| vLLM, SGLang, TensorRT-LLM | no: their hybrid models choose an operator a layer, this one a head |
| llama.cpp, Ollama, MLX | no: GGUF and MLX have no such architecture |

## Where it comes from
```json
{provenance}
```
"""


def export(
    model: HydraHeadForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    head_map: HeadMap,
    directory: Path,
    provenance: dict[str, Any],
) -> None:
    """Writes weights, config, the model's code, tokenizer, head_map.json, provenance.json and a README.

    Raises ConfigError where the directory holds anything already, ValueError where head_map is not the model's.
    """
    if list(head_map.layers) != list(model.config.head_map):
        raise ValueError("export: the head map is not that of the model")
    prepare_directory(directory)
    _save_model(model, directory)
    tokenizer.save_pretrained(directory)
    copy_code(directory)
    head_map.save(directory / "head_map.json")
    facts = json.dumps(provenance, indent=1, sort_keys=True, default=str)
    (directory / "provenance.json").write_text(facts + "\n")
    (directory / "README.md").write_text(_readme(head_map, model.config.fa, facts))


def check_directory(directory: Path) -> None:
    """Raises ConfigError where there is something at that path that is no empty folder, EnvironmentFault where nothing can be
    written; makes nothing.
    """
    if directory.is_dir() and any(directory.iterdir()):
        raise ConfigError(f"--to {directory}: the folder is not empty; name a new or empty one")
    check_writable(directory)


def check_writable(directory: Path) -> None:
    """Raises ConfigError where a file is in the place of that folder, EnvironmentFault where nothing can be written; makes nothing."""
    place = nearest_folder(directory)
    if not place.is_dir():
        where = "a file is there" if place == directory else f"{place} is a file"
        raise ConfigError(f"--to {directory}: cannot make this folder ({where})")
    RunDir(directory).require_writable()


def prepare_directory(directory: Path) -> None:
    """Makes the directory. Raises ConfigError where it exists and is not empty, EnvironmentFault where it cannot be made."""
    check_directory(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentFault(
            f"--to {directory}: cannot make this folder ({error.strerror})"
        ) from error


def copy_code(directory: Path) -> None:
    """Copies the modules of the hybrid model as they are."""
    for entry in files(f"{__package__}.attention").iterdir():
        if entry.name.endswith(".py") and entry.name != "__init__.py":
            (directory / entry.name).write_bytes(entry.read_bytes())


def _save_model(model: HydraHeadForCausalLM, directory: Path) -> None:
    """Saves weights and config without touching the model, whose tensors may be views of a teacher's."""
    weights = {
        name: torch.empty_like(value, memory_format=torch.contiguous_format).copy_(value)
        for name, value in model.state_dict().items()
        if not (name == "lm_head.weight" and model.config.tie_word_embeddings)
    }
    original = model.config
    model.config = deepcopy(original)
    try:
        model.config.auto_map = AUTO_MAP
        model.save_pretrained(directory, state_dict=weights)
        # safetensors makes files for their owner alone.
        mode = (directory / "config.json").stat().st_mode
        for path in directory.glob("*.safetensors"):
            path.chmod(mode)
    finally:
        model.config = original


def _positions(fa: dict[str, Any]) -> str:
    """How full-attention heads see positions, and what that means for long inputs."""
    scale = " and queries scaled with the logarithm of their position" if fa["log_scale"] else ""
    if fa["rope_share"] == 1:
        return f"F heads have RoPE{scale}."
    if fa["rope_share"] > 0:
        return f"F heads have {fa['rope_share']:.3g} of RoPE's angles{scale}."
    return f"F heads have no RoPE (NoPE){scale}: max_position_embeddings, which is the teacher's window, does not bound them."


def _readme(head_map: HeadMap, fa: dict[str, Any], provenance: str) -> str:
    letters = "".join(head_map.layers)
    counts = ", ".join(
        f"{letters.count(op.value)} {op.name}" for op in Operator if op.value in letters
    )
    shape = head_map.model
    operators = (
        f"| {table.title} | {KERNELS[name]} | {table.variable} | {', '.join(table.allowed)} |"
        for name, table in OPERATORS.items()
    )
    return README.format(
        operators="\n".join(operators),
        counts=counts,
        positions=_positions(fa),
        total=shape.total_heads,
        layers=shape.num_layers,
        heads=shape.num_heads,
        provenance=provenance,
    )
