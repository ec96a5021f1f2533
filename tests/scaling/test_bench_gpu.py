"""run_scripts/bench/gpu.py: what is left of a part that fails, and where it runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from run_scripts.bench.alone import keep_logs
from run_scripts.bench.first import PROBES, SECONDS
from run_scripts.bench.gpu import PARTS, alone, obstacle
from run_scripts.bench.gpu_parts import recipe_of
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


@pytest.mark.parametrize(("library", "backend"), [("flash_ops.abi3.so", None), ("spatial_ops.abi3.so", "triton")])
def test_every_recipe_has_a_backend_that_is_installed(
    library: str, backend: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sgl_kernel").mkdir()
    for name in ("__init__.py", library):
        (tmp_path / "sgl_kernel" / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert recipe_of(tmp_path, True).engine.extra.get("attention_backend") == backend
    assert tomllib.loads(recipe_text(tmp_path, True))["engine"]["extra"].get("attention_backend") == backend


def steps() -> list[str]:
    """The commands of each step of gpu_steps.sh; a step is one call on a borrowed machine."""
    script = (SCRIPTS / "bench" / "gpu_steps.sh").read_text(encoding="utf-8").replace("\\\n", "")
    return re.findall(r"^\d\)(.*?)^ +;;$", script, re.MULTILINE | re.DOTALL)


def test_the_steps_name_modules_options_and_files_that_exist() -> None:
    block = "\n".join(steps())
    calls = re.findall(r"-m (run_scripts\.bench\.\w+)([^|;&\n]*)", block)
    assert len(calls) == 7
    for module, options in calls:
        text = (SCRIPTS.parent / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")
        for option in re.findall(r"(--[\w-]+)", options):
            assert f'"{option}"' in text, f"{module} has no {option}"
    for name in re.findall(r"((?:tests|run_scripts)/[\w/.]+)", block):
        assert (SCRIPTS.parent / name).exists(), name


def test_the_steps_have_time_for_all_their_parts() -> None:
    """A step takes ten minutes at most on a borrowed machine."""
    for line in steps():
        patience = [int(seconds) for seconds in re.findall(r"timeout (\d+)", line)]
        loops = [len(chunks.split()) for chunks in re.findall(r"for chunk in ([\d ]+);", line)]
        repeated = sum((count - 1) * 30 for count in loops)
        assert sum(patience) + repeated <= 600
        for limit, budget, parts in re.findall(
            r"timeout (\d+) \S+ -m run_scripts.bench.gpu .*?--seconds (\d+) --parts ([\w ]+)", line
        ):
            assert sum(PARTS[part].limit_s for part in parts.split() if part in PARTS) <= int(budget) < int(limit)
        if "bench.first" in line:
            assert sum(probe.limit_s for probe in PROBES.values()) <= SECONDS < patience[0]


def verdicts(**failed: str) -> dict[str, dict[str, str]]:
    return {
        name: {"verdict": "failed", "why": failed[name]} if name in failed else {"verdict": "passed"} for name in PROBES
    }


def test_a_part_is_left_out_where_a_probe_that_it_needs_has_failed() -> None:
    assert obstacle("loss", verdicts(ipc="refused")) == ""
    assert obstacle("switch", verdicts(ipc="refused")) == "ipc"
    assert obstacle("learner", {}) == ""


@pytest.mark.process
def test_nothing_is_measured_where_the_probes_leave_no_chance(tmp_path: Path) -> None:
    first = tmp_path / "first.json"
    first.write_text(json.dumps({"probes": verdicts(products="no such operator", kernels="no kernel image")}))
    command = [sys.executable, "-m", "run_scripts.bench.gpu", "--small", "--after", str(first)]
    done = subprocess.run(command, cwd=SCRIPTS.parent, capture_output=True, text=True)
    assert done.returncode == 1
    assert "kernels: no kernel image; products: no such operator" in done.stderr
    assert not (SCRIPTS.parent / "gpu.json").exists()


@pytest.mark.process
def test_a_part_that_fails_says_why_and_keeps_what_it_printed(tmp_path: Path) -> None:
    found = alone("no such part", True, 120, tmp_path / "gpu-logs")
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
    results, probes, parts = done.stdout.splitlines()
    name = results.split("results in ")[1].rstrip("*")
    assert name.startswith("docs/benchmarks/NVIDIA-H200-"), done.stderr
    assert probes == f"{where} -m run_scripts.bench.first --out {name}-first.json"
    assert parts == f"{where} -m run_scripts.bench.gpu --out {name}.json --after {name}-first.json --parts loss"
