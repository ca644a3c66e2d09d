"""What a study of proxies says of other metrics than it was made for, read off its file.

    python -m archsearch.lab.fidelity_targets runs/lab/smollm2_fidelity.json \\
        --targets niah_single_nll niah_multikey_nll general_nll --figures runs/lab/fidelity_targets.json

Nothing is trained: fidelity.json has every reading. For each metric after the long training: rank correlation and regret of
choosing by every cheaper look, and by the metric itself at each length.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError
from ..fidelity.analysis import analyse, has_direction
from ..fidelity.records import FIDELITY_FILE, Agreement, Study, read_study
from ..report.markdown import markdown_table
from ..report.tables import Table
from ..rundir import RunDir
from .entry import run_script, script_parser
from .proxy_fidelity import record
from .records import LabBook

BEST = 2
"""Looks without training that are shown of a metric and group, beside the metric and KL at every length."""


def read_file(path: Path) -> Study:
    """The study of a file. Raises ConfigError where there is none."""
    study = read_study(RunDir(path.parent), path.name)
    if study is None or not study.runs:
        raise ConfigError(f"{path}: no study with maps; allowed: a {FIDELITY_FILE}")
    return study


def shown(study: Study, target: str) -> Table:
    """A row a look and a column a group, the cheapest first."""
    rows = [row for row in study.agreements if row.metric == target]
    groups = list(dict.fromkeys(row.group for row in rows))
    places: list[tuple[str, int]] = []
    for group in groups:
        free = [row for row in rows if row.group == group and not row.tokens]
        free.sort(key=lambda row: -row.spearman)
        places += [(row.proxy, 0) for row in free[:BEST]]
    places += [(row.proxy, row.tokens) for row in rows if row.proxy in (target, "kl")]
    by_place = {(row.proxy, row.tokens, row.group): row for row in rows}
    ordered = sorted(dict.fromkeys(places), key=lambda place: place[1])
    return Table(
        f"{target} after {study.settings.tokens:,} tokens",
        ("look", "tokens", *groups),
        tuple(
            (proxy, f"{tokens:,}", *(_cell(by_place.get((proxy, tokens, g))) for g in groups))
            for proxy, tokens in ordered
        ),
    )


def _cell(row: Agreement | None) -> str:
    if row is None:
        return "–"
    regret = "" if row.regret is None else f", regret {row.regret:.4f}"
    return f"{row.spearman:.2f}{regret}"


def main() -> None:
    """Command line entry."""
    parser = script_parser(__doc__)
    parser.add_argument("file", type=Path, help=f"a {FIDELITY_FILE}")
    parser.add_argument("--targets", nargs="+", required=True, help="metrics of long training")
    parser.add_argument("--machine", help="that the readings were made on, where it is another")
    args = parser.parse_args()
    study = read_file(args.file)
    measured = next(iter(study.runs.values())).readings[0].metrics
    allowed = [name for name in measured if has_direction(name)]
    for name in args.targets:
        if name not in allowed:
            raise ConfigError(f"--targets {name}: allowed: {', '.join(allowed)}")
    study = analyse(study, args.targets)
    book = LabBook(0)
    record(study, args.targets, book)
    # The maps' own readings are in the file already.
    book.rows = [row for row in book.rows if "readings" not in row]
    for row in book.rows:
        row["read_on"] = args.machine or row["machine"]
    book.write(args.figures)
    for target in args.targets:
        print(markdown_table(shown(study, target)) + "\n")


if __name__ == "__main__":
    run_script(main)
