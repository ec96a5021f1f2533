"""run_scripts/dev/bench/ten.py: verdicts, logs, and the ten minutes of its two commands."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mugrpo_megatron.data.problems import load
from mugrpo_megatron.recipe import load_recipe
from mugrpo_megatron.recipe.sections import DataSection
from run_scripts.dev.bench import ten, ten_equal
from run_scripts.dev.bench.alone import Ended, keep_logs
from run_scripts.dev.bench.machine import absent, requirements
from run_scripts.dev.bench.ten import COMMANDS, INSTALL_S, STEPS, Step, read_report, run_step
from run_scripts.dev.bench.ten_clock import SCALE, STEP_TIMES, Work, draw_work, length_of, predicted
from run_scripts.dev.bench.ten_equal import AT_ONCE, EVERY, RATES, UPDATES, settings_of, task_of, write_problems
from run_scripts.dev.bench.ten_learner import recipe_of
from run_scripts.dev.bench.ten_table import OPEN, PREDICTIONS, table

ROOT = Path(__file__).parents[2]
CASES = {
    "passed": '<testcase name="a"><properties><property name="sync, s" value="0.2"/></properties></testcase>',
    "failed": '<testcase name="b"><failure message="RuntimeError: no kernel image&#10;more"/></testcase>',
    "skipped": '<testcase name="c"><skipped/></testcase>',
}


@pytest.mark.parametrize(
    ("cases", "expected"),
    [
        (["passed", "skipped"], {"verdict": "passed", "passed": 1, "skipped": 1, "figures": [("sync, s", "0.2")]}),
        (["skipped"], {"verdict": "skipped", "passed": 0, "skipped": 1, "figures": []}),
        (["passed", "failed"], {"verdict": "failed", "why": "b: RuntimeError: no kernel image", "passed": 1}),
    ],
)
def test_a_verdict_is_that_of_the_tests(cases: list[str], expected: dict[str, Any], tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{''.join(CASES[case] for case in cases)}</testsuite></testsuites>")
    result = read_report(report, Ended(int("failed" in cases), "", tmp_path))
    assert expected.items() <= result.items()


@pytest.mark.parametrize(
    ("code", "output", "why"),
    [
        (None, "....", "not done at its time limit"),
        (-11, "....", "ended by SIGSEGV"),
        (1, "", "ended with code 1"),
        (4, "ERROR: no such file", "ERROR: no such file"),
    ],
)
def test_a_probe_without_a_report_has_failed(code: int | None, output: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "errors.log").touch()
    result = read_report(tmp_path / "report.xml", Ended(code, output, tmp_path))
    assert result == {"verdict": "failed", "why": why}


def test_a_killed_step_is_not_explained_by_a_warning_alone(tmp_path: Path) -> None:
    (tmp_path / "errors.log").write_text("Traceback:\n  warnings.warn(\n")
    assert Ended(-9, "", tmp_path).failure == "ended by SIGKILL:   warnings.warn("
    assert Ended(1, "", tmp_path).failure == "  warnings.warn("


def test_missing_packages_are_named_at_once(tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text('[project]\ndependencies = ["torch", "no_such.package>=1,<2", "no-other==3; x", "numpy>=2"]')
    assert absent(requirements(project)) == ["no_such.package", "no-other"]


def test_every_log_that_says_something_is_kept_under_its_steps_name(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    (scratch / "run" / "logs").mkdir(parents=True)
    (scratch / "errors.log").write_text("why")
    (scratch / "run" / "logs" / "engine.log").write_text("no kernel image")
    (scratch / "empty.log").touch()
    (scratch / "model.safetensors").write_text("large")
    kept = keep_logs(scratch, tmp_path / "logs", "switch")
    assert kept == ["switch-errors.log", "switch-run-logs-engine.log"]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == kept
    assert (tmp_path / "logs" / kept[1]).read_text() == "no kernel image"


@pytest.mark.parametrize(("library", "backend"), [("flash_ops.abi3.so", None), ("spatial_ops.abi3.so", "triton")])
def test_every_recipe_has_a_backend_that_is_installed(
    library: str, backend: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sgl_kernel").mkdir()
    for name in ("__init__.py", library):
        (tmp_path / "sgl_kernel" / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert recipe_of(tmp_path, True).engine.extra.get("attention_backend") == backend
    task = task_of(True)
    recipe = load_recipe(ROOT / task.recipe, settings_of(task, 4, 1, tmp_path, 2))
    assert recipe.engine.extra.get("attention_backend") == backend
    assert (recipe.model.dtype, recipe.engine.memory_fraction) == ("bfloat16", 0.3)
    assert (
        recipe.schedule.total_updates
        == load_recipe(ROOT / task.recipe, settings_of(task, 16, 1, tmp_path, 2)).schedule.total_updates
        == 16
    )


def test_ways_of_equal_time_take_as_many_updates_each_at_its_own_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert task_of(False).recipe.name == "quickstart.toml"
    (tmp_path / ".gpu" / "real-model").mkdir(parents=True)
    assert task_of(False).recipe.name == "real_model.toml"
    assert task_of(True).recipe.name == "quickstart.toml"
    found = {}
    for mu in RATES:
        recipe = load_recipe(ROOT / task_of(False).recipe, settings_of(task_of(False), mu, 2, tmp_path, 8))
        assert recipe.schedule.total_updates == UPDATES
        assert recipe.run.seed == 2
        mu, inside, stages = recipe.schedule.updates_per_stage, recipe.eval.every_updates, recipe.eval.every_stages
        between = {stage * mu for stage in range(0, recipe.schedule.stages, stages)}
        within = {first + age for first in range(0, UPDATES, mu) for age in range(inside, mu, inside)}
        assert sorted(between | within) == list(range(0, UPDATES, EVERY)), "a curve has a point every eight updates"
        found[mu] = recipe.optimizer.lr
    assert found == {4: 2e-5, 16: 2e-5, 64: 1e-5}
    assert len(AT_ONCE) == 8
    assert {mu for mu, _ in AT_ONCE} == set(RATES)


def test_problems_are_written_without_repeated_questions(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    assert write_problems([("1 + 1", "2"), ("2 + 3", "5"), ("1 + 1", "2")], path) == 2
    assert [(p.question, p.gold) for p in load(str(path), DataSection()).problems] == [("1 + 1", "2"), ("2 + 3", "5")]


TRAINER = """
import json, pathlib, sys
chosen = dict(setting.split("=", 1) for setting in sys.argv[4::2])
print("as it is")
if chosen["schedule.updates_per_stage"] == "16":
    sys.exit("EngineFailure: lost")
