"""KL, agreement and retrieval of thousands of head maps with supernet weights, for a table that stands for the model.

    python -m archsearch.lab.map_measures RUN --maps 5000 --seconds 400 --part 0/3 --to part0.npz
    python -m archsearch.lab.map_measures --join part0.npz part1.npz part2.npz --to table.npz

RUN has a supernet and held-out text; the scores that it has shape the maps (map_list). Part i/n takes every n-th map of the list.
The file is written every SAVE_SECONDS, and the same command again goes on with what is missing.

No student is cut: every layer keeps the teacher's heads and all twins, and a map says whose output counts, with the same
weights and operators as in a cut student. Text and prompts run in one forward where the device allows it.

Shapes: N maps, L layers, H query heads, D head dim, B rows, T tokens, C hidden size, R rows of text, P prompts, A answer
tokens of all prompts, K kinds of prompts, V vocabulary.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..attention.modeling_hydrahead import HydraHeadForCausalLM
from ..config import RunConfig, ScoreMethod
from ..data.niah import Probe, stack
from ..errors import ConfigError
from ..evaluation.divergence import TeacherReference, divergence_at, final_hidden
from ..headmap import HeadMap, Operator
from ..metrics import COSTS, RetrievalKind, metric_name
from ..models.cut import cut
from ..models.kernels import use_kernels
from ..models.supernet import Supernet
from ..models.teacher import Teacher, load_teacher
from ..rundir import RunDir, score_file
from ..scoring.streams import tail_precision
from ..search.seeds import ScoreTables, read_scores
from ..search.space import analytic_costs
from ..search.trial import EVALUATION_TOKENS, HELDOUT_FILE, SUPERNET_FILE, evaluation_probes
from .bench_folder import read_config
from .entry import add_overrides, run_script, script_parser
from .map_list import FAMILIES, MapList, draw_maps, head_map_of
from .map_table import MADE_BY, MapTable, digest_of, join
from .records import commit, installed_versions, this_machine

LIST_SEED = 20_606
SAVE_SECONDS = 20.0
AT_ONCE = {"cpu": 1, "cuda": 8}
"""Maps between two waits for the device."""
KINDS: tuple[RetrievalKind, ...] = ("single", "multikey")


class SwitchedHeads(nn.Module):
    """A layer's attention with full attention and a twin for every head; full_H1 says which of the two counts.

    A branch that no head of the map uses is left out.
    """

    def __init__(self, full: nn.Module, gdn: nn.Module, o_proj: nn.Module) -> None:
        super().__init__()
        self.full, self.gdn, self.o_proj = full, gdn, o_proj
        self.full_H1: Tensor | None = None
        self.some_full = self.some_gdn = True

    def forward(
        self, x_BTC: Tensor, tables: Any, mask: Any = None, cache: Any = None, positions: Any = None
    ) -> Tensor:
        """The attention block's output [B, T, C]; from no cache, and of rows whose padding is on the right."""
        if not self.some_full:
            heads_BTHD = self.gdn(x_BTC, tables)
        elif not self.some_gdn:
            heads_BTHD = self.full(x_BTC, tables)
        else:
            assert self.full_H1 is not None
            both = self.full(x_BTC, tables), self.gdn(x_BTC, tables)
            heads_BTHD = torch.where(self.full_H1, *both)
        output: Tensor = self.o_proj(heads_BTHD.flatten(-2))
        return output


class SwitchedModel:
    """One model for every head map of FA and GDN heads; tensors are the teacher's and one copy of all twins."""

    def __init__(self, teacher: Teacher, supernet: Supernet) -> None:
        self.model = cut(teacher, supernet, HeadMap.uniform(teacher.shape, Operator.GDN))
        self._layers: list[SwitchedHeads] = []
        pairs = zip(self.model.model.layers, teacher.model.model.layers, strict=True)
        for own, source in pairs:
            switched = SwitchedHeads(source.self_attn.full, own.self_attn.gdn, own.self_attn.o_proj)
            self._layers.append(switched)
            own.self_attn = switched
        self.model.train(False)

    def set_map(self, full_LH: NDArray[np.bool_]) -> HydraHeadForCausalLM:
        """The model with those heads as full attention, until the next call."""
        device = self.model.lm_head.weight.device
        full_LH1 = torch.from_numpy(full_LH).to(device, non_blocking=True).unsqueeze(-1)
        for layer, row_H, full_H1 in zip(self._layers, full_LH, full_LH1, strict=True):
            layer.full_H1 = full_H1
            layer.some_full, layer.some_gdn = bool(row_H.any()), not bool(row_H.all())
        return self.model


