"""run_scripts/bench/gpu.py: what is left of a part that fails, and where it runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from run_scripts.bench.gpu import alone, keep_logs
from run_scripts.bench.gpu_parts import How, recipe_of
from run_scripts.bench.gpu_whole import recipe_text

SCRIPTS = Path(__file__).parents[2] / "run_scripts"


def test_every_log_that_says_something_is_kept_under_its_parts_name(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    (scratch / "run" / "logs").mkdir(parents=True)
    (scratch / "errors.log").write_text("why")
    (scratch / "run" / "logs" / "engine.log").write_text("no kernel image")
    (scratch / "empty.log").touch()
    (scratch / "model.safetensors").write_text("large")
    kept = keep_logs(scratch, tmp_path / "gpu-logs", "switch")
    assert kept == ["switch-errors.log", "switch-run-logs-engine.log"]
    assert sorted(path.name for path in (tmp_path / "gpu-logs").iterdir()) == kept
    assert (tmp_path / "gpu-logs" / kept[1]).read_text() == "no kernel image"


def test_the_attention_backend_reaches_every_recipe(tmp_path: Path) -> None:
    how = How(small=True, attention_backend="triton")
    assert recipe_of(tmp_path, how).engine.attention_backend == "triton"
    assert 'attention_backend = "triton"' in recipe_text(tmp_path, how)


def test_the_prepared_commands_name_modules_options_and_files_that_exist() -> None:
    page = (SCRIPTS.parent / "docs" / "performance.md").read_text(encoding="utf-8")
    block = page.split("## The first half hour on a GPU")[1].split("```")[1]
    calls = re.findall(r"-m (run_scripts\.bench\.\w+)([^|;&]*)", block)
    assert len(calls) == 5
    for module, options in calls:
        text = (SCRIPTS.parent / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")
        for option in re.findall(r"(--[\w-]+)", options):
            assert f'"{option}"' in text, f"{module} has no {option}"
    for name in re.findall(r"((?:tests|run_scripts)/[\w/.]+)", block):
        assert (SCRIPTS.parent / name).exists(), name


@pytest.mark.process
def test_a_part_that_fails_says_why_and_keeps_what_it_printed(tmp_path: Path) -> None:
    found = alone("no such part", How(small=True), 60, tmp_path / "gpu-logs")
    assert found == {"failed": "KeyError: 'no such part'", "logs": ["no such part-errors.log"]}
    assert "Traceback" in (tmp_path / "gpu-logs" / found["logs"][0]).read_text()


@pytest.mark.process
@pytest.mark.parametrize("where", ["tools/python3", ".venv/bin/python"])
def test_the_script_takes_the_python_that_there_is(where: str, tmp_path: Path) -> None:
    (tmp_path / "run_scripts" / "bench").mkdir(parents=True)
    shutil.copy(SCRIPTS / "bench" / "gpu.sh", tmp_path / "run_scripts" / "bench")
    for name, text in (("tools/nvidia-smi", "echo NVIDIA H200"), (where, f'echo {where} "$@"')):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", "run_scripts/bench/gpu.sh", "--parts", "loss"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path / 'tools'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith(f"{where} -m run_scripts.bench.gpu --out docs/benchmarks/NVIDIA-H200-"), done.stderr
    assert done.stdout.endswith(".json --parts loss\n")
