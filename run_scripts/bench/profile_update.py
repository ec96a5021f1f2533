"""Where the time of an update goes: the kernels of three updates of a Qwen2.5-0.5B shape, longest first.

    python -m run_scripts.bench.profile_update [--out update.json.gz] [--rows 40] [--small]

Prints a table of torch's profiler and writes the trace for chrome://tracing. The part `learner` of the bench gpu.py
measures the same update without the profiler.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from run_scripts.bench.gpu_parts import SHAPES, How, recipe_of, sample_update, save_random, wait

UPDATES = 3


def main() -> None:
    from mugrpo_megatron.learner.groups import shutdown
    from mugrpo_megatron.learner.learner import build_learner
    from mugrpo_megatron.learner.update import update

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("update.json.gz"))
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--small", action="store_true", help="tiny shapes, also on a CPU: shows that it runs")
    given = parser.parse_args()
    how = How(given.small)
    name = "small" if given.small else "Qwen2.5-0.5B"
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of(save_random(name, Path(folder)), how)
        learner = build_learner(recipe)
    samples, advantages = sample_update(recipe, SHAPES[name][-1])
    update(learner, samples, advantages)  # compiles
    wait()
    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        for _ in range(UPDATES):
            update(learner, samples, advantages)
        wait()
    shutdown()
    order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=order, row_limit=given.rows, max_name_column_width=80))
    profiler.export_chrome_trace(str(given.out))


if __name__ == "__main__":
    main()
