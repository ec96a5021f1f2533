"""Compares time and peak memory of the loss path with other implementations of the same loss and gradients.

    python -m run_scripts.dev.bench.loss_path                      # CPU: 8,192 x 512 x 32,000 float32
    python -m run_scripts.dev.bench.loss_path --device cuda        # CUDA: 16,384 x 3,584 x 152,064 bfloat16

Each implementation runs in its own process, from hidden states and output weight to loss, d hidden and d weight. Memory
is the peak minus that with inputs and weights ready: resident set on CPU, allocator on CUDA. `floor` is only the three
GEMMs of the same shapes. Liger and TRL are compared if they are installed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from run_scripts.dev.bench import machine
from run_scripts.dev.bench.loss_ways import NEEDS, WAYS, Inputs, Shape, make_inputs


@dataclass(frozen=True)
class Result:
    way: str
    seconds: list[float]
    cpu_seconds: list[float]
    """CPU time of all threads of the process; unlike wall-clock time, it hardly depends on how busy the machine is."""
    peak_mib: float
    loss: float


def measure(way: str, shape: Shape, repeats: int) -> Result:
    """Time an implementation: one warm-up run, which imports and compiles, then `repeats` timed runs."""
    inputs = make_inputs(shape)
    loss = _step(WAYS[way], inputs)
    seconds, cpu_seconds, peaks = [], [], []
    for _ in range(repeats):
        inputs.hidden.grad = inputs.weight.grad = None
        held = _reset_peak(shape.device)
        started, busy = time.perf_counter(), time.process_time()
        _step(WAYS[way], inputs)
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - busy)
        peaks.append(_peak(shape.device) - held)
    return Result(way, seconds, cpu_seconds, max(peaks) / 2**20, loss)


def _step(way: Callable[[Inputs], torch.Tensor], inputs: Inputs) -> float:
    loss = way(inputs)
    if loss.requires_grad:
        loss.backward()
    if inputs.shape.device == "cuda":
        torch.cuda.synchronize()
    return loss.item()


def _reset_peak(device: str) -> int:
    """Start a new measurement of the peak; returns the bytes that are in use now."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # so that freed memory that malloc keeps does not count
    Path("/proc/self/clear_refs").write_text("5")
    return _peak(device)


def _peak(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def run_alone(way: str, shape: Shape, repeats: int, threads: int) -> Result | str:
    """Call `measure` in a new process; returns its result, or the last line of its errors if it fails."""
    arguments = json.dumps([way, asdict(shape), repeats, threads])
    command = [sys.executable, "-m", "run_scripts.dev.bench.loss_path", "--one", arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def compare(ways: list[str], shape: Shape, repeats: int, threads: int) -> None:
    """Print a table: median wall-clock and CPU seconds, also as multiples of the first row, and peak memory."""
    print(f"{'way':20} {'seconds':>9} {'x first':>8} {'cpu s':>9} {'x first':>8} {'peak MiB':>9} {'loss':>11}")
    first: Result | None = None
    for way in ways:
        found = run_alone(way, shape, repeats, threads)
        if isinstance(found, str):
            print(f"{way:20} failed: {found}", flush=True)
            continue
        first = first or found
        cells = ""
        for column in ("seconds", "cpu_seconds"):
            median = statistics.median(getattr(found, column))
            cells += f" {median:9.4f} {median / statistics.median(getattr(first, column)):8.2f}"
        print(f"{way:20}{cells} {found.peak_mib:9.0f} {found.loss:11.6f}", flush=True)
    if first and first.way == "floor":
        flops = 6 * shape.tokens * shape.hidden * shape.vocab
        print(f"floor: {flops / statistics.median(first.seconds) / 1e12:.2f} TFLOP/s")


def describe(shape: Shape, threads: int) -> None:
    """Print machine, versions and sizes."""
    about = machine.describe(sys.argv)
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items() if number)
    print(f"{about['machine']}, {threads} threads; {versions}")
    print(f"tokens {shape.tokens}, hidden {shape.hidden}, vocabulary {shape.vocab}, {shape.dtype}, chunk {shape.chunk}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--response", type=int, default=1024, help="tokens of each response")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--chunk", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--ways", nargs="*", default=[way for way in WAYS if find_spec(NEEDS.get(way, "torch"))])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        way, shape, repeats, threads = json.loads(given.one)
        torch.set_num_threads(threads)
        print(json.dumps(asdict(measure(way, Shape(**shape), repeats))))
        return
    sizes = (8192, 512, 32000, "float32", 1024) if given.device == "cpu" else (16384, 3584, 152064, "bfloat16", 4096)
    tokens, hidden, vocab, dtype, chunk = sizes
    shape = Shape(
        given.tokens or tokens,
        given.hidden or hidden,
        given.vocab or vocab,
        given.response,
        given.dtype or dtype,
        given.device,
        given.chunk or chunk,
    )
    describe(shape, given.threads)
    compare(given.ways, shape, given.repeats, given.threads)


if __name__ == "__main__":
    main()
