"""`mugrpo doctor`: what this machine has, what each part is used for, what is missing and how to get it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Literal

import psutil
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.sandbox.jail_check import check_jail
from mugrpo_megatron.extras.sandbox.limits import Limits, Mode
from mugrpo_megatron.observe.environment import devices, installed, usable_cores
from mugrpo_megatron.observe.toolchain import Tool, driver_answers, tools_here

SETUP = "run_scripts/setup.sh"

State = Literal["ok", "absent", "broken"]

MARKS: dict[tuple[State, bool], Text] = {
    ("ok", True): Text("✓", style="bold green"),
    ("ok", False): Text("✓", style="bold green"),
    ("absent", False): Text("·", style="dim"),
    ("absent", True): Text("✗", style="bold red"),
    ("broken", False): Text("!", style="bold yellow"),
    ("broken", True): Text("✗", style="bold red"),
}
"""By state and whether this machine needs the part."""

WIDTHS = (1, 18, 25, 33)
"""Columns of mark, name, what was found and use; with a space between them they fill 80."""

IMPORT_ALL = """
import contextlib, importlib, json, os, sys
with contextlib.suppress(BaseException):
    import torch
    if not torch.cuda.is_available():
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
for module in sys.argv[1:]:
    try:
        with contextlib.redirect_stdout(sys.stderr):
            importlib.import_module(module)
        print(json.dumps(""), flush=True)
    except BaseException as error:
        print(json.dumps(f"{type(error).__name__}: {error}".splitlines()[0]), flush=True)
"""
"""Runs in a process of its own: an import may crash, and Megatron and SGLang are not made to share one."""


@dataclass(frozen=True, slots=True)
class Finding:
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


@dataclass(frozen=True, slots=True)
class Package:
    """A Python package to look for."""

    distribution: str
    module: str
    use: str
    remedy: str
    needed: Literal["always", "on CUDA", "never"]


PACKAGES = (
    Package("megatron-core", "megatron.core", "learner: model, parallel layouts, optimizer", SETUP, "always"),
    Package("sglang", "sglang.srt.entrypoints.engine", "engine: samples the responses", SETUP, "always"),
    Package("transformers", "transformers", "tokenizers and model configurations", SETUP, "always"),
    Package("math-verify", "math_verify", "verifier: scores answers", SETUP, "always"),
    Package("torchvision", "torchvision", "imported by SGLang", f"{SETUP} (it must match torch's build)", "always"),
    Package("triton", "triton", "fused loss kernels on CUDA; imported by SGLang", SETUP, "always"),
    Package("psutil", "psutil", "imported by SGLang; finds and ends child processes", SETUP, "always"),
    Package("sglang-kernel", "sgl_kernel", "SGLang's CUDA kernels", f"{SETUP} --cuda", "on CUDA"),
    Package(
        "transformer-engine",
        "transformer_engine",
        "context parallelism, fused Adam",
        f"CUDA only: {SETUP} --cuda --with-te",
        "never",
    ),
    Package(
        "flash-attn",
        "flash_attn",
        "attention inside Transformer Engine; the learner's own comes with torch",
        "CUDA only: pip install --no-build-isolation flash-attn",
        "never",
    ),
    Package("wandb", "wandb", "only with track.wandb_project", 'pip install "mugrpo-megatron[wandb]"', "never"),
)


def doctor() -> int:
    """Print each part as soon as it is known; 0 when this machine has what it needs, 2 when it does not.

    Raises UserError where not even torch is installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise UserError(f"torch is not installed in {sys.prefix}; {SETUP} makes .venv with the build for this machine")
    console = Console()
    console.print("mugrpo doctor: importing what training needs takes some seconds", style="bold")
    found = []
    with console.status("importing torch, Megatron, SGLang and the others"):
        for finding in findings():
            console.print(shown(finding))
            found.append(finding)
    lacking = [finding for finding in found if finding.needed and finding.state != "ok"]
    if not lacking:
        console.print("This machine has what training needs.", style="green")
        return 0
    names = ", ".join(finding.part for finding in lacking)
    console.print(f"Training cannot start without: {names}.", style="red")
    return 2


def findings() -> Generator[Finding, None, None]:
    """Everything that was looked for, machine first, each as soon as it is known."""
    present = [package.module for package in PACKAGES if installed(package.distribution)]
    with importing(present) as errors:
        yield from _machine()
        import torch  # here and below, so that `doctor` can say when it is missing

        cuda = torch.cuda.is_available()
        yield from _torch(cuda)
        has_gpu = driver_answers()
        if torch.version.cuda or has_gpu:
            yield from (_tool(tool, needed=has_gpu) for tool in tools_here())
        for package in PACKAGES:
            error = next(errors) if package.module in present else ""
            yield _package(package, error, cuda)
    yield apex()
    yield jail()


