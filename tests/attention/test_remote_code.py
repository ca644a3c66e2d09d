"""The modules as plain copies in a model's folder, loaded by transformers without archsearch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from archsearch import attention
from archsearch.attention.modeling_hydrahead import HydraHeadConfig, HydraHeadForCausalLM

SCRIPT = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
ids = torch.arange(1, 41)[None]
torch.save((model(ids).logits, model.generate(ids, max_new_tokens=4, do_sample=False)), sys.argv[2])
assert "archsearch" not in sys.modules
"""


def test_the_modeling_file_imports_every_module_itself() -> None:
    """transformers 5.6 copies no others; later versions follow imports of imports."""
    folder = Path(attention.__path__[0])
    source = (folder / "modeling_hydrahead.py").read_text()
    others = {path.stem for path in folder.glob("*.py")} - {"__init__", "modeling_hydrahead"}
    assert {name for name in others if f"from .{name} import" in source} == others


@torch.no_grad()
def test_copies_in_a_folder_load_by_auto_class(tmp_path: Path) -> None:
    config = HydraHeadConfig(
        vocab_size=64,
        head_map=["FGNG", "FNGG"],
        window=[8, 8],
        slots=[4, 4],
        auto_map={
            "AutoConfig": "configuration_hydrahead.HydraHeadConfig",
            "AutoModelForCausalLM": "modeling_hydrahead.HydraHeadForCausalLM",
        },
    )
    model, folder = HydraHeadForCausalLM(config).eval(), tmp_path / "model"
    model.save_pretrained(folder)
    for source in Path(attention.__path__[0]).glob("*.py"):
        shutil.copy(source, folder)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), str(tmp_path / "out.pt")],
        cwd=tmp_path,
        env=environment,
        check=True,
    )
    logits, tokens = torch.load(tmp_path / "out.pt", weights_only=True)
    ids = torch.arange(1, 41)[None]
    torch.testing.assert_close(logits, model(ids).logits, atol=0, rtol=0)
    assert tokens.tolist() == model.generate(ids, max_new_tokens=4, do_sample=False).tolist()