class Readings:
    """What is measured of every map: KL and agreement on text [R, T], and answers to prompts.

    batch_tokens bounds a forward, padding included; a longer row runs alone.
    """

    def __init__(
        self, teacher: Teacher, text_RT: Tensor, probes: Sequence[Probe], batch_tokens: int
    ) -> None:
        device = teacher.device
        self._text = tuple(text_RT.shape)
        reference = TeacherReference(teacher, text_RT, batch_tokens=batch_tokens)
        self._weight_VC = reference.weight_VC
        self._target = reference.target(self._weight_VC)
        prompts = stack(probes, right=True)
        # The last column predicts nothing that is asked.
        rows = [*text_RT.long(), *prompts.input_ids[:, :-1]]
        ids_BT = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        self._batches = torch.split(ids_BT.to(device), max(1, batch_tokens // ids_BT.shape[1]))
        asked_PA = prompts.positions >= 0
        owner_A, place_A = asked_PA.nonzero(as_tuple=True)
        column_A = prompts.positions[owner_A, place_A]
        self._target_A1 = prompts.input_ids[owner_A, column_A + 1].to(device).unsqueeze(1)
        self._owner_A, self._column_A = owner_A.to(device), column_A.to(device)
        self._kinds = list(dict.fromkeys(probe.kind for probe in probes))
        of_kind_P = torch.tensor([self._kinds.index(probe.kind) for probe in probes])
        of_P = nn.functional.one_hot(of_kind_P, len(self._kinds)).T.double()
        of_A = of_P[:, owner_A]
        self._mean_KA = (of_A / of_A.sum(1, keepdim=True)).to(device)
        self._mean_KP = (of_P / of_P.sum(1, keepdim=True)).to(device)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of what measure gives."""
        figures = ("nll", "token_match", "match")
        names = [f"{metric_name(kind)}_{figure}" for figure in figures for kind in self._kinds]
        return ("kl", "top1_agreement", *names)

    def measure(self, model: HydraHeadForCausalLM) -> Tensor:
        """The figures in order of columns, fp64 on the model's device; nothing waits for it.

        kl and nll are mean nats a token; token_match is the share of answer tokens that are the argmax, match
        that of prompts at which all are.
        """
        with torch.inference_mode():
            hidden_BTC = torch.cat(
                [final_hidden(model, ids).unflatten(0, ids.shape) for ids in self._batches]
            )
            num_rows, num_tokens = self._text
            text_MC = hidden_BTC[:num_rows, :num_tokens].flatten(0, 1)
            # TF32 holds numbers that were bf16 as they are: products stay exact, and the head is faster.
            with tail_precision(model.dtype):
                kl, top1 = divergence_at(self._target, self._weight_VC, text_MC.unsqueeze(0))
            agreement = (top1 == self._target.top1_M).double().mean()
            nll_A, right_A = self._answers(model, hidden_BTC[num_rows:])
            wrong_P = torch.zeros(self._mean_KP.shape[1], dtype=torch.float64, device=nll_A.device)
            wrong_P.index_add_(0, self._owner_A, 1 - right_A)
            return torch.cat(
                [
                    torch.stack([kl.double().mean(), agreement]),
                    self._mean_KA @ nll_A,
                    self._mean_KA @ right_A,
                    self._mean_KP @ (wrong_P == 0).double(),
                ]
            )

    def _answers(self, model: HydraHeadForCausalLM, hidden_PTC: Tensor) -> tuple[Tensor, Tensor]:
        """NLL in nats and 1 where the argmax is right, of each answer token, fp64."""
        hidden_AC = hidden_PTC[self._owner_A, self._column_A]
        log_p_AV = model.lm_head(hidden_AC).float().log_softmax(-1)
        nll_A = -log_p_AV.gather(1, self._target_A1).squeeze(1)
        right_A = log_p_AV.argmax(-1) == self._target_A1.squeeze(1)
        return nll_A.double(), right_A.double()


@dataclass(frozen=True)
class Bench:
    """What a process measures with, and what that is in facts."""

    teacher: Teacher
    model: SwitchedModel
    readings: Readings
    maps: MapList
    config: RunConfig
    facts: dict[str, Any]

    @classmethod
    def open(cls, run: RunDir, args: argparse.Namespace) -> Bench:
        """Raises ConfigError or EnvironmentFault where the run lacks text or supernet, or has too little text."""
        config = read_config(run, args.overrides)
        use_kernels(config.kernels)
        teacher = load_teacher(config.teacher)
        supernet = Supernet.load(run / SUPERNET_FILE, teacher)
        text_RT = _read_text(run, args.sequences, args.tokens)
        context = args.context or min(config.probes.contexts)
        wanted = {"kinds": tuple(args.kinds), "contexts": (context,), "prompts": args.prompts}
        probes = config.probes.model_copy(update={**wanted, "unseen": (), "files": ()})
        prompts = evaluation_probes(teacher, config.model_copy(update={"probes": probes}))
        tokens = EVALUATION_TOKENS[teacher.device.type]
        readings = Readings(teacher, text_RT, prompts, tokens)
        scores = present_scores(run)
        maps = draw_maps(teacher.shape, scores, args.maps, args.seed, config.cost)
        facts = {
            "schema": 1,
            "name": config.name,
            "model": asdict(teacher.shape),
            "teacher": teacher.fingerprint,
            "dtype": config.teacher.dtype,
            "device": teacher.device.type,
            "supernet": digest_of((run / SUPERNET_FILE).read_bytes()),
            "text": {"rows_tokens": list(text_RT.shape), "digest": digest_of(text_RT.numpy())},
            "prompts": {**wanted, "digest": digest_of(repr(prompts).encode())},
            "config_seed": config.seed,
            "cost": config.cost.model_dump(),
            "scores": {name: digest_of(repr(scores[name]).encode()) for name in sorted(scores)},
            "list_seed": args.seed,
            "families": list(FAMILIES),
        }
        # As it comes back from a file.
        facts = json.loads(json.dumps(facts))
        return cls(teacher, SwitchedModel(teacher, supernet), readings, maps, config, facts)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the figures of a map, its costs last."""
        return (*self.readings.columns, *COSTS)

    def costs(self, index: int) -> list[float]:
        """The analytic costs of a map, in order of COSTS."""
        head_map = head_map_of(self.teacher.shape, self.maps.full_NLH[index])
        found = analytic_costs(head_map, self.config.cost)
        return [found[name] for name in COSTS]

    def table(self, values: dict[int, list[float]], made_by: list[dict[str, Any]]) -> MapTable:
        """The figures so far, by place in the list."""
        indices = np.array(sorted(values), dtype=np.int32)
        rows = np.array([values[index] for index in indices.tolist()], dtype=np.float32)
        return MapTable(
            self.maps.full_NLH[indices],
            indices,
            self.maps.family_N[indices],
            rows.reshape(len(indices), len(self.columns)),
            self.columns,
            self.facts | {MADE_BY: made_by},
        )


def present_scores(run: RunDir) -> dict[str, ScoreTables]:
    """The tables of every scoring method that the run has."""
    return read_scores(run, [m for m in get_args(ScoreMethod) if (run / score_file(m)).exists()])


def measure(bench: Bench, todo: Sequence[int], to: Path, until: float) -> None:
    """Measures maps of the list until the clock (time.monotonic) says `until`, beside those that the file has."""
    values, made_by = _earlier(bench, to)
    made_by.append({})
    left = [index for index in todo if index not in values]
    print(f"{len(left):,} of {len(todo):,} maps to measure", flush=True)
    start = saved = time.monotonic()
    count = count_saved = 0
    for rows in _measured(bench, left, until):
        values.update(rows)
        count += len(rows)
        now = time.monotonic()
        if now - saved >= SAVE_SECONDS:
            # Of the last seconds alone: compiling, and whoever shared the device, are over.
            rate = (count - count_saved) / (now - saved)
            saved, count_saved = now, count
            made_by[-1] = _made_by(count, now - start)
            bench.table(values, made_by).save(to)
            need, have = (len(left) - count) / rate, until - now
            print(
                f"{count:,} of {len(left):,} maps, {rate:.2f} a second; {need:.0f} s needed, {have:.0f} s left",
                flush=True,
            )
    seconds = time.monotonic() - start
    if count:
        made_by[-1] = _made_by(count, seconds)
        bench.table(values, made_by).save(to)
    print(
        f"{count:,} maps in {seconds:.1f} s ({seconds / max(1, count):.4f} s each), {len(left) - count:,} missing",
        flush=True,
    )


def _measured(bench: Bench, left: Sequence[int], until: float) -> Iterator[dict[int, list[float]]]:
    """Figures by place, AT_ONCE maps after AT_ONCE; the next ones are launched before the last ones are waited for."""
    at_once = AT_ONCE[bench.teacher.device.type]
    launched: dict[int, Tensor] = {}
    for first in range(0, len(left), at_once):
        if time.monotonic() >= until:
            break
        waited, launched = launched, {}
        for index in left[first : first + at_once]:
            model = bench.model.set_map(bench.maps.full_NLH[index])
            launched[index] = bench.readings.measure(model)
        if waited:
            yield _collected(bench, waited)
    if launched:
        yield _collected(bench, launched)


def _collected(bench: Bench, launched: Mapping[int, Tensor]) -> dict[int, list[float]]:
    costs = [bench.costs(index) for index in launched]  # while the device works
    rows = torch.stack([*launched.values()]).tolist()
    return {i: [*row, *cost] for i, row, cost in zip(launched, rows, costs, strict=True)}


def _earlier(bench: Bench, to: Path) -> tuple[dict[int, list[float]], list[dict[str, Any]]]:
    """Figures by place, and who made them. Raises ConfigError where the file is of something else."""
    if not to.exists():
        return {}, []
    old = MapTable.load(to)
    bench.table({}, []).check_same(old, to)
    known = old.indices_N < len(bench.maps.full_NLH)
    if not known.all() or not np.array_equal(bench.maps.full_NLH[old.indices_N], old.full_NLH):
        raise ConfigError(f"{to}: has maps that are not in this list; allowed: another file")
    rows = zip(old.indices_N.tolist(), old.values_NK.tolist(), strict=True)
    return dict(rows), list(old.facts[MADE_BY])


def _made_by(count: int, seconds: float) -> dict[str, Any]:
    return {
        "maps": count,
        "seconds": round(seconds, 1),
        "commit": commit(),
        "machine": this_machine(),
        "versions": installed_versions(),
        "date": datetime.date.today().isoformat(),
    }


def _read_text(run: RunDir, sequences: int, tokens: int) -> Tensor:
    """The first rows of the held-out text, [R, T]; the whole of shorter rows."""
    if not (run / HELDOUT_FILE).exists():
        raise ConfigError(f"{run / HELDOUT_FILE}: missing; `archsearch score` makes it")
    text_NT = np.load(run / HELDOUT_FILE, allow_pickle=False)
    if len(text_NT) < sequences:
        raise ConfigError(
            f"--sequences {sequences}: {run / HELDOUT_FILE} has {len(text_NT)}; allowed: at most so many"
        )
    return torch.from_numpy(text_NT[:sequences, :tokens].astype(np.int64))


def part_of(text: str) -> tuple[int, int]:
    """i and n of "i/n"."""
    first, _, number = text.partition("/")
    if not (first.isdigit() and number.isdigit() and int(first) < int(number)):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: i/n with i from 0 to n - 1")
    return int(first), int(number)


def main() -> None:
    """Command line entry."""
    started = time.monotonic()
    parser = script_parser(__doc__, figures=False)
    parser.add_argument("run", nargs="?", type=Path, help="a run directory")
    parser.add_argument("--join", nargs="+", type=Path, help="files of parts, made into one")
    add_overrides(parser, "run's config")
    parser.add_argument("--maps", type=int, default=5000, help="length of the list")
    parser.add_argument("--seed", type=int, default=LIST_SEED, help="of the list")
    parser.add_argument("--part", type=part_of, default=(0, 1), metavar="i/n", help="every nth map")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="loading included")
    parser.add_argument("--sequences", type=int, default=16, help="rows of held-out text")
    parser.add_argument("--tokens", type=int, default=1024, help="of a row")
    parser.add_argument(
        "--kinds", nargs="+", choices=get_args(RetrievalKind), default=KINDS, help="of prompts"
    )
    parser.add_argument("--prompts", type=int, default=16, help="of a kind")
    parser.add_argument("--context", type=int, help="tokens of a prompt; else the config's least")
    parser.add_argument("--to", type=Path, required=True, help="the table")
    args = parser.parse_args()
    if (args.run is None) == (args.join is None):
        parser.error("give either a run directory or --join")
    if args.join is not None:
        table = join(args.join)
        table.save(args.to)
        bad = int((~np.isfinite(table.values_NK)).any(1).sum())
        size = args.to.stat().st_size / 1e6
        print(f"{len(table.indices_N):,} maps, {bad} not finite, {size:.2f} MB: {args.to}")
        return
    bench = Bench.open(RunDir(args.run), args)
    print(f"ready after {time.monotonic() - started:.1f} s", flush=True)
    todo = range(args.maps)[args.part[0] :: args.part[1]]
    measure(bench, todo, args.to, started + args.seconds)


if __name__ == "__main__":
    run_script(main)
