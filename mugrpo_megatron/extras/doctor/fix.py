"""Installs SGLang and torchvision for a CPU, without their own requirements, which are CUDA builds.

`mugrpo doctor --fix` and run_scripts/setup.sh (`python -m mugrpo_megatron.extras.doctor.fix`) call `fix`.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from mugrpo_megatron.errors import UserError

Say = Callable[[str], None]


class Stack(NamedTuple):
    """Versions that were tested together."""

    name: str
    """Name of the stack, as `setup.sh --stack` takes it."""
    sglang: str
    torchvision: str
    """Version of torchvision that fits the stack's torch on CPU."""


STACKS = {
    "0.16.1": Stack("pinned", "0.5.15.post1", "0.28.0"),
    "0.19.2": Stack("new", "0.5.23", "0.29.1"),
}
"""Version of megatron-core -> the stack of versions that was tested with it."""
FAKES = "_meta_registrations.py"
"""File of torchvision that registers fake operators, which only have shapes and dtypes of the real ones' results."""
FAKE = re.compile(r"^@torch\.library\.register_fake\(.*\)\n", re.MULTILINE)


def fix(say: Say = print) -> None:
    """Install SGLang and torchvision beside a CPU's torch, and make torchvision importable.

    Installs nothing if both are there and torchvision can be imported. Raises UserError if megatron-core is missing or
    of no tested stack, if a package cannot be installed, and if torchvision still cannot be imported; also if a package
    is missing although torch finds a GPU, because there `mugrpo-megatron[cuda]` installs it.
    """
    megatron = _installed("megatron-core")
    stack = STACKS.get(megatron or "")
    if stack is None:
        pinned, new = STACKS
        raise UserError(
            f"megatron-core {f'{megatron} is' if megatron else 'is not'} installed, and SGLang was tested with "
            f'{pinned} and {new} only; for a CPU, install "mugrpo-megatron[cpu]", which has {pinned}, or '
            f'"mugrpo-megatron[cpu-new]", which has {new}'
        )
    missing = [f"{name}=={getattr(stack, name)}" for name in ("sglang", "torchvision") if _installed(name) is None]
    if missing and _torch_finds_a_device():
        raise UserError(f'{" and ".join(missing)}: not installed; for a GPU: pip install "mugrpo-megatron[cuda]"')
    if missing:
        say(f"installing {' and '.join(missing)} without their requirements, which are for CUDA machines")
        _pip_install(missing)
    if not _imports("torchvision"):
        remove_fakes(_folder("torchvision") / FAKES, say)
        if not _imports("torchvision"):
            raise UserError(
                f"torchvision {_installed('torchvision')} still cannot be imported, and SGLang needs it; "
                f"`{sys.executable} -c 'import torchvision'` prints why"
            )


def remove_fakes(path: Path, say: Say = print) -> None:
    """Remove the registrations of fakes from torchvision's file.

    PyPI has only CUDA builds of torchvision. Beside a CPU's torch, their library of operators does not load, and the
    import of torchvision fails where it registers fakes of these operators. SGLang imports torchvision and calls none
    of them. Another version does not help: the newest, 0.29.2, fails in the same place.
    """
    text = path.read_text(encoding="utf-8")
    less, count = FAKE.subn("", text)
    if count:
        path.write_text(less, encoding="utf-8")
        say(f"torchvision: removed {count} registrations of operators that it lacks beside a CPU's torch")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _folder(name: str) -> Path:
    """Folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _imports(module: str) -> bool:
    """Whether `module` can be imported; tried in another process, since an import may crash."""
    return subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True).returncode == 0


def _torch_finds_a_device() -> bool:
    test = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", test], capture_output=True).returncode == 0


def _pip_install(requirements: list[str]) -> None:
    if importlib.util.find_spec("pip") is None:
        words = " ".join(requirements)
        raise UserError(
            f"{sys.prefix} has no pip: run `uv pip install --python {sys.executable} --no-deps {words}`, then "
            "this command again"
        )
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    if subprocess.run([*command, *requirements]).returncode:
        raise UserError(f"pip could not install {' and '.join(requirements)}; pip's reason stands above")


if __name__ == "__main__":
    try:
        fix()
    except UserError as error:
        sys.exit(f"setup: {error}")
