"""`mugrpo doctor`: this machine's software and hardware, what each is used for, and how to get what is missing."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from mugrpo_megatron.checks.toolchain import CheckResult, State, Tool, tools_here
from mugrpo_megatron.cuda import driver_answers
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.doctor.fix import STACKS, fix
from mugrpo_megatron.observe.environment import (
    SHARED_MEMORY,
    SHARED_MEMORY_REMEDY,
    devices,
    installed_version,
    usable_cores,
)
from mugrpo_megatron.weights.families import read_architecture

IN_CHECKOUT = Path(__file__).parents[3].joinpath("run_scripts/setup.sh").is_file()
SETUP = "run_scripts/setup.sh" if IN_CHECKOUT else 'pip install "mugrpo-megatron[cpu]"'
SETUP_CUDA = f"{SETUP} --cuda" if IN_CHECKOUT else 'pip install "mugrpo-megatron[cuda]"'
FIX = SETUP if IN_CHECKOUT else "mugrpo doctor --fix"
"""Commands that install what is missing: a checkout has the script, a wheel has pip and this command."""
MARKS = {"ok": ("✓", "green"), "absent": ("·", "dim"), "broken": ("!", "yellow")}
"""State of a component -> its mark and colour. A component that training needs has a red cross unless it is ok."""
WIDTHS = (1, 18, 25, 33)
"""Widths of the columns mark, name, detail and use; with a space between them they fill 80."""
IMPORT_ALL = """
import contextlib, importlib, json, os, sys
with contextlib.suppress(BaseException):
    import torch
    if not torch.cuda.is_available():
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        from mugrpo_megatron.engine import sglang_compat
        sglang_compat.allow_import_on_cpu()
for module in sys.argv[1:]:
    try:
        with contextlib.redirect_stdout(sys.stderr):
            importlib.import_module(module)
        print(json.dumps(""), flush=True)
    except BaseException as error:
        print(json.dumps(f"{type(error).__name__}: {error}".splitlines()[0]), flush=True)
"""
"""Script that imports modules and prints the error of each. It runs in a process of its own: an import may crash."""


class Package(NamedTuple):
    distribution: str
    module: str
    use: str
    remedy: str
    needed: Literal["always", "on CUDA", "never"]


_TE = "CUDA only, in a checkout: run_scripts/setup.sh --cuda --with-te"
_FLASH = "CUDA only: pip install --no-build-isolation flash-attn"
PACKAGES = (
    Package("megatron-core", "megatron.core", "learner: model, parallel layouts, optimizer", SETUP, "always"),
    Package("sglang", "sglang.srt.entrypoints.engine", "engine: samples the responses", FIX, "always"),
    Package("transformers", "transformers", "tokenizers and model configurations", SETUP, "always"),
    Package("math-verify", "math_verify", "verifier: scores answers", SETUP, "always"),
    Package("torchvision", "torchvision", "imported by SGLang", f"{FIX} (it must match torch's build)", "always"),
    Package("triton", "triton", "fused loss kernels on CUDA; imported by SGLang", SETUP, "always"),
    Package("psutil", "psutil", "imported by SGLang; finds and ends child processes", SETUP, "always"),
    Package("sglang-kernel", "sgl_kernel", "SGLang's CUDA kernels", SETUP_CUDA, "on CUDA"),
    Package("transformer-engine", "transformer_engine", "context parallelism, fused Adam", _TE, "never"),
    Package("flash-attn", "flash_attn", "inside Transformer Engine; the learner's comes with torch", _FLASH, "never"),
    Package("wandb", "wandb", "only with track.wandb_project", 'pip install "mugrpo-megatron[wandb]"', "never"),
)

SHARED_MEMORY_BYTES = 1 << 30
"""Free bytes of /dev/shm that suffice for every model; Docker's default is 64 MB."""


def doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", type=Path, help="checkpoint whose config.json is checked too")
    parser.add_argument(
        "--fix", action="store_true", help="first install SGLang and torchvision for a CPU, as setup.sh does"
    )


def doctor(options: argparse.Namespace | None = None) -> int:
    """Print every result as soon as it is known; returns 0 when this machine can train, 2 when it cannot.

    Raises UserError when torch is not installed, for a model that the learner cannot build, and, with `--fix`, as `fix`
    does.
    """
    if importlib.util.find_spec("torch") is None:
        raise UserError(f"torch is not installed in {sys.prefix}; install it with the build for this machine: {SETUP}")
    if options is not None and options.fix:
        fix()
    console, missing = Console(), []
    console.print("mugrpo doctor: importing what training needs takes some seconds", style="bold")
    with console.status("importing torch, Megatron, SGLang and the others"):
        for result in results():
            console.print(view(result))
            missing += [result.name] * (result.needed and result.state != "ok")
    if options is not None and options.model is not None:
        model = read_architecture(options.model)
        console.print(f"{model.summary} ({options.model})", *filter(None, [model.note]), sep="\n", markup=False)
    if missing:
        console.print(f"Training cannot start without: {', '.join(missing)}.", style="red")
        return 2
    console.print("This machine has what training needs.", style="green")
    return 0


def results() -> Generator[CheckResult, None, None]:
    """Yields the result of every check as soon as it is known, the machine's first."""
    present = [package.module for package in PACKAGES if installed_version(package.distribution)]
    with importing(present) as errors:
        yield from _machine()
        import torch  # not at the top: `doctor` runs without torch, and says so

        cuda = torch.cuda.is_available()
        yield from _torch(cuda)
        yield stack(installed_version("megatron-core"), installed_version("sglang"))
        has_gpu = driver_answers()
        if torch.version.cuda or has_gpu:
            yield from (_tool(tool, needed=has_gpu) for tool in tools_here())
        for package in PACKAGES:
            yield _package(package, next(errors) if package.module in present else "", cuda)
    yield apex()
    # Not at the top: what it imports may be missing, which the checks above report.
    from mugrpo_megatron.extras.sandbox.jail_check import jail

    yield jail()


