"""Whole runs with the real learner and the real engine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from mugrpo_megatron.observe.log import read_rows
from tests.tiny import save_model, write_recipe

MUGRPO = [sys.executable, "-W", "ignore", "-m", "mugrpo_megatron"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def rows(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_rows(run_dir / "metrics.jsonl") if row["kind"] == kind]


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose behaviour logprobs come from the learner."""
    folder = tmp_path_factory.mktemp("finished")
    recipe = write_recipe(folder / "recipe.toml", model, folder / "run", rollout={"behaviour": "learner"})
    done = run([*MUGRPO, "train", str(recipe)])
    assert done.returncode == 0, done.stderr
    assert "accuracy after" in done.stdout
    return folder / "run"


def test_a_run_leaves_everything_that_it_promises(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert {"accuracy_before", "accuracy_after", "accuracy_interval", "seconds", "tokens"} <= summary.keys()
    assert {"sync", "generate", "score", "optimize", "total"} <= summary["seconds"].keys()
    assert summary["tokens"]["generated"] == summary["tokens"]["trained"] > 0
    assert (summary["stages"], summary["updates"], summary["seed"]) == (2, 4, 0)
    assert (finished / "report.html").stat().st_size > 10_000
    assert sorted(path.name for path in (finished / "stages").iterdir()) == ["00000", "00001"]
    AutoModelForCausalLM.from_pretrained(finished / "hf")
    assert (
        AutoTokenizer.from_pretrained(finished / "hf").decode(
            AutoTokenizer.from_pretrained(finished / "hf").encode("12+34=")
        )
        == "12+34="
    )


def test_ratio_is_exactly_one_at_a_stages_first_update(finished: Path) -> None:
    first = [row for row in rows(finished, "update") if row["age"] == 0]
    assert len(first) == 2
    assert [(row["kl_k1"], row["kl_k3"], row["second_moment"], row["ess"]) for row in first] == [
        (0.0, 0.0, 0.0, 1.0)
    ] * 2
    stale = [row for row in rows(finished, "update") if row["age"] == 1 and row["grad_norm"] > 0]
    assert all(row["second_moment"] > 0 for row in stale)


def test_engine_and_learner_agree_after_every_sync(finished: Path) -> None:
    stages = rows(finished, "stage")
    assert len(stages) == 2
    assert all(row["mismatch_max"] < 1e-4 for row in stages)


def test_a_finished_run_is_shown_again_not_trained_again(finished: Path) -> None:
    before = len(rows(finished, "update"))
    done = run([*MUGRPO, "train", str(finished / "recipe.toml")])
    assert done.returncode == 0, done.stderr
    assert "accuracy after" in done.stdout
    assert len(rows(finished, "update")) == before


def test_another_recipe_in_the_same_directory_is_refused(finished: Path) -> None:
    done = run([*MUGRPO, "train", str(finished / "recipe.toml"), "--set", "objective.name=grpo"])
    assert done.returncode == 2
    assert "objective.name" in done.stderr
    assert "choose another run.dir" in done.stderr


def test_an_engine_that_fails_to_start_is_named(model: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "r.toml", model, tmp_path / "run", engine={"attention_backend": "no_such_backend"})
    done = run([*MUGRPO, "train", str(recipe)])
    assert done.returncode == 2, done.stderr
    assert "engine" in done.stderr
    assert "no_such_backend" in done.stderr
    assert "Traceback" not in done.stderr


def test_interrupt_leaves_no_process_behind(model: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "r.toml", model, tmp_path / "run", schedule={"stages": 500})
    with subprocess.Popen(
        [*MUGRPO, "train", str(recipe)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a suite in the background ignores Ctrl-C
    ) as process:
        assert process.stdout is not None
        line = ""
        while "stage 2/" not in line:
            line = process.stdout.readline()
            assert line, "the run ended before its second stage"
        offspring = psutil.Process(process.pid).children(recursive=True)
        assert offspring, "the engine should be running"
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    assert process.returncode == 130
    _, alive = psutil.wait_procs(offspring, timeout=30)
    assert alive == []


@pytest.mark.slow
def test_layouts_train_alike(model: Path, finished: Path, tmp_path: Path) -> None:
    """TP2 x PP2 with sequence parallelism and an engine of two ranks: the same first update as one process."""
    recipe = write_recipe(
        tmp_path / "r.toml",
        model,
        tmp_path / "run",
        rollout={"behaviour": "learner"},
        parallel={"tensor": 2, "pipeline": 2, "sequence": True},
        engine={"tensor": 2},
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = run([*torchrun, "-m", "mugrpo_megatron", "train", str(recipe)])
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path / "run", "update")[0]["second_moment"] == 0.0
    assert all(row["mismatch_max"] < 1e-4 for row in rows(tmp_path / "run", "stage"))
