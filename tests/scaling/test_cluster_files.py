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

CONTAINER = {
    "name": str, "image": str, "command": [str], "args": [str], "volumeMounts": [{"name": str, "mountPath": str}],
    "resources": {"limits": dict}, "securityContext": {"capabilities": {"add": [str]}},
}  # fmt: skip
POD = {
    "spec": {
        "terminationGracePeriodSeconds": int,
        "containers": [CONTAINER],
        "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str}, "emptyDir": {"medium": str}}],
    }
}
REPLICA = {"replicas": int, "restartPolicy": str, "template": POD}
PYTORCH_JOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "nprocPerNode": str,
        "pytorchReplicaSpecs": {"Master": REPLICA, "Worker": REPLICA},
        "runPolicy": {
            "activeDeadlineSeconds": int, "backoffLimit": int, "cleanPodPolicy": str, "managedBy": str, "suspend": bool,
            "ttlSecondsAfterFinished": int,
        },
    },
}  # fmt: skip
"""Fields, as far as the file uses their parents, of manifests/base/crds/kubeflow.org_pytorchjobs.yaml in
kubeflow/training-operator at c20bf65e03b8, and of a pod in the Kubernetes API."""

SKY_TASK = {
    "name": str, "workdir": str, "num_nodes": int, "file_mounts": dict, "setup": str, "run": str, "envs": dict,
    "secrets": dict, "volumes": dict, "config": dict, "service": dict,
    "resources": {
        "infra": str, "accelerators": str, "image_id": str, "use_spot": bool, "network_tier": str, "disk_size": int,
        "job_recovery": {"strategy": str, "max_restarts_on_errors": int},
    },
}  # fmt: skip
"""Fields of get_task_schema and _get_single_resources_schema in sky/utils/schemas.py of skypilot-org/skypilot at
00052dfe0d13, and of its page reference/yaml-spec."""


def unknown(value: Any, schema: Any, where: str = "") -> list[str]:
    """Places in `value` that `schema` does not have: a type, a list of one schema, or a mapping of fields."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return [where]
        return [
            problem
            for key, inner in value.items()
            for problem in (unknown(inner, schema[key], f"{where}.{key}") if key in schema else [f"{where}.{key}"])
        ]
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [where]
        return [
            problem for number, inner in enumerate(value) for problem in unknown(inner, schema[0], f"{where}[{number}]")
        ]
    return [] if type(value) is schema else [where]


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize(("name", "schema"), [("kubernetes.yaml", PYTORCH_JOB), ("skypilot.yaml", SKY_TASK)])
def test_every_field_is_one_of_the_schema(name: str, schema: dict[str, Any]) -> None:
    assert unknown(read(name), schema) == []


def test_a_field_that_the_schema_lacks_is_found() -> None:
    job = read("kubernetes.yaml")
    pod = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    pod["containers"][0]["imag"] = pod["containers"][0].pop("image")
    pod["terminationGracePeriodSeconds"] = "660"
    found = unknown(job, PYTORCH_JOB)
    assert [where.rpartition("template.")[2] for where in found if ".Master." in where] == [
        "spec.terminationGracePeriodSeconds",
        "spec.containers[0].imag",
    ]


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
