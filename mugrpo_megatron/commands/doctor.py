"""`mugrpo doctor`: what this machine has, what each part is used for, what is missing and how to get it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.environment import devices, installed, usable_cores

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

IMPORT_ALL = """
import contextlib, importlib, json, sys
for module in sys.argv[1:]:
    try:
        with contextlib.redirect_stdout(sys.stderr):
            importlib.import_module(module)
        print(json.dumps([module, ""]), flush=True)
    except BaseException as error:
        print(json.dumps([module, f"{type(error).__name__}: {error}".splitlines()[0]]), flush=True)
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
        'CUDA only: pip install --no-build-isolation "transformer-engine[pytorch]"',
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
    """Print what was found; 0 when this machine has what it needs, 2 when it does not.

    Raises UserError where not even torch is installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise UserError(f"torch is not installed in {sys.prefix}; {SETUP} makes .venv with the build for this machine")
    console = Console()
    with console.status("importing Megatron, SGLang and the others"):
        found = findings()
    console.print(findings_table(found))
    lacking = [finding for finding in found if finding.needed and finding.state != "ok"]
    if not lacking:
        console.print("This machine has what training needs.", style="green")
        return 0
    names = ", ".join(finding.part for finding in lacking)
    console.print(f"Training cannot start without: {names}. See the right-hand column.", style="red")
    return 2


def findings() -> list[Finding]:
    """Everything that was looked for, machine first. Takes the seconds that importing Megatron and SGLang takes."""
    import torch  # here and below, so that `doctor` can say when it is missing

    cuda = torch.cuda.is_available()
    errors = import_errors([package.module for package in PACKAGES if installed(package.distribution)], cuda=cuda)
    return [*_machine(), *_torch(cuda), *(_package(package, errors, cuda) for package in PACKAGES), apex()]


def findings_table(found: Iterable[Finding]) -> Table:
    """The findings as a table; the last column says how to get what is not there."""
    table = Table(box=SIMPLE_HEAD, title="mugrpo doctor", title_style="bold")
    table.add_column("")
    table.add_column("Part", style="bold", no_wrap=True)
    table.add_column("Found", overflow="fold")
    table.add_column("Used for", overflow="fold")
    table.add_column("How to get it", overflow="fold")
    for finding in found:
        style = "dim" if finding.state == "absent" and not finding.needed else ""
        table.add_row(
            MARKS[finding.state, finding.needed],
            Text(finding.part),
            Text(finding.found),
            Text(finding.use),
            Text(finding.remedy if finding.state != "ok" else ""),
            style=style,
        )
    return table


def import_errors(modules: Sequence[str], *, cuda: bool) -> dict[str, str]:
    """Module -> what its import raised, empty where it worked, in a fresh interpreter."""
    environment = os.environ if cuda else {**os.environ, "SGLANG_USE_CPU_ENGINE": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT_ALL, *modules],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    told = dict(json.loads(line) for line in run.stdout.splitlines())
    crash = f"the import ended the interpreter with status {run.returncode}"
    return {module: told.get(module, crash) for module in modules}


def apex() -> Finding:
    """NVIDIA's apex, told apart from the unrelated package that the registry calls `apex`."""
    use = "fused Adam of Megatron's optimizer; torch's is used without"
    remedy = "CUDA only: build it from https://github.com/NVIDIA/apex"
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


def _package(package: Package, errors: dict[str, str], cuda: bool) -> Finding:
    needed = package.needed == "always" or (package.needed == "on CUDA" and cuda)
    version = installed(package.distribution)
    if version is None:
        return Finding(package.distribution, "absent", "not installed", package.use, needed, package.remedy)
    if error := errors[package.module]:
        return Finding(package.distribution, "broken", f"{version}: {error}", package.use, needed, package.remedy)
    return Finding(package.distribution, "ok", version, package.use, needed)
