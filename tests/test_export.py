"""Exported folders: loaded by transformers alone with the same logits, and never over other files."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from archsearch import export as export_module
from archsearch.attention.dispatch import OPERATORS
from archsearch.attention.modeling_hydrahead import HydraHeadForCausalLM
from archsearch.attention.positions import set_rope_share
from archsearch.errors import ConfigError
from archsearch.export import export
from archsearch.headmap import HeadMap, Operator
from archsearch.models.cut import cut
from archsearch.models.full_heads import FullBranch, full_switches, measure_gamma, rope_share
from archsearch.studentconfig import FullConfig
from tests.random_models import random_supernet, random_teacher, random_tokens

ROWS = ("FFGG", "GGGG", "GFFG")

LOAD_ALONE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"archsearch", "archsearch_kernels", "fla"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

for folder in sys.argv[1:]:
    assert AutoConfig.from_pretrained(folder, trust_remote_code=True).model_type == "hydrahead"
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    case = torch.load(folder + ".pt")
    assert model.config.fa == case["fa"], model.config.fa
    with torch.no_grad():
        difference = (model(case["ids"]).logits - case["logits"]).abs().max()
    assert difference < 1e-5 * max(1, case["logits"].abs().max()), difference
    inputs = tokenizer(["a few words", "more"], return_tensors="pt", padding=True)
    text = model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert text.shape[1] == inputs.input_ids.shape[1] + 5
    again = model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False, use_cache=False)
    assert text.tolist() == again.tolist()
    # Past the window of the teacher, too.
    ids = case["ids"][:1].repeat(1, 1 + model.config.max_position_embeddings // case["ids"].shape[1])
    text = model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    with torch.no_grad():
        expected = model(text[:, :-1]).logits[:, -3:].argmax(-1)
    assert ids.shape[1] > model.config.max_position_embeddings
    assert text[:, -3:].tolist() == expected.tolist()
assert not any(name.startswith("archsearch") for name in sys.modules)
tables = [module for name, module in sys.modules.items() if name.endswith(".dispatch") and "_modules." in name]
assert tables and all(table.OPERATORS["full"].wish == "torch" for table in tables), tables
ours = [module for name, module in sys.modules.items()
        if "_modules." in name and name.endswith(("gdn_backends", "prologue_backends", "fusion_backends"))]
assert len(ours) == 3 * len(tables), ours
assert all("archsearch_kernels is not installed" in module._kernels() for module in ours), ours
"""


def write_case(
    folder: Path, family: str, tied: bool, rows: tuple[str, ...], **options: bool
) -> None:
    """Exports a random hybrid to folder, and inputs with their logits to folder.pt."""
    teacher = random_teacher(family, tied=tied)
    teacher.tokenizer.pad_token = teacher.tokenizer.eos_token
    teacher.tokenizer.padding_side = "left"
    head_map = HeadMap(teacher.shape, rows, window=(16, 8, None), slots=(4, 4, None))
    full = FullConfig.model_validate(options)
    branch = FullBranch(full, measure_gamma(teacher, random_tokens(1, 30)))
    model = cut(teacher, random_supernet(teacher), head_map, copy=True, full=branch)
    # As after a long distillation.
    set_rope_share(model, rope_share(full, 10**9))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".full.g" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.eval().requires_grad_(False)
    export(model, teacher.tokenizer, head_map, folder, {"candidate": 7})
    ids = random_tokens(2, 70)
    case = {"ids": ids, "logits": model(ids).logits, "fa": model.config.fa}
    torch.save(case, f"{folder}.pt")