def view(result: CheckResult) -> Group:
    """Returns a result in lines of at most 80 columns: mark, name, detail, use; then the remedy if it is not ok."""
    missing = result.state != "ok"
    mark, colour = ("✗", "bold red") if missing and result.needed else MARKS[result.state]
    style = "dim" if result.state == "absent" and not result.needed else ""
    cells = [Text(mark, colour), Text(result.name, "bold"), Text(result.detail), Text(result.use)]
    lines: list[RenderableType] = [_line(WIDTHS, cells, style)]
    if missing and result.remedy:
        lines.append(_line((WIDTHS[0], sum(WIDTHS[1:]) + 2), [Text(), Text(f"get it: {result.remedy}")], style))
    return Group(*lines)


def _line(widths: Sequence[int], cells: Sequence[Text], style: str) -> Table:
    grid = Table.grid(padding=(0, 1))
    for width in widths:
        grid.add_column(width=width, overflow="fold")
    grid.add_row(*cells, style=style)
    return grid


@contextmanager
def importing(modules: Sequence[str]) -> Iterator[Iterator[str]]:
    """Import modules in a fresh interpreter while the block runs; yields an iterator of their errors, "" for none."""
    command = [sys.executable, "-W", "ignore", "-c", IMPORT_ALL, *modules]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield _errors(process)
        finally:
            process.kill()


def _errors(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout
    for line in process.stdout:
        yield json.loads(line)
    yield from repeat(f"the import ended the interpreter with status {process.wait()}")


def stack(megatron: str | None, sglang: str | None) -> CheckResult:
    """Check that these versions of megatron-core and SGLang were tested together."""
    tested = STACKS.get(megatron or "")
    name = tested.name if tested and tested.sglang == sglang else None
    found = f"{megatron} with {sglang or 'no SGLang'}"
    pair = f"{name}: {found}" if name else f"not a tested pair: {found}"
    use, remedy = "megatron-core with SGLang", f"{SETUP} --stack pinned or --stack new" if IN_CHECKOUT else FIX
    return CheckResult("stack", "ok" if name else "broken", pair, use, False, remedy)


def apex() -> CheckResult:
    """Returns the state of NVIDIA's apex; PyPI's `apex` is an unrelated package."""
    use, remedy = (
        "fused Adam of Megatron's optimizer; torch's is used without",
        "CUDA only, in a checkout: run_scripts/setup.sh --cuda --with-apex",
    )
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return CheckResult("apex", "absent", "not installed", use, False, remedy)
    if any((Path(folder) / "multi_tensor_apply").is_dir() for folder in spec.submodule_search_locations or ()):
        return CheckResult("apex", "ok", installed_version("apex") or "found", use, False)
    unrelated = "an unrelated package of that name, not NVIDIA's"
    return CheckResult("apex", "broken", unrelated, use, False, f"pip uninstall apex; {remedy}")


def _machine() -> list[CheckResult]:
    memory = psutil.virtual_memory()
    supported: State = "ok" if (3, 11) <= sys.version_info[:2] <= (3, 12) else "broken"
    free = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
    shared = psutil.disk_usage(SHARED_MEMORY) if os.path.isdir(SHARED_MEMORY) else None
    enough: State = "ok" if shared and shared.free >= SHARED_MEMORY_BYTES else "broken"
    size = f"{shared.free / 2**30:.2f} of {shared.total / 2**30:.2f} GiB free" if shared else "not mounted"
    return [
        CheckResult("Python", supported, platform.python_version(), "3.11 or 3.12", True, "python3.11 -m venv .venv"),
        CheckResult("cores", "ok", f"{usable_cores()} usable of {os.cpu_count()}", "verifier, engine on CPU", True),
        CheckResult("memory", "ok", free, "optimizer state, engine, verifier", True),
        CheckResult(SHARED_MEMORY, enough, size, "NCCL; weights for engines on CPU", False, SHARED_MEMORY_REMEDY),
    ]


def _torch(cuda: bool) -> list[CheckResult]:
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    gloo: State = "ok" if torch.distributed.is_gloo_available() else "absent"
    nccl: State = "ok" if torch.distributed.is_nccl_available() else "absent"
    version = ".".join(map(str, torch.cuda.nccl.version())) if cuda and nccl == "ok" else "not in torch"
    use = "learner and engine take turns on them; CPU does without"
    remedy = "a CUDA driver that fits torch's build" if torch.version.cuda else f"{SETUP_CUDA}, given a GPU"
    return [
        CheckResult("devices", "ok" if cuda else "absent", devices(), use, False, remedy),
        CheckResult("torch", "ok", f"{torch.__version__} ({built})", "learner", True),
        CheckResult("gloo", gloo, "in torch" if gloo == "ok" else "not in torch", "collectives on CPU", True),
        CheckResult("NCCL", nccl, version, "collectives on CUDA", cuda, SETUP_CUDA),
    ]


def _tool(tool: Tool, needed: bool) -> CheckResult:
    missing: State = "absent" if tool.detail.startswith("not ") else "broken"
    return CheckResult(tool.name, "ok" if tool.fits else missing, tool.detail, tool.use, needed, tool.remedy)


def _package(package: Package, error: str, cuda: bool) -> CheckResult:
    needed = package.needed == "always" or (package.needed == "on CUDA" and cuda)
    version = installed_version(package.distribution)
    state: State = "absent" if version is None else "broken" if error else "ok"
    text = "not installed" if version is None else f"{version}: {error}" if error else version
    return CheckResult(package.distribution, state, text, package.use, needed, package.remedy)
