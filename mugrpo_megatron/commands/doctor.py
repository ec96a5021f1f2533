"""`mugrpo doctor`: what this machine has, what each part is used for, what is missing and how to get it."""

from __future__ import annotations

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

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.environment import devices, installed, usable_cores
from mugrpo_megatron.observe.toolchain import Tool, driver_answers, tools_here

SETUP = "run_scripts/setup.sh"
State = Literal["ok", "absent", "broken"]
MARKS = {"ok": ("✓", "green"), "absent": ("·", "dim"), "broken": ("!", "yellow")}
"""By state; what this machine needs and has not got is a red cross."""
WIDTHS = (1, 18, 25, 33)
"""Columns of mark, name, what was found and use; with a space between them they fill 80."""
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
"""Runs in a process of its own: an import may crash, and Megatron and SGLang are not made to share one."""
EXTRAS = ("mugrpo_megatron.extras.sandbox.jail_check:jail",)
"""What extras have to say: `module:function` that returns a finding."""


class Finding(NamedTuple):
    """One part of the machine or of the software."""

    part: str
    state: State
    found: str
    """Version, size or name; for a broken part what its import said."""
    use: str
    needed: bool
    """Whether this machine cannot train without it."""
    remedy: str = ""
    """How to get it, when it is not ok."""


class Package(NamedTuple):
    """A Python package to look for."""

    distribution: str
    module: str
    use: str
    remedy: str
    needed: Literal["always", "on CUDA", "never"]


_TE = f"CUDA only: {SETUP} --cuda --with-te"
_FLASH = "CUDA only: pip install --no-build-isolation flash-attn"
PACKAGES = (
    Package("megatron-core", "megatron.core", "learner: model, parallel layouts, optimizer", SETUP, "always"),
    Package("sglang", "sglang.srt.entrypoints.engine", "engine: samples the responses", SETUP, "always"),
    Package("transformers", "transformers", "tokenizers and model configurations", SETUP, "always"),
    Package("math-verify", "math_verify", "verifier: scores answers", SETUP, "always"),
    Package("torchvision", "torchvision", "imported by SGLang", f"{SETUP} (it must match torch's build)", "always"),
    Package("triton", "triton", "fused loss kernels on CUDA; imported by SGLang", SETUP, "always"),
    Package("psutil", "psutil", "imported by SGLang; finds and ends child processes", SETUP, "always"),
    Package("sglang-kernel", "sgl_kernel", "SGLang's CUDA kernels", f"{SETUP} --cuda", "on CUDA"),
    Package("transformer-engine", "transformer_engine", "context parallelism, fused Adam", _TE, "never"),
    Package("flash-attn", "flash_attn", "inside Transformer Engine; the learner's comes with torch", _FLASH, "never"),
    Package("wandb", "wandb", "only with track.wandb_project", 'pip install "mugrpo-megatron[wandb]"', "never"),
)

STACKS = {("0.16.1", "0.5.15.post1"): "pinned", ("0.19.2", "0.5.23"): "new"}
"""megatron-core and SGLang of a stack that `setup.sh --stack` installs and the tests run on."""


