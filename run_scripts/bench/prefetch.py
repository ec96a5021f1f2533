"""Wall-clock by phase of a run whose next stage is sampled while this one trains, against the same run without.

    python run_scripts/bench/prefetch.py [--stages 3] [--updates 32] [--prefetch 16] [--shares 1]

Both are runs on a random Qwen2 of 100k parameters; one by `mugrpo train` alone, the other by `mugrpo train` and, beside
it on the same machine, `--shares` processes with `--engine-only --follow`. Prints Markdown: seconds by phase of the
learner's process, and how stale the data of each stage were. Phases lie in one another: the `save` of hf/ is in
`optimize`. `generate` of a stage that others generate is the wait for it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from mugrpo_megatron.observe.rundata import RunData, read_run, seconds_by_phase

ROOT = Path(__file__).parents[2]
LIMIT_S = 1800.0


def parity(response: str, answer: str) -> float:
    """A reward that differs within a group: the random model's answers are never right."""
    return float(len(response) % 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--updates", type=int, default=32, help="of a stage")
    parser.add_argument("--prefetch", type=int, default=16)
    parser.add_argument("--shares", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=16, help="of an update; 8 responses of up to 48 tokens to each")
    options = parser.parse_args()
    from stage_memory import make_model  # not above: verifier processes import this module for `parity`

    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model", experts=False)
        runs = {
            f"prefetch = {prefetch}": run(Path(folder), options, prefetch, options.shares if prefetch else 0)
            for prefetch in (0, options.prefetch)
        }
    print(by_phase(runs))
    print(by_stage(runs))


def run(folder: Path, options: argparse.Namespace, prefetch: int, shares: int) -> RunData:
    """One run to its end; SystemExit when one of its processes fails."""
    from stopping import write_recipe

    place = folder / f"prefetch-{prefetch}"
    place.mkdir()
    sections = {
        "schedule": {"stages": options.stages, "updates_per_stage": options.updates, "max_sample_age": prefetch},
        "rollout": {"prompts_per_update": options.prompts, "responses_per_prompt": 8, "max_response_tokens": 48},
        "reward": {"function": "run_scripts.bench.prefetch:parity"},
        "engine": {"max_running_requests": 256},
    }
    recipe = write_recipe(place, folder / "model", sections)
    follow = [
        ["generate", recipe, "--engine-only", "--follow", "--shard", f"{share}/{shares}"] for share in range(shares)
    ]
    with (place / "said").open("wb") as output:
        processes = [
            subprocess.Popen([sys.executable, "-m", "mugrpo_megatron", *words], stdout=output, stderr=output, cwd=ROOT)
            for words in (["train", recipe], *follow)
        ]
        try:
            codes = [process.wait(LIMIT_S) for process in processes]
        finally:
            for process in processes:
                process.terminate()
    if any(codes):
        raise SystemExit((place / "said").read_text(errors="replace"))
    return read_run(place / "run")


def by_phase(runs: dict[str, RunData]) -> str:
    seconds = {name: seconds_by_phase(found.phases) for name, found in runs.items()}
    phases = list(dict.fromkeys(phase for of_run in seconds.values() for phase in of_run))
    rows = [[f"`{phase}`", *(f"{of_run.get(phase, 0.0):.1f}" for of_run in seconds.values())] for phase in phases]
    total = ["from start to end", *(f"{found.seconds:.1f}" for found in runs.values())]
    return table(["seconds", *runs], [*rows, total])


def by_stage(runs: dict[str, RunData]) -> str:
    rows = []
    for stages in zip(*(groupby(found.updates, key=itemgetter("stage")) for found in runs.values()), strict=True):
        of_runs = [[int(row["staleness"]) for row in updates] for _, updates in stages]
        rows.append([str(stages[0][0]), *(f"{min(stale)} to {max(stale)}" for stale in of_runs)])
    return table(["staleness in stage", *runs], rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    main()
