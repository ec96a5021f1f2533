"""The Kubernetes and SkyPilot files: their fields exist, and their commands are what torchrun.sh takes."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from mugrpo_megatron.cli import command_parser
from mugrpo_megatron.recipe import load_recipe

pytestmark = pytest.mark.usefixtures("in_checkout")

FOLDER = Path(__file__).parents[2] / "run_scripts" / "cluster"


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def test_the_operators_rules_for_a_job() -> None:
    job = read("kubernetes.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1
    words = torchrun_words(replicas["Master"]["template"]["spec"]["containers"][0]["args"][0])
    nodes = int(words[words.index("--nodes") + 1])
    assert nodes == 1 + replicas["Worker"]["replicas"]
    assert replicas["Worker"]["template"] == replicas["Master"]["template"]
    pod = replicas["Master"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert container["resources"]["limits"] == {"nvidia.com/gpu": int(words[words.index("train") - 1])}


def torchrun_words(command: str) -> list[str]:
    words = shlex.split(command.replace("\\\n", " "))
    return words[words.index("exec") + 1 :]


def commands() -> list[str]:
    pod = read("kubernetes.yaml")["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    return [pod["containers"][0]["args"][0], read("skypilot.yaml")["run"]]


@pytest.mark.parametrize("command", commands(), ids=["kubernetes", "skypilot"])
def test_the_command_is_one_that_mugrpo_takes(command: str) -> None:
    words = torchrun_words(command)
    assert words[0].removeprefix("/mugrpo/") == "run_scripts/torchrun.sh"
    options = command_parser().parse_args([word.removeprefix("/mugrpo/") for word in words[words.index("train") :]])
    recipe = load_recipe(options.recipe, options.overrides)
    assert str(recipe.run.dir).startswith("/shared/")
    assert str(recipe.model.path).startswith("/shared/")


@pytest.mark.process
@pytest.mark.parametrize("command", commands(), ids=["kubernetes", "skypilot"])
def test_the_shell_passes_on_what_the_cluster_says(command: str, tmp_path: Path) -> None:
    program = tmp_path / "torchrun.sh"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    for path in ("/mugrpo/run_scripts/torchrun.sh", "run_scripts/torchrun.sh"):
        command = command.replace(f"exec {path}", f"exec {program}")
    variables = {
        "RANK": "2", "MASTER_ADDR": "first", "MASTER_PORT": "23456",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3\n10.0.0.4", "SKYPILOT_NODE_RANK": "2",
        "SKYPILOT_NUM_NODES": "4", "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", command], env={"PATH": "/usr/bin:/bin", **variables}, capture_output=True, text=True
    )
    words = done.stdout.splitlines()
    assert words[:4] == ["--nodes", "4", "--node", "2"], done.stderr
    assert words[words.index("--master") + 1] in ("first:23456", "10.0.0.1")
    assert words[words.index("train") - 1] == "8"
