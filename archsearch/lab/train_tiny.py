"""Trains the tiny Qwen3 teacher that ships with the package, on text its generator writes.

    python -m archsearch.lab.train_tiny --to DIR [--minutes 6] [--seed 0]

Writes DIR (config, fp16 weights, tokenizer) and DIR/log.json: one row each 250 steps, and the final
retrieval by context and number of keys. About 6 minutes on one H200.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from archsearch.data.niah import stack
from archsearch.data.tasks import make_probes
from archsearch.lab.entry import run_script, script_parser
from archsearch.lab.tiny_corpus import DIGITS, Rows, build_tokenizer, filler_rows

CONTEXTS = (256, 512, 1024)
KEYS = (4, 8, 16)


def tiny_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """Six layers of eight query heads over four KV heads, q/k norm, tied embeddings: 2.2 M parameters."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def weighted_loss(model: Qwen3ForCausalLM, ids: Tensor, weights: Tensor) -> Tensor:
    """Weighted next-token cross entropy of ids [B, T]; weights [B, T] belong to the predicted token."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    losses = F.cross_entropy(
        logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
    ).view_as(ids[:, 1:])
    scale = weights[:, 1:]
    return (losses * scale).sum() / scale.sum()


@torch.no_grad()
def retrieval_match(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    context: int,
    keys: int,
    count: int,
    seed: int,
) -> float:
    """Share of probes whose whole answer is the argmax at every position (teacher-forced)."""
    probes = make_probes(
        tokenizer,
        "multikey" if keys > 1 else "single",
        count,
        context,
        keys=keys,
        digits=DIGITS,
        seed=seed,
    )
    right = 0
    for start in range(0, count, 64):
        batch = stack(probes[start : start + 64])
        device = model.device
        logits = model(
            input_ids=batch.input_ids.to(device), attention_mask=batch.mask.to(device)
        ).logits
        for row, probe in enumerate(probes[start : start + 64]):
            columns = batch.positions[row, : len(probe.answer)].to(device)
            guess = logits[row, columns].argmax(-1).cpu()
            right += bool((guess == torch.tensor(probe.answer)).all())
    return right / count


def _learning_rate(progress: float, peak: float) -> float:
    warm = min(1.0, progress / 0.03)
    return peak * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Trains until args.minutes have passed and returns the log."""
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = tiny_config(tokenizer)
    config._attn_implementation = "sdpa"
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.05, fused=device == "cuda"
    )
    log: dict[str, Any] = {
        "seed": args.seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocab": len(tokenizer),
        "args": {k: str(v) for k, v in vars(args).items() if k != "to"},
        "torch": torch.__version__,
        "rows": [],
    }
    started, step, tokens = time.monotonic(), 0, 0
    stages = iter(((0.35, (256,)), (1.0, CONTEXTS)))
    until, lengths = next(stages)
    batches = iter(_loader(tokenizer, lengths, args, step))
    while (progress := (time.monotonic() - started) / (60 * args.minutes)) < 1:
        if progress > until:
            until, lengths = next(stages)
            batches = iter(_loader(tokenizer, lengths, args, step))
        ids, weights = (part.to(device, non_blocking=True) for part in next(batches))
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(progress, args.lr)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = weighted_loss(model, ids, weights)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step, tokens = step + 1, tokens + ids.numel()
        if step % args.log_every == 0:
            model.eval()
            match = retrieval_match(model, tokenizer, max(lengths) // 2, 4, 64, seed=900)
            model.train()
            row = {
                "step": step,
                "tokens": tokens,
                "seconds": round(time.monotonic() - started, 1),
                "loss": round(loss.item(), 4),
                "multi4": match,
            }
            log["rows"].append(row)
            print(json.dumps(row), flush=True)
    model.half().float().eval()
    log |= final_figures(model, tokenizer, args.probes)
    model.half().save_pretrained(args.to)
    tokenizer.save_pretrained(args.to)
    return log


def final_figures(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, probes: int
) -> dict[str, Any]:
    """Exact match by "context/keys", as many keys as fit, and the NLL of filler in nats a token."""
    retrieval = {
        f"{context}/{keys}": retrieval_match(model, tokenizer, context, keys, probes, seed=901)
        for context in CONTEXTS
        for keys in (1, *KEYS)
        if 40 * keys <= context
    }
    held_out = torch.from_numpy(filler_rows(tokenizer, 32, 512, seed=902)).to(model.device)
    with torch.no_grad():
        nll = float(weighted_loss(model, held_out, torch.ones_like(held_out)))
    return {"retrieval": retrieval, "filler_nll": nll}


def _loader(
    tokenizer: PreTrainedTokenizerFast,
    lengths: tuple[int, ...],
    args: argparse.Namespace,
    step: int,
) -> DataLoader[tuple[Tensor, Tensor]]:
    rows = Rows(tokenizer, lengths, args.batch_tokens, args.seed + step)
    return DataLoader(
        rows, batch_size=None, num_workers=args.workers, prefetch_factor=4 if args.workers else None
    )


def main() -> None:
    """Command line entry."""
    parser = script_parser(__doc__, figures=False)
    parser.add_argument("--to", type=Path, required=True, help="a folder")
    parser.add_argument("--minutes", type=float, default=6.0, help="of training")
    parser.add_argument("--seed", type=int, default=0, help="of weights and text")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--batch-tokens", type=int, default=65_536, help="of a step")
    parser.add_argument("--workers", type=int, default=14, help="processes that make text")
    parser.add_argument("--probes", type=int, default=256, help="prompts of the test at the end")
    parser.add_argument("--log-every", type=int, default=250, help="steps")
    args = parser.parse_args()
    log = train(args)
    (args.to / "log.json").write_text(json.dumps(log, indent=1) + "\n")
    print(json.dumps({key: log[key] for key in ("parameters", "retrieval", "filler_nll")}))


if __name__ == "__main__":
    run_script(main)
