"""The cells of docs/lora.md, all weights beside adapters: run what is missing, then write the figures and the table.

    python -m run_scripts.study.lora --out DIR                # everything, seed by seed; Ctrl-C saves
    python -m run_scripts.study.lora --out DIR --collect      # docs/lora.csv and its table in docs/lora.md alone
    python -m run_scripts.study.lora --out DIR --grid rates   # the full rank at three rates, docs/lora_rates.csv

Run it in the repository's root. The warm start is one, and a seed has its own stage, which its five cells share.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.rundata import read_run
from run_scripts.study.cells import Cell
from run_scripts.study.collect import over, write_rows
from run_scripts.study.grid import Grid, load_grid
from run_scripts.study.results import DOCS, Row, markdown
from run_scripts.study.run import BULK, Interrupted, Study, commits_of, interrupt, run_all

GRIDS = {name: Path(__file__).with_name(f"lora_{name}.toml") for name in ("grid", "rates")}
CSVS = {"grid": "lora.csv", "rates": "lora_rates.csv"}
PAGE = "lora.md"
BEGIN, END = "<!-- begin run_scripts.study.lora {} -->\n", "<!-- end run_scripts.study.lora {} -->\n"
COLUMNS = ("seed", "method", "rate", "commit", "update", "accuracy", "kl", "seconds", "memory", "checkpoint")
"""A row is an evaluation: before the first update, and after every 16th. `kl` is the mean k3 estimate over the 16
updates before it, in nats a token, `seconds` the mean of an update in them; `memory` the largest resident bytes of the
run's process, `checkpoint` the bytes of its checkpoint, both of the whole run."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the runs go")
    parser.add_argument("--grid", choices=GRIDS, default="grid", help="which cells")
    parser.add_argument("--collect", action="store_true", help="only write the figures of finished cells")
    parser.add_argument("--docs", type=Path, default=DOCS.parent, help="where the figures and lora.md are")
    options = parser.parse_args(arguments)
    kept = tuple(name for name in BULK if name != "checkpoints")
    study = Study(load_grid(GRIDS[options.grid]), options.out.resolve(), bulk=kept)
    try:
        if not options.collect:
            signal.signal(signal.SIGTERM, interrupt)
            signal.signal(signal.SIGINT, interrupt)
            study.out.mkdir(parents=True, exist_ok=True)
            if code := run_all(study):
                return code
        rows = [row for cell in sorted(study.outcomes()) for row in rows_of(study, cell)]
        write_rows(options.docs / CSVS[options.grid], COLUMNS, rows)
        write_table(options.docs / PAGE, options.grid, table(study.grid, rows))
    except UserError as error:
        print(f"lora: {error}", file=sys.stderr)
        return 2
    except Interrupted:
        print("lora: interrupted; the same command continues")
        return 130
    return 0


def rows_of(study: Study, cell: Cell) -> list[Row]:
    """The rows of a finished cell."""
    run, stage = read_run(study.directory(cell)), read_run(study.stage(cell))
    measure = f"accuracy/{study.grid.set_of(cell.seed)}"
    whole = {
        "seed": cell.seed,
        "method": cell.method,
        "rate": cell.rate,
        "commit": commits_of(study.directory(cell)),
        "memory": max(int(row.get("learner_memory_peak") or 0) for row in run.phases),
        "checkpoint": sum(file.stat().st_size for file in study.directory(cell).glob("checkpoints/*/*.distcp")),
    }
    rows = []
    for row in {one["update"]: one for one in (stage.evals[0], *run.evals)}.values():
        updates = run.updates[max(0, row["update"] - study.grid.every) : row["update"]]
        means = {name: over(updates, key) for name, key in MEANS.items()}
        rows.append(whole | {"update": row["update"], "accuracy": row[measure]} | means)
    return rows


HEAD = ["trained", "rate", "% right", "checkpoint MB"]
"""Seconds and memory are in the csv: next to other work they say little."""
MEANS = {"kl": "kl_k3", "seconds": "seconds"}
"""Column -> metric of the updates."""


def table(grid: Grid, rows: Sequence[Row]) -> str:
    """A table of docs/lora.md: means over the seeds that have all cells, of the ends with their range."""
    ends = {(row["seed"], row["method"], row["rate"]): row for row in rows if row["update"] == grid.updates}
    cells = [(name, block.rate) for block in grid.blocks.values() for name in block.methods]
    seeds = [seed for seed in range(grid.seeds) if all((seed, *cell) in ends for cell in cells)]
    lines = []
    for name, rate in cells:
        last = [ends[seed, name, rate] for seed in seeds]
        right = [100 * row["accuracy"] for row in last]
        accuracy = f"{statistics.fmean(right):.1f} ({min(right):.1f}–{max(right):.1f})"
        size = statistics.fmean(row["checkpoint"] for row in last)
        lines.append([grid.methods[name].title, f"{rate:g}", accuracy, f"{size / 1e6:.1f}"])
    return markdown(HEAD, lines) + "\n"


def write_table(page: Path, grid: str, lines: str) -> None:
    """Put the table between the page's two marks."""
    begin, end = BEGIN.format(grid), END.format(grid)
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    page.write_text(f"{before}{begin}{lines}{end}{rest.partition(end)[2]}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
