"""Draws text from a config's teacher and keeps it as token ids, for shipping beside the model.

python -m archsearch.lab.draw_text search_spaces/tiny.yaml --sequences 512 --length 512 --seed 11 --to train.npy
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..configfile import load_config
from ..data.sampling import draw_tokens
from ..models.teacher import load_teacher
from .entry import add_config, run_script, script_parser


def main() -> None:
    """Command line entry."""
    parser = script_parser(__doc__, figures=False)
    add_config(parser)
    parser.add_argument("--sequences", type=int, required=True, help="how many")
    parser.add_argument("--length", type=int, required=True, help="tokens of each")
    parser.add_argument("--seed", type=int, required=True, help="of the draws")
    parser.add_argument("--to", type=Path, required=True, help="an .npy file")
    args = parser.parse_args()
    teacher = load_teacher(load_config(args.config, args.overrides).teacher)
    tokens = draw_tokens(
        teacher.model,
        teacher.tokenizer,
        sequences=args.sequences,
        length=args.length,
        seed=args.seed,
    )
    np.save(args.to, tokens)
    print(f"{args.to}: {tokens.shape[0]} x {tokens.shape[1]} tokens, {tokens.dtype}")


if __name__ == "__main__":
    run_script(main)
