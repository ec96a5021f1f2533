"""The commands that start a planned run on its cluster."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from mugrpo_megatron.plan.hardware import Cluster

SCRIPTS = "run_scripts"


def launch_commands(recipe: Path, overrides: Sequence[str], cluster: Cluster) -> dict[str, str]:
    """Where -> the command that trains there, from the repository's root; K and HOST are left to the user."""
    words = ["train", str(recipe), *(word for setting in overrides for word in ("--set", setting))]
    train, ranks, nodes = shlex.join(words), cluster.per_node, cluster.nodes
    if nodes == 1 and ranks == 1:
        return {"here": f"mugrpo {train}"}
    if nodes == 1:
        commands = {"here": f"{SCRIPTS}/torchrun.sh {ranks} {train}"}
    else:
        where = f"--nodes {nodes} --node K --master HOST {ranks}"
        commands = {"on each node, with its K from 0": f"{SCRIPTS}/torchrun.sh {where} {train}"}
    if cluster.device.cuda:
        commands["under Slurm"] = f"sbatch --nodes {nodes} --gpus-per-node {ranks} {SCRIPTS}/slurm.sbatch {train}"
    return commands
