"""The scripts of a fleet: servers follow a run's weights, and runs take turns on a machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import IO

import pytest
import yaml

from mugrpo_megatron.run.record import PROVENANCE
from tests.checkout import ROOT
from tests.tiny import write_recipe

CLUSTER = ROOT / "run_scripts" / "cluster"

ENGINE = """#!/usr/bin/env bash
# Stands for the interpreter of an engine: says how it was called, and serves until it is ended.
trap 'echo "ended $3 $4"; exit 0' TERM
echo "called $*"
while true; do sleep 0.05; done
"""


def write_weights(folder: Path, updates: int) -> None:
    folder.mkdir(exist_ok=True)
    half = folder / "half"
    half.write_text(json.dumps({"run": "abc", "cursor": {"stage": 0, "age": 0, "updates": updates}}))
    half.rename(folder / PROVENANCE)


def line_with(stdout: IO[str], word: str) -> str:
    """The next line with a word; the test's own time limit ends a wait for none."""
    return next(line.strip() for line in stdout if word in line)


@pytest.mark.process
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_follows_the_weights(engine: str, tmp_path: Path) -> None:
    python, weights = tmp_path / "python", tmp_path / "hf"
    python.write_text(ENGINE)
    python.chmod(0o755)
    options = ["--first", str(tmp_path / "model"), "abc-0", "--tp", "2"]
    command = [str(CLUSTER / "serve.sh"), engine, str(weights), "8000", *options]
    environment = {**os.environ, "PYTHON": str(python), "POLL_S": "0.05"}
    served = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert served.stdout
    try:
        called = line_with(served.stdout, "called")
        assert f"{tmp_path}/model --served-model-name abc-0 --port 8000 --host 127.0.0.1 --tp 2" in called
        assert ("--logprobs-mode processed_logprobs" in called) is (engine == "vllm")
        write_weights(weights, 12)
        line_with(served.stdout, "ended")
        assert f"{weights} --served-model-name abc-12 --port 8000 --host 127.0.0.1 --tp 2" in line_with(
            served.stdout, "called"
        )
        (weights / PROVENANCE).unlink()  # while a copy is replaced, the server stays
        write_weights(weights, 24)
        assert "abc-24" in line_with(served.stdout, "called")
    finally:
        served.send_signal(signal.SIGTERM)
        assert served.wait() == 0
    line_with(served.stdout, "ended")


def test_the_fleets_pods_run_the_script() -> None:
    service, pods = yaml.safe_load_all((CLUSTER / "kubernetes-servers.yaml").read_text(encoding="utf-8"))
    template = pods["spec"]["template"]
    assert template["metadata"]["labels"] == pods["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert pods["spec"]["serviceName"] == service["metadata"]["name"]
    (container,) = template["spec"]["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in template["spec"]["volumes"]}
    assert container["command"][1].endswith("/serve.sh")
    assert container["args"][2] == str(service["spec"]["ports"][0]["port"])


@pytest.mark.process
@pytest.mark.night
def test_two_runs_take_turns(tmp_path: Path, model: Path) -> None:
    """Never two in the same turn, and both runs end."""
    environment = {**os.environ, "TURNS": str(tmp_path / "turns")}
    runs = [tmp_path / name for name in ("a", "b")]
    jobs = []
    for run in runs:
        recipe = write_recipe(tmp_path / f"{run.name}.toml", model, run, eval={"samples": 1})
        command = [CLUSTER / "alternate.sh", recipe]
        jobs.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
    said = [job.communicate()[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], said
    assert all((run / "summary.json").exists() for run in runs)
    for turn in ("generate", "learn"):
        found = re.findall(rf"alternate.sh: ([\d.]+) \S+ {turn} (begins|ends)", "\n".join(said))
        moments = sorted((float(time), kind) for time, kind in found)
        assert [kind for _, kind in moments] == ["begins", "ends"] * (len(moments) // 2)