run = pathlib.Path(chosen["run.dir"])
run.mkdir()
(run / "summary.json").write_text(json.dumps({"seconds": {"start": 1.0}}))
(run / "metrics.jsonl").write_text(json.dumps({"kind": "eval", "update": 0, "accuracy/mean": 0.5}))
"""
"""A program in the place of `mugrpo`: runs of µ = 16 fail, and the others leave what a run leaves."""


@pytest.mark.process
def test_a_run_of_equal_time_that_fails_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = subprocess.run

    def replaced(command: list[str], **options: Any) -> Any:
        return run([sys.executable, "-c", TRAINER, *command[3:]], **options)

    monkeypatch.setattr(ten_equal.subprocess, "run", replaced)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rows: list[dict[str, Any]] = []
    with pytest.raises(RuntimeError, match="4 runs failed"):
        rows.extend(ten_equal.equal(False))
    keys = [(row["mu"], row["seed"], row["beside"]) for row in rows]
    assert sorted(keys) == sorted([(*run, 8) for run in AT_ONCE] + [(mu, 1, 1) for mu in RATES])
    assert keys[-len(RATES) :] == [(mu, 1, 1) for mu in RATES], "those alone come last"
    for row in rows:
        assert row.get("failed") == ("EngineFailure: lost" if row["mu"] == 16 else None)
        assert row.get("curve") == (None if row["mu"] == 16 else [[0, 0.5]])
    kept = keep_logs(tmp_path, tmp_path / "logs", "equal")
    assert len(kept) == len(rows), "what each printed is kept"


PAGES = {("A", "B"): "docs/performance.md", ("C", "D"): "run_scripts/dev/bench/README.md"}


def commands(page: str) -> list[tuple[str, int]]:
    """The page's commands, and the time limits that it gives them."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", "")
    found = re.findall(
        r"^ {4,}(source run_scripts/dev/bench/carried\.sh.*--command \w)  +# (\d+) s$", text, re.MULTILINE
    )
    return [(command, int(seconds)) for command, seconds in found]


