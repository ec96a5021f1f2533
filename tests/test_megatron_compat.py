"""Whatever module is imported first, the CPU's stand-ins are there before Megatron."""

from __future__ import annotations

import ast
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "megatron": ("mugrpo_megatron/megatron_compat.py", "mugrpo_megatron/learner/", "mugrpo_megatron/cpu/"),
    "sglang": ("mugrpo_megatron/engine/sglang_compat.py", "mugrpo_megatron/cpu/"),
}
PRODUCT = ("mugrpo_megatron", "checkpoints_convert")
FOLDERS = {"megatron": (*PRODUCT, "run_scripts"), "sglang": PRODUCT}

IMPORT_EACH = """
import os, sys
import numpy, pyarrow.parquet, pydantic, rich.console, torch, transformers  # once, for all the children
from transformers import AutoModelForCausalLM, AutoTokenizer

class Reached(BaseException): pass

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("megatron", "sglang"):  # what they import themselves says nothing about us
            original = isinstance(getattr(torch.cuda.current_device, "__module__", ""), str) \\
                and torch.cuda.current_device.__module__.startswith("torch")
            raise Reached("before" if name.startswith("megatron") and original else "after")

sys.meta_path.insert(0, Watch())
for module in sys.argv[1:]:
    if (child := os.fork()) == 0:
        try:
            __import__(module)
            told = "not at all"
        except Reached as reached:
            told = str(reached)
        except ModuleNotFoundError as missing:
            if missing.name != "reasoning_gym":  # an extra's own package, which the suite does without
                raise
            told = "not at all"
        print(module, told, sep="\\t", flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, module
"""
"""Imports every module given in a child that has imported none of them before, up to its first step into Megatron."""


def modules() -> Iterator[tuple[str, Path]]:
    for package in ("mugrpo_megatron", "checkpoints_convert"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


@pytest.mark.parametrize("library", ALLOWED)
def test_only_the_doors_import(library: str) -> None:
    places = {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS[library]
        for path in (ROOT / folder).rglob("*.py")
        if library in path.read_text("utf-8") and any(name.split(".")[0] == library for name in imported(path))
    }
    assert places
    assert {place for place in places if not place.startswith(ALLOWED[library])} == set()


def test_two_warnings_of_megatrons_are_left_out_and_no_other() -> None:
    from mugrpo_megatron.megatron_compat import LEFT_OUT

    for name, start in LEFT_OUT.items():
        logger = logging.getLogger(name)
        texts = (f"{start}, and more", f"another warning than {start}")
        records = [logger.makeRecord(name, logging.WARNING, "", 0, text, (), None) for text in texts]
        assert [bool(logger.filter(record)) for record in records] == [False, True]


@pytest.mark.night
@pytest.mark.process
@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing stands in for CUDA where there is CUDA")
def test_the_stand_ins_are_there_before_megatron_whatever_is_imported_first() -> None:
    names = [name for name, _ in modules()]
    command = [sys.executable, "-W", "ignore", "-c", IMPORT_EACH, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = dict(line.split("\t") for line in done.stdout.splitlines())
    assert told.keys() == set(names)
    assert [name for name, when in told.items() if when == "before"] == []
    for name in ("mugrpo_megatron.weights.buckets", "mugrpo_megatron.weights.hf", "mugrpo_megatron.commands.sft"):
        assert told[name] == "after"  # they do step into Megatron
    assert told["mugrpo_megatron.weights.families"] == "not at all"
