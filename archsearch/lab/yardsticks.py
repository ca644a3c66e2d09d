"""Which retrieval prompts the teacher itself answers, by kind, keys and context: only those can rank candidates.

    python -m archsearch.lab.yardsticks search_spaces/smollm2_135m_gpu.yaml --keys 2 4 8 --contexts 1024 2048 4096 8192 \\
        16384 --prompts 64 --set 'probes.kinds=[single, multikey, multivalue, multiquery, tracking]' \\
        --set 'probes.unseen=[single, multikey, multivalue, multiquery, tracking]' --figures runs/lab/yardsticks.json

Prompts of the config's files are asked too. A figure has the field decides: whether at least DECIDES of them are answered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..config import RunConfig
from ..configfile import load_config
from ..data.answers_file import read_answers
from ..data.niah import Probe
from ..data.tasks import RETRIEVAL_KINDS, make_probes
from ..evaluation.retrieval import retrieval
from ..metrics import UNSEEN
from ..models.kernels import use_kernels
from ..models.sources import resolve_path
from ..models.teacher import Teacher, load_teacher
from ..search.trial import EVALUATION_TOKENS, PROBE_SEED
from .entry import add_config, run_script, script_parser
from .records import LabBook

DECIDES = 0.9
"""Least share of prompts that the teacher answers where a kind is to decide anything."""


def asked(
    teacher: Teacher, config: RunConfig, keys: Sequence[int], contexts: Sequence[int]
) -> Iterator[tuple[str, int, int, list[Probe]]]:
    """Prompts by (kind, keys, context): those of the config's kinds and unseen kinds, then those of its files."""
    probes = config.probes
    kinds = [(kind, False) for kind in probes.kinds if kind in RETRIEVAL_KINDS]
    for kind, unseen in [*kinds, *((kind, True) for kind in probes.unseen)]:
        for count in [1] if kind == "single" else keys:
            for context in contexts:
                drawn = make_probes(
                    teacher.tokenizer,
                    kind,
                    probes.prompts,
                    context,
                    keys=count,
                    digits=probes.digits,
                    seed=config.seed + PROBE_SEED,
                    unseen=unseen,
                )
                yield f"{UNSEEN if unseen else ''}{kind}", count, context, drawn
    for file in probes.files:
        found = read_answers(resolve_path(file.path), teacher.tokenizer, file.name)
        for group, context in sorted({(probe.group, probe.context) for probe in found}):
            own = [p for p in found if (p.group, p.context) == (group, context)]
            yield f"{file.name} {group}".strip(), 0, context, own


def main() -> None:
    """Command line entry."""
    parser = script_parser(__doc__)
    add_config(parser)
    parser.add_argument("--keys", type=int, nargs="+", default=[], help="needles of a prompt")
    parser.add_argument("--contexts", type=int, nargs="+", default=[], help="lengths of prompts")
    parser.add_argument("--prompts", type=int, help="of each kind and length")
    args = parser.parse_args()
    more = [f"probes.prompts={args.prompts}"] if args.prompts else []
    config = load_config(args.config, [*args.overrides, *more])
    use_kernels(config.kernels)
    teacher, book = load_teacher(config.teacher), LabBook(config.seed)
    keys = args.keys or [config.probes.multi_keys]
    batch_tokens = EVALUATION_TOKENS[teacher.device.type]
    print("| prompts | keys | context | answered | NLL | decides |\n|---|---|---|---|---|---|")
    with book.kept(args.figures):
        for kind, count, context, probes in asked(
            teacher, config, keys, args.contexts or config.probes.contexts
        ):
            alone = [_plain(probe) for probe in probes]
            found = retrieval(teacher.model, alone, batch_tokens=batch_tokens)
            facts = {"kind": kind, "keys": count, "context": context, "prompts": len(probes)}
            match, nll = found["asked_match"], found["asked_nll"]
            book.add("share answered", match, "share", None, **facts, decides=match >= DECIDES)
            book.add("answer NLL", nll, "nats/token", None, **facts)
            shown = "yes" if match >= DECIDES else "no"
            print(
                f"| {kind} | {count or ''} | {context:,} | {match:.2f} | {nll:.3f} | {shown} |",
                flush=True,
            )


def _plain(probe: Probe) -> Probe:
    """The probe under one name, whatever its kind."""
    return Probe("asked", 0, probe.prompt, probe.answer, (), ())


if __name__ == "__main__":
    run_script(main)