@pytest.mark.parametrize("names", PAGES)
def test_two_commands_take_ten_minutes_and_name_what_exists(names: tuple[str, ...]) -> None:
    assert [command.rsplit(" ", 1)[1] for command, _ in commands(PAGES[names])] == list(names)
    total = 0
    for (command, patience), name in zip(commands(PAGES[names]), names, strict=True):
        steps = COMMANDS[name]
        limit = INSTALL_S[name] + sum(STEPS[step].limit_s for step in steps)
        assert limit + 10 <= patience <= 600, "a command that is cut at the end keeps its rows"
        assert len(command) <= 2000
        total += limit
    assert total <= 600
    for step in STEPS.values():
        for argument in step.tests:
            assert not argument.startswith("tests/") or (ROOT / argument).exists(), argument


LIMITS = {name: step.limit_s for name, step in STEPS.items()}


def test_the_page_has_the_table_of_predictions() -> None:
    """Of every step of the two commands, before a machine is there; what was measured is on docs/performance.md."""
    assert "\n".join(table([], LIMITS)) in (ROOT / PAGES["C", "D"]).read_text(encoding="utf-8")
    assert {one.step for one in PREDICTIONS} == {*COMMANDS["C"], *COMMANDS["D"], "asleep"}


def test_a_figure_stands_beside_its_prediction_and_a_miss_is_marked() -> None:
    rows: list[dict[str, Any]] = [
        {"date": "2026", "small": False},
        {"step": "clock", "planned_for_mu": 4, "generate_s": 75.0},
        {"step": "clock", "mu": 4, "stages": 4, "generate_s": 31.5, "tail_s": 20.1, "switch_s": 4.0, "sync_s": 0.4},
        {"step": "drift", "first_half_nats": 0.02, "growth": 1.156},
        {"step": "resumed", "verdict": "failed", "why": "not done at its time limit"},
        {"step": "fill", "fill_bytes_per_s": 1e11},
        {"step": "fill", "fill_bytes_per_s": 6.5e11},
        {"step": "te", "layers": "local", "update_s": 1.2},
        {"step": "te", "layers": "fp8_blockwise", "update_s": 1.0},
        {"step": "asleep", "way": "sleep", "failures": 0},
    ]
    assert {one.figure: one.measured(rows) for one in PREDICTIONS if one.measured(rows) != OPEN} == {
        "16 updates in stages of µ = 4: generate, s": "31.5",
        "of it tails: no prompt waits any more, s": "20.1",
        "switch and sync, s a stage": "1.1",
        "distance of engine and learner, syncs 1 to 15, nats": "0.02",
        "syncs 16 to 30 over these": "1.16 (missed)",
        "a killed and continued run has the weights of the unbroken one (1: yes)": "0 (missed)",
        "bridge fill, TB/s of payload (was 0.15 to 0.31)": "0.65",
        "fp8 by blocks, over local ones": "1.2",
        "engines lost in 80 sleeps of four, as it is": "0 (missed)",
    }


def test_the_clocks_lengths_are_those_that_were_published() -> None:
    """Halved: the published median, percentiles, shares and mean."""
    work = draw_work(small=False)
    lengths = work.lengths / SCALE
    assert (work.updates, work.responses, work.longest) == (16, 128, 2048)
    assert abs(lengths.mean() / 711 - 1) < 0.02
    for share, tokens in ((0.5, 565), (0.9, 1319), (0.95, 1974)):
        assert abs((lengths <= tokens).mean() - share) < 0.02
    assert abs((lengths >= 4096).mean() - 0.0125) < 0.005
    assert recipe_of(Path(), False, length_of(work)).rollout.max_response_tokens >= work.longest
    assert draw_work(small=True).lengths.max() <= 64