def shown(finding: Finding) -> Group:
    """A part in lines of at most 80 columns: mark, name, what was found, its use; then how to get what is not there."""
    style = "dim" if finding.state == "absent" and not finding.needed else ""
    columns = Table.grid(padding=(0, 1))
    for width in WIDTHS:
        columns.add_column(width=width, overflow="fold")
    mark = MARKS[finding.state, finding.needed]
    columns.add_row(mark, Text(finding.part, style="bold"), Text(finding.found), Text(finding.use), style=style)
    lines: list[RenderableType] = [columns]
    if finding.state != "ok" and finding.remedy:
        remedy = Table.grid(padding=(0, 1))
        for width in (WIDTHS[0], sum(WIDTHS[1:]) + 2):
            remedy.add_column(width=width, overflow="fold")
        remedy.add_row("", Text(f"get it: {finding.remedy}"), style=style)
        lines.append(remedy)
    return Group(*lines)


@contextmanager
def importing(modules: Sequence[str]) -> Iterator[Iterator[str]]:
    """Import modules in a fresh interpreter while the block runs; what each raised in turn, empty where it worked."""
    command = [sys.executable, "-W", "ignore", "-c", IMPORT_ALL, *modules]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield _told(process)
        finally:
            process.kill()


def _told(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout
    for line in process.stdout:
        yield json.loads(line)
    crash = f"the import ended the interpreter with status {process.wait()}"
    yield from repeat(crash)


def apex() -> Finding:
    """NVIDIA's apex, told apart from the unrelated package that the registry calls `apex`."""
    use = "fused Adam of Megatron's optimizer; torch's is used without"
    remedy = f"CUDA only: {SETUP} --cuda --with-apex"
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Finding("apex", "absent", "not installed", use, needed=False, remedy=remedy)
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if any((folder / "multi_tensor_apply").is_dir() for folder in folders):
        return Finding("apex", "ok", installed("apex") or "found", use, needed=False)
    return Finding(
        "apex",
        "broken",
        "an unrelated package of that name, not NVIDIA's",
        use,
        needed=False,
        remedy=f"pip uninstall apex; {remedy}",
    )


def jail() -> Finding:
    """In what programs of `reward.function = "code"` run here: the way in which one of a line has just run."""
    use = 'reward.function = "code": programs of responses'
    remedy = 'allow user namespaces to this user (docs/rewards.md); until then reward.code_sandbox = "limits"'
    if _jailed("namespaces"):
        return Finding("code sandbox", "ok", "namespaces", use, needed=False)
    if _jailed("limits"):
        return Finding("code sandbox", "broken", "no namespaces, limits alone", use, needed=False, remedy=remedy)
    return Finding(
        "code sandbox", "absent", "programs cannot be held", use, needed=False, remedy="docs/rewards.md"
    )


def _jailed(mode: Mode) -> bool:
    try:
        check_jail(Limits(mode))
    except (UserError, OSError):
        return False
    return True


def _machine() -> list[Finding]:
    memory = psutil.virtual_memory()
    version = ".".join(str(part) for part in sys.version_info[:3])
    supported: State = "ok" if (3, 11) <= sys.version_info[:2] <= (3, 12) else "broken"
    free = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
    return [
        Finding("Python", supported, version, "3.11 or 3.12", needed=True, remedy="python3.11 -m venv .venv"),
        Finding("cores", "ok", f"{usable_cores()} usable of {os.cpu_count()}", "verifier, engine on CPU", needed=True),
        Finding("memory", "ok", free, "optimizer state, engine, verifier", needed=True),
    ]


def _torch(cuda: bool) -> list[Finding]:
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    gloo: State = "ok" if torch.distributed.is_gloo_available() else "absent"
    nccl: State = "ok" if torch.distributed.is_nccl_available() else "absent"
    nccl_found = ".".join(str(part) for part in torch.cuda.nccl.version()) if cuda and nccl == "ok" else "not in torch"
    return [
        Finding(
            "devices",
            "ok" if cuda else "absent",
            devices(),
            "learner and engine take turns on them; CPU does without",
            needed=False,
            remedy="a CUDA driver that fits torch's build" if torch.version.cuda else f"{SETUP} --cuda, given a GPU",
        ),
        Finding("torch", "ok", f"{torch.__version__} ({built})", "learner", needed=True),
        Finding("gloo", gloo, "in torch" if gloo == "ok" else "not in torch", "collectives on CPU", needed=True),
        Finding("NCCL", nccl, nccl_found, "collectives on CUDA", needed=cuda, remedy=f"{SETUP} --cuda"),
    ]


def _tool(tool: Tool, needed: bool) -> Finding:
    missing: State = "absent" if tool.found.startswith("not ") else "broken"
    return Finding(tool.part, "ok" if tool.fits else missing, tool.found, tool.use, needed, tool.remedy)


def _package(package: Package, error: str, cuda: bool) -> Finding:
    needed = package.needed == "always" or (package.needed == "on CUDA" and cuda)
    version = installed(package.distribution)
    if version is None:
        return Finding(package.distribution, "absent", "not installed", package.use, needed, package.remedy)
    if error:
        return Finding(package.distribution, "broken", f"{version}: {error}", package.use, needed, package.remedy)
    return Finding(package.distribution, "ok", version, package.use, needed)
