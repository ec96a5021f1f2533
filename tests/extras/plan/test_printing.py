"""What a plan prints: two digits, whatever the size, and commands that the scripts take."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.cli import command_parser
from mugrpo_megatron.extras.plan.hardware import make_cluster
from mugrpo_megatron.extras.plan.printing import about, launch_commands, two_digits
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


@given(st.floats(1e-9, 1e12))
def test_two_digits_are_within_half_a_step_of_the_value(value: float) -> None:
    said = two_digits(value)
    assert float(said.replace(",", "")) == pytest.approx(value, rel=0.0501)
    assert len(said.replace(",", "").replace(".", "").strip("0")) <= 2


def test_examples() -> None:
    values = {0: "0", 0.00412: "0.0041", 0.996: "1.0", 9.26: "9.3", 9.99: "10", 156.2: "160", 9_212: "9,200"}
    assert {value: two_digits(value) for value in values} == values
    times = {0: "0 s", 0.71: "0.71 s", 28.2: "28 s", 558: "9.3 min", 133_620: "37 h"}
    assert {seconds: about(seconds) for seconds in times} == times
