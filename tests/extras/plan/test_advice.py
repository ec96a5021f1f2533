"""What a plan advises where nothing fits, and where hardly anything is left: the advice, followed, is right."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.plan.case import find_model, make_case
from mugrpo_megatron.extras.plan.hardware import GIB, Assumptions, make_cluster
from mugrpo_megatron.extras.plan.memory import engine_memory, memory
from mugrpo_megatron.extras.plan.plan import make_plan, plan_as_dict
from mugrpo_megatron.extras.plan.printing import print_plan
from mugrpo_megatron.extras.plan.search import TIGHT, Roomier, roomier
from mugrpo_megatron.recipe import Recipe, load_recipe
from tests.checkout import ROOT

RECIPES = Path(ROOT, "run_scripts/recipes")
LARGE = RECIPES / "multi_node/llama-3.3-70b.toml"


def advised(recipe: Recipe, cluster: tuple[int, int, str]) -> tuple[list[str], tuple[int, int, str], list[str]]:
    """What the refusal of a plan says: settings with adapters, the number of devices, and the settings there."""
    with pytest.raises(UserError) as refused:
        make_plan(recipe, *cluster)
    adapters, _, rest = str(refused.value).partition("train adapters")[2].partition("; or use more devices: ")
    words = rest.partition("; or take a smaller model")[0]
    found = re.match(r"([0-9]+) fit \(--nodes ([0-9]+) --gpus-per-node ([0-9]+)\) as ", words)
    assert found
    count, nodes, per_node = map(int, found.groups())
    assert count == nodes * per_node
    settings = [re.findall(r"--set (\S+?)(?=\s|\Z)", one) for one in (adapters, words)]
    return settings[0], (nodes, per_node, cluster[2]), settings[1]


@pytest.mark.parametrize(
    ("path", "overrides", "cluster"),
    [
        (RECIPES / "one_gpu/80gb.toml", ["model.path=Qwen/Qwen2.5-7B-Instruct"], (1, 1, "h100")),
        (LARGE, [], (1, 8, "h100")),
    ],
)
def test_a_refusal_names_adapters_and_the_fewest_devices(
    path: Path, overrides: list[str], cluster: tuple[int, int, str]
) -> None:
    adapters, larger, settings = advised(load_recipe(path, overrides), cluster)
    assert "lora.rank=32" in adapters
    assert make_plan(load_recipe(path, [*overrides, *adapters]), *cluster).memory.fits
    assert make_plan(load_recipe(path, [*overrides, *settings]), *larger).memory.fits
    nodes, per_node, device = larger
    half = (nodes // 2, per_node) if nodes > 1 else (1, per_node // 2)
    with pytest.raises(UserError, match="no layout, recomputation"):
        make_plan(load_recipe(path, [*overrides, *settings]), *half, device)


def test_adapters_are_not_advised_where_the_family_takes_none_or_the_recipe_has_them() -> None:
    for overrides in (["model.path=zai-org/GLM-4.7-Flash"], ["model.path=Qwen/Qwen3-32B", "lora.rank=8"]):
        with pytest.raises(UserError, match="; or take a smaller model") as refused:
            make_plan(load_recipe(RECIPES / "one_gpu/80gb.toml", overrides), 1, 1, "h100")
        assert "adapters" not in str(refused.value)


@given(st.floats(0.9, 1.0), st.sampled_from(["Qwen2.5-0.5B-Instruct", "Qwen2.5-1.5B-Instruct"]))
@examples(max_examples=4)
def test_a_tight_plan_names_a_setting_with_room(share: float, name: str) -> None:
    recipe = load_recipe(RECIPES / "one_gpu/80gb.toml", [f"model.path=Qwen/{name}"])
    found = find_model(recipe.model)
    cluster = make_cluster(1, 1, "h100")
    case = make_case(recipe, found.architecture, found.config, cluster, Assumptions())
    peak = max(memory(case, engine_memory(case)).phases.values())
    case = replace(case, cluster=replace(cluster, device=replace(cluster.device, memory=int(peak / share))))
    room = roomier(case)
    if room is None:
        return
    again = load_recipe(
        RECIPES / "one_gpu/80gb.toml", [f"model.path=Qwen/{name}", *room.keys.replace("--set ", "").split()]
    )
    need = memory(case.with_recipe(again), engine_memory(case.with_recipe(again)))
    assert max(need.phases.values()) == room.peak <= TIGHT * need.device


def test_a_plan_that_takes_the_whole_device_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(load_recipe(RECIPES / "one_gpu/80gb.toml"), 1, 1, "h100")
    peak = max(plan.memory.phases.values())
    for share, way in ((0.94, None), (0.97, Roomier("--set learner.recompute=full", 7 * GIB)), (0.99, None)):
        near = replace(plan, memory=replace(plan.memory, device=int(peak / share)), roomier=way)
        print_plan(near, {})
        said = " ".join(capsys.readouterr().out.split()).partition("binds: ")[0]
        assert near.tight == plan_as_dict(near, {})["tight"] == ("tight: " in said) == (share > 0.95)
        if way:
            assert "tight: 97 % of the device" in said
            assert "--set learner.recompute=full needs 7 takes: " in said