def doctor() -> int:
    """Print each part as soon as it is known; 0 when this machine has what it needs, 2 when it does not.

    Raises UserError where not even torch is installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise UserError(f"torch is not installed in {sys.prefix}; {SETUP} makes .venv with the build for this machine")
    console, lacking = Console(), []
    console.print("mugrpo doctor: importing what training needs takes some seconds", style="bold")
    with console.status("importing torch, Megatron, SGLang and the others"):
        for finding in findings():
            console.print(shown(finding))
            lacking += [finding.part] * (finding.needed and finding.state != "ok")
    if lacking:
        console.print(f"Training cannot start without: {', '.join(lacking)}.", style="red")
        return 2
    console.print("This machine has what training needs.", style="green")
    return 0


def findings() -> Generator[Finding, None, None]:
    """Everything that was looked for, machine first, each as soon as it is known."""
    present = [package.module for package in PACKAGES if installed(package.distribution)]
    with importing(present) as errors:
        yield from _machine()
        import torch  # here and below, so that `doctor` can say when it is missing

        cuda = torch.cuda.is_available()
        yield from _torch(cuda)
        yield stack(installed("megatron-core"), installed("sglang"))
        has_gpu = driver_answers()
        if torch.version.cuda or has_gpu:
            yield from (_tool(tool, needed=has_gpu) for tool in tools_here())
        for package in PACKAGES:
            yield _package(package, next(errors) if package.module in present else "", cuda)
    yield apex()
    for entry_point in EXTRAS:
        module, _, function = entry_point.partition(":")
        yield getattr(importlib.import_module(module), function)()


def shown(finding: Finding) -> Group:
    """A part in lines of at most 80 columns: mark, name, finding, use; then how to get what is not there."""
    missing = finding.state != "ok"
    mark, colour = ("✗", "bold red") if missing and finding.needed else MARKS[finding.state]
    style = "dim" if finding.state == "absent" and not finding.needed else ""
    cells = [Text(mark, colour), Text(finding.part, "bold"), Text(finding.found), Text(finding.use)]
    lines: list[RenderableType] = [_line(WIDTHS, cells, style)]
    if missing and finding.remedy:
        lines.append(_line((WIDTHS[0], sum(WIDTHS[1:]) + 2), [Text(), Text(f"get it: {finding.remedy}")], style))
    return Group(*lines)


def _line(widths: Sequence[int], cells: Sequence[Text], style: str) -> Table:
    grid = Table.grid(padding=(0, 1))
    for width in widths:
        grid.add_column(width=width, overflow="fold")
    grid.add_row(*cells, style=style)
    return grid


@contextmanager
def importing(modules: Sequence[str]) -> Iterator[Iterator[str]]:
    """Import modules in a fresh interpreter while the block runs; what each raised in turn, empty where it worked."""
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


def stack(megatron: str | None, sglang: str | None) -> Finding:
    """Whether these versions of megatron-core and SGLang are a pair that was tested."""
    name = STACKS.get((megatron or "", sglang or ""))
    pair = f"{name}: {megatron} with {sglang}" if name else f"not a tested pair: {megatron} with {sglang}"
    use, remedy = "megatron-core with SGLang", f"{SETUP} --stack pinned or --stack new"
    return Finding("stack", "ok" if name else "broken", pair, use, False, remedy)


def apex() -> Finding:
    """NVIDIA's apex, told apart from the unrelated package that the registry calls `apex`."""
    use, remedy = (
        "fused Adam of Megatron's optimizer; torch's is used without",
        f"CUDA only: {SETUP} --cuda --with-apex",
    )
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Finding("apex", "absent", "not installed", use, False, remedy)
    if any((Path(folder) / "multi_tensor_apply").is_dir() for folder in spec.submodule_search_locations or ()):
        return Finding("apex", "ok", installed("apex") or "found", use, False)
    unrelated = "an unrelated package of that name, not NVIDIA's"
    return Finding("apex", "broken", unrelated, use, False, f"pip uninstall apex; {remedy}")


def _machine() -> list[Finding]:
    memory = psutil.virtual_memory()
    supported: State = "ok" if (3, 11) <= sys.version_info[:2] <= (3, 12) else "broken"
    free = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
    return [
        Finding("Python", supported, platform.python_version(), "3.11 or 3.12", True, "python3.11 -m venv .venv"),
        Finding("cores", "ok", f"{usable_cores()} usable of {os.cpu_count()}", "verifier, engine on CPU", True),
        Finding("memory", "ok", free, "optimizer state, engine, verifier", True),
    ]


def _torch(cuda: bool) -> list[Finding]:
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    gloo: State = "ok" if torch.distributed.is_gloo_available() else "absent"
    nccl: State = "ok" if torch.distributed.is_nccl_available() else "absent"
    version = ".".join(str(part) for part in torch.cuda.nccl.version()) if cuda and nccl == "ok" else "not in torch"
    use = "learner and engine take turns on them; CPU does without"
    remedy = "a CUDA driver that fits torch's build" if torch.version.cuda else f"{SETUP} --cuda, given a GPU"
    return [
        Finding("devices", "ok" if cuda else "absent", devices(), use, False, remedy),
        Finding("torch", "ok", f"{torch.__version__} ({built})", "learner", True),
        Finding("gloo", gloo, "in torch" if gloo == "ok" else "not in torch", "collectives on CPU", True),
        Finding("NCCL", nccl, version, "collectives on CUDA", cuda, f"{SETUP} --cuda"),
    ]


def _tool(tool: Tool, needed: bool) -> Finding:
    missing: State = "absent" if tool.found.startswith("not ") else "broken"
    return Finding(tool.part, "ok" if tool.fits else missing, tool.found, tool.use, needed, tool.remedy)


def _package(package: Package, error: str, cuda: bool) -> Finding:
    needed = package.needed == "always" or (package.needed == "on CUDA" and cuda)
    version = installed(package.distribution)
    state: State = "absent" if version is None else "broken" if error else "ok"
    text = "not installed" if version is None else f"{version}: {error}" if error else version
    return Finding(package.distribution, state, text, package.use, needed, package.remedy)
