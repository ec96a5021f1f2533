"""Compares our GRPO and mu-GRPO with TRL's GRPOTrainer: same checkpoint, problems, rewards, number of updates.

    PYTHONPATH=DIR python -m run_scripts.bench.trl --model runs/trl/warm-start/hf --updates 128 --rates 2e-4 8e-4

DIR holds TRL; `sides` says how it gets there, and how the two sides are made alike. Accuracy is greedy, on the same
held-out problems. Each side runs on all cores.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from run_scripts.bench.clock import CPU, WALL, arrival
from run_scripts.bench.sides import Job, Result, run_ours, run_trl

BASE = Path(__file__).with_name("trl.toml")


def main() -> None:
    options = _options()
    results = []
    for rate in options.rates:
        for side in options.sides:
            job = _job(options, side, rate)
            results.append(run_trl(job) if side == "trl" else run_ours(job, side))
            _print(results, options)
            if options.out:
                options.out.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n", encoding="utf-8")


def _job(options: argparse.Namespace, side: str, rate: float) -> Job:
    """mu-GRPO takes the updates in four stages."""
    return Job(
        base=str(BASE),
        model=str(options.model),
        updates=options.updates,
        mu=options.updates // 4 if side == "mu_grpo" else options.mu,
        rate=rate,
        overrides=(f"run.seed={options.seed}", f"data.eval_problems={options.eval_problems}", *options.overrides),
        dtype=options.dtype,
        threads=options.threads,
    )


def _print(results: Sequence[Result], options: argparse.Namespace) -> None:
    table = Table(title=f"{options.updates} updates; seconds of training, wall / CPU", title_justify="left")
    goal = options.goal
    for column in ("side", "rate", "before", "after", "wall s", "CPU s", f"to {100 * goal:.0f} %", "spent on"):
        table.add_column(column, justify="left" if column in ("side", "spent on") else "right")
    for result in results:
        first, last = result.points[0], result.points[-1]
        there = [arrival(result.points, goal, axis) for axis in (WALL, CPU)]
        table.add_row(
            result.side,
            f"{result.rate:g}",
            f"{100 * first[3]:.1f} %",
            f"{100 * last[3]:.1f} %",
            f"{last[1]:.1f}",
            f"{last[2]:.1f}",
            " / ".join("never" if t is None else f"{t:.1f}" for t in there),
            ", ".join(f"{name} {seconds:.1f}" for name, seconds in result.parts.items()),
        )
    Console(width=170).print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("runs/trl/warm-start/hf"), help="checkpoint to start from")
    parser.add_argument("--updates", type=int, default=128)
    parser.add_argument("--mu", type=int, default=4, help="updates between two generations, of TRL and of our GRPO")
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-4, 4e-4, 8e-4], help="learning rates")
    parser.add_argument("--sides", nargs="+", default=["trl", "grpo", "mu_grpo"], choices=["trl", "grpo", "mu_grpo"])
    parser.add_argument("--goal", type=float, default=0.6, help="accuracy to reach")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-problems", type=int, default=2000)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--threads", type=int, default=0, help="torch threads of TRL, as many as cores without it; 1 on a busy machine"
    )
    parser.add_argument("--out", type=Path, help="write the results there as JSON")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE", help="for both sides"
    )
    options = parser.parse_args()
    options.model = options.model.resolve()
    return options


if __name__ == "__main__":
    main()
