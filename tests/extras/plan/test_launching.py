"""The commands of a plan are those that the scripts take."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mugrpo_megatron.cli import command_parser
from mugrpo_megatron.extras.plan.hardware import make_cluster
from mugrpo_megatron.extras.plan.printing import launch_commands
from mugrpo_megatron.recipe import load_recipe
from tests.checkout import ROOT

RECIPE = Path(ROOT, "run_scripts/recipes/multi_node/qwen2.5-32b.toml")
SETTINGS = ["run.dir=runs/two words", "model.dtype=bfloat16"]


@pytest.mark.parametrize(
    ("nodes", "per_node", "device", "programs"),
    [
        (1, 1, "h200", ["mugrpo"]),
        (1, 4, "cpu", ["run_scripts/torchrun.sh 4"]),
        (1, 8, "h200", ["run_scripts/torchrun.sh 8", "sbatch --nodes 1 --gpus-per-node 8 run_scripts/slurm.sbatch"]),
        (
            4,
            8,
            "h100",
            [
                "run_scripts/torchrun.sh --nodes 4 --node K --master HOST 8",
                "sbatch --nodes 4 --gpus-per-node 8 run_scripts/slurm.sbatch",
            ],
        ),
    ],
)
def test_commands_are_for_the_cluster_and_train_the_planned_recipe(
    nodes: int, per_node: int, device: str, programs: list[str]
) -> None:
    commands = list(launch_commands(RECIPE, SETTINGS, make_cluster(nodes, per_node, device)).values())
    assert [command.partition(" train ")[0] for command in commands] == programs
    for command in commands:
        words = shlex.split(command)
        options = command_parser().parse_args(words[words.index("train") :])
        assert load_recipe(options.recipe, options.overrides) == load_recipe(RECIPE, SETTINGS)


def test_the_scripts_have_these_options() -> None:
    torchrun = Path(ROOT, "run_scripts/torchrun.sh").read_text()
    batch = Path(ROOT, "run_scripts/slurm.sbatch").read_text()
    assert all(f"    {option}) " in torchrun for option in ("--nodes", "--node", "--master"))
    assert {"nodes", "gpus-per-node"} <= set(re.findall(r"^#SBATCH --([\w-]+)", batch, re.MULTILINE))