def test_predicted_seconds_are_those_of_a_step_by_step_count() -> None:
    """With one slot for every response, a stage takes the sum over its steps of what a step takes."""
    lengths = np.array([[3, 1, 5, 5], [2, 9, 4, 1]])
    work = Work(2, 1, lengths, 9)
    for mu in (1, 2):
        stages = lengths.reshape(2 // mu, -1)
        steps = [int((stage > step).sum()) for stage in stages for step in range(stage.max())]
        expected = [sum(floor + each * running for running in steps) for floor, each in STEP_TIMES]
        assert predicted(work, mu) == pytest.approx(expected)


@pytest.mark.process
def test_rows_stand_in_the_file_when_a_step_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, logs = tmp_path / "ten.jsonl", tmp_path / "logs"
    verdict = run_step("ceilings", True, 120, out, logs)
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert verdict["verdict"] == "passed"
    assert [row["step"] for row in rows] == ["ceilings"] * 6
    cut = run_step("ceilings", True, 0.01, out, logs)
    assert (cut["verdict"], cut["why"]) == ("failed", "not done at its time limit")
    monkeypatch.setitem(STEPS, "ncu", Step(20, ten.ten_learner.row_kernels, needs="no-such-program"))
    assert run_step("ncu", True, 20, out, logs) == {"verdict": "skipped", "why": "needs no-such-program"}


@pytest.mark.process
def test_a_step_that_hangs_crashes_or_fails_costs_the_next_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runner itself, with steps that need no GPU: the time that one leaves goes to the next."""
    texts = {
        "hangs": "import time; time.sleep(1e6)",
        "crashes": "import os; print('why'); os._exit(9)",
        "fails": "assert 1 == 2",
        "passes": "print('done')",
    }
    steps = {}
    for name, text in texts.items():
        (tmp_path / f"test_{name}.py").write_text(f"def test_it():\n    {text}\n")
        steps[name] = Step(0 if name == "hangs" else 3600, tests=(str(tmp_path / f"test_{name}.py"), "-s"))
    out = tmp_path / "out" / "c.jsonl"
    monkeypatch.setattr(ten, "STEPS", steps)
    monkeypatch.setattr(ten, "COMMANDS", {"C": tuple(steps)})
    monkeypatch.setattr(sys, "argv", ["ten.py", "--small", "--command", "C", "--out", str(out)])
    ten.main()
    first, *rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert (first["small"], first["absent"], next(iter(first["versions"]))) == (True, [], "python")
    assert [(row["step"], row["verdict"], row.get("why")) for row in rows] == [
        ("hangs", "failed", "not done at its time limit"),
        ("crashes", "failed", "why"),
        ("fails", "failed", "test_it: assert 1 == 2"),
        ("passes", "passed", None),
    ]
    assert len(capsys.readouterr().out.splitlines()) == 5, "each is printed too, should no file come back"
    with tarfile.open(out.with_name("c-logs.tar.gz")) as archive:
        assert {"logs/crashes-output.log", "logs/passes-output.log"} <= set(archive.getnames())


@pytest.mark.night
@pytest.mark.process
@pytest.mark.parametrize(
    "steps", [(*COMMANDS["A"], *COMMANDS["B"]), COMMANDS["C"], (*COMMANDS["D"], "asleep"), ("equal",)]
)
def test_every_command_runs_on_a_cpu(steps: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "ten.jsonl"
    command = [sys.executable, "-m", "run_scripts.dev.bench.ten", "--small", "--out", str(out), "--steps", *steps]
    done = subprocess.run(command, cwd=ROOT)
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert done.returncode == 0
    absent = {"ncu": not shutil.which("ncu"), "te": not torch.cuda.is_available()}
    assert {row["step"]: row["verdict"] for row in rows if "verdict" in row} == {
        step: "skipped" if absent.get(step) else "passed" for step in steps
    }
    with tarfile.open(tmp_path / "ten-logs.tar.gz") as archive:
        assert archive.getnames() != ["logs"], "what the steps printed"


@pytest.mark.process
@pytest.mark.parametrize("where", ["tools/python3", ".venv/bin/python"])
def test_the_script_takes_the_python_that_there_is(where: str, tmp_path: Path) -> None:
    (tmp_path / "run_scripts/dev/bench").mkdir(parents=True)
    shutil.copy(ROOT / "run_scripts/dev/bench/gpu.sh", tmp_path / "run_scripts/dev/bench")
    for name, text in (("tools/nvidia-smi", "echo NVIDIA H200"), (where, f'echo {where} "$@"')):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", "run_scripts/dev/bench/gpu.sh", "--command", "A"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path / 'tools'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    start = f"{where} -m run_scripts.dev.bench.ten --out docs/NVIDIA-H200-"
    assert done.stdout.startswith(start), done.stderr
    assert done.stdout.endswith(".jsonl --command A\n")