def test_export_loads_without_this_package(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second", "third", "fourth")]
    write_case(folders[0], "qwen3", True, ROWS)
    write_case(folders[1], "qwen2", False, ("FFNG", "NNNN", "GFFG"))
    write_case(folders[2], "qwen3", True, ROWS, rope=False, log_scale=True, norm=True, gate=True)
    write_case(folders[3], "llama", False, ("FFNG", "GFNN", "FFFF"), rope=False, gate=True)
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    # The transformers of this process, should it lie elsewhere than the interpreter's own.
    environment["PYTHONPATH"] = str(Path(transformers.__file__).parents[1])
    environment |= {"HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["HYDRAHEAD_FULL_BACKEND"] = "torch"
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOAD_ALONE, *map(str, folders)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rope": False},
        {"log_scale": True},
        {"log_scale": True, "log_scale_form": "clipped", "log_scale_tokens": 9},
        {"norm": True},
        {"gate": True},
        {"rope": False, "log_scale": True, "norm": True, "gate": True},
    ],
)
@pytest.mark.parametrize("tokens", [0, 100, 10**9])
def test_export_round_trip_with_this_package(
    tmp_path: Path, options: dict[str, Any], tokens: int
) -> None:
    """Before, amid and after the fading of RoPE."""
    teacher = random_teacher("llama", tied=True)
    head_map = HeadMap(teacher.shape, ROWS)
    full = FullConfig.model_validate({"rope_fade_tokens": 400, **options})
    branch = FullBranch(full, measure_gamma(teacher, random_tokens(1, 30)))
    model = cut(teacher, random_supernet(teacher), head_map, full=branch)
    set_rope_share(model, rope_share(full, tokens))
    before = model.config.to_dict()
    export(model, teacher.tokenizer, head_map, tmp_path, {"candidate": 7})
    assert model.config.to_dict() == before
    again = HydraHeadForCausalLM.from_pretrained(tmp_path)
    assert again.config.fa == full_switches(full, tokens)
    ids = random_tokens(1, 20)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert HeadMap.load(tmp_path / "head_map.json") == head_map
    assert json.loads((tmp_path / "provenance.json").read_text()) == {"candidate": 7}


def test_whoever_reads_the_config_reads_the_weights(tmp_path: Path) -> None:
    write_case(tmp_path / "out", "llama", False, ("FGFG", "GGGG", "FFFF"))
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_export_copies_the_code_verbatim(tmp_path: Path) -> None:
    export_module.copy_code(tmp_path)
    own = Path(export_module.__file__).parent / "attention"
    names = {path.name for path in own.glob("*.py")} - {"__init__.py"}
    assert {path.name for path in tmp_path.iterdir()} == names
    for name in names:
        text = (own / name).read_bytes()
        assert (tmp_path / name).read_bytes() == text
        assert not re.search(rb"^\s*(from \.\.|(from|import) archsearch\b)", text, re.MULTILINE)


def test_model_names_every_module_of_its_code() -> None:
    """transformers 5.6 copies only those that the modeling file imports itself, newer ones all that it reaches."""
    own = Path(export_module.__file__).parent / "attention"
    text = (own / "modeling_hydrahead.py").read_text()
    named = set(re.findall(r"^\s*from \.(\w+) import", text, re.MULTILINE))
    others = {path.stem for path in own.glob("*.py")} - {"__init__", "modeling_hydrahead"}
    assert named == others


def test_export_readme_names_runtimes(tmp_path: Path) -> None:
    teacher = random_teacher()
    head_map = HeadMap(teacher.shape, ROWS)
    model = cut(teacher, random_supernet(teacher), head_map)
    export(model, teacher.tokenizer, head_map, tmp_path, {"source": "an experiment"})
    text = (tmp_path / "README.md").read_text()
    assert "4 FULL, 8 GDN of 12 query heads (3 layers of 4)" in text
    assert "F heads have RoPE." in text
    for runtime in ("transformers", "vLLM", "llama.cpp", "an experiment"):
        assert runtime in text
    for operator in OPERATORS.values():
        assert f"| {operator.variable} | {', '.join(operator.allowed)} |" in text
    assert text.count("archsearch's own (`triton`)") == 3


def test_export_readme_says_how_heads_see_positions(tmp_path: Path) -> None:
    teacher = random_teacher()
    head_map = HeadMap(teacher.shape, ROWS)
    full = FullConfig(rope=False, rope_fade_tokens=8, log_scale=True)
    model = cut(teacher, random_supernet(teacher), head_map, full=FullBranch(full))
    for share, words in (
        (1.0, "F heads have RoPE and queries scaled"),
        (0.25, "F heads have 0.25 of RoPE's angles and queries scaled"),
        (0.0, "F heads have no RoPE (NoPE) and queries scaled"),
    ):
        set_rope_share(model, share)
        export(model, teacher.tokenizer, head_map, tmp_path / f"{share}", {})
        assert words in (tmp_path / f"{share}" / "README.md").read_text()


def test_export_refuses(tmp_path: Path) -> None:
    teacher = random_teacher()
    head_map = HeadMap.uniform(teacher.shape, Operator.FULL)
    model = cut(teacher, None, head_map)
    kept = tmp_path / "kept.txt"
    kept.write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        export(model, teacher.tokenizer, head_map, tmp_path, {})
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]
    with pytest.raises(ConfigError, match="cannot make this folder"):
        export(model, teacher.tokenizer, head_map, kept, {})
    with pytest.raises(ValueError, match="not that of the model"):
        export(model, teacher.tokenizer, HeadMap(teacher.shape, ROWS), tmp_path / "new", {})
