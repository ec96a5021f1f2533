"""The bundled recipes: each resolves, and each has a plan on the machines that it names."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mugrpo_megatron.cli import main
from mugrpo_megatron.recipe import load_recipe
from tests.checkout import ROOT

RECIPES = Path(ROOT, "run_scripts/recipes")
PAPER = RECIPES / "paper"
MODELS = {
    "llama-3.2-3b-instruct": "Llama-3.2-3B-Instruct",
    "qwen2.5-math-7b": "Qwen2.5-Math-7B",
    "qwen3-1.7b-base": "Qwen3-1.7B-Base",
    "qwen3-8b-base": "Qwen3-8B-Base",
    "deepseek-r1-distill-qwen-7b": "DeepSeek-R1-Distill-Qwen-7B",
}
"""Models of the paper's Table 1: file name -> name on the hub."""
STRICT, RELAXED, NEVER = (0.8, 1.2), (0.0, 5.0), (0.0, 1e9)
METHODS = {
    "grpo": ("grpo", STRICT, "none", 1024, 4),
    "grpo_mu1024": ("grpo", STRICT, "none", 4, 1024),
    "relaxed": ("mu_grpo", RELAXED, "none", 4, 1024),
    "mu_grpo": ("mu_grpo", RELAXED, "suffix_non_trigger", 4, 1024),
    "mu_grpo_dual_clip": ("mu_grpo", RELAXED, "suffix_non_trigger", 4, 1024),
    "m2po": ("m2po", NEVER, "none", 4, 1024),
    "trigger": ("mu_grpo", RELAXED, "trigger", 4, 1024),
    "suffix": ("mu_grpo", RELAXED, "suffix", 4, 1024),
    "response": ("mu_grpo", RELAXED, "response", 4, 1024),
}
"""File name -> objective, clip range (M2PO has its own), veto, S, µ."""
RUNS = [(model, method) for model in MODELS for method in METHODS]
ABOUT_THE_METHOD = {"name", "clip_low", "clip_high", "veto", "dual_clip", "second_moment"}
"""Keys of the objective in which runs of a model may differ."""
MULTI_NODE = {"qwen2.5-32b": (2, 4, 16), "llama-3.3-70b": (4, 8, 16), "qwen3-30b-a3b": (2, 4), "qwen3-8b-long": (2, 4)}
"""Recipe -> numbers of nodes of 8 that it says it runs on."""


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(arguments)
    said = capsys.readouterr()
    return code, said.out, said.err


COMPOSED = {
    PAPER / f"{model}.{method}.toml" for model, method in RUNS if method != "mu_grpo" and model != "qwen3-1.7b-base"
}
"""Made of parts that other runs are made of; each is resolved below."""


def every_recipe() -> Iterator[Any]:
    """A dry run of programs starts one, so it is no quick test."""
    for path in sorted({*RECIPES.rglob("*.toml")} - COMPOSED):
        yield pytest.param(path, marks=[pytest.mark.process] if path.stem == "agent" else [], id=str(path))


@pytest.mark.parametrize("path", every_recipe())
def test_every_recipe_resolves(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And what differs from the defaults is the same recipe."""
    # A part of a recipe names no model: its default, the warm start, is here or not, and is too small for most of them.
    part = "path" not in tomllib.loads(path.read_text(encoding="utf-8")).get("model", {})
    overrides = ["model.path=models/absent"] if part else []
    # Its problems need a package that is not installed everywhere.
    overrides += ["data.train=arithmetic", "data.eval=arithmetic"] if path.stem == "real_model" else []
    code, printed, _ = run(["train", str(path), "--dry-run", *(f"--set={text}" for text in overrides)], capsys)
    assert code == 0
    (tmp_path / "differs.toml").write_text(printed, encoding="utf-8")
    assert load_recipe(tmp_path / "differs.toml") == load_recipe(path, overrides)


def test_the_papers_recipes_are_all_models_with_all_methods() -> None:
    """One file per run, which names its model and its method and nothing else."""
    for model, method in RUNS:
        expected = (
            f'base = ["common.toml", "models/{model}.toml", "methods/{method}.toml"]\n'
            f'run.dir = "runs/paper/{model}.{method}"\n'
        )
        assert (PAPER / f"{model}.{method}.toml").read_text(encoding="utf-8") == expected
    found = {path.name for path in PAPER.glob("*.toml")} - {"common.toml", "evaluation.toml"}
    assert found == {f"{model}.{method}.toml" for model, method in RUNS}


@pytest.mark.parametrize(("model", "method"), RUNS)
def test_what_the_papers_recipes_resolve_to(model: str, method: str) -> None:
    recipe = load_recipe(PAPER / f"{model}.{method}.toml")
    objective, schedule = recipe.objective, recipe.schedule
    clip = (objective.clip_low, objective.clip_high)
    found = (objective.name, clip, objective.veto, schedule.stages, schedule.updates_per_stage)
    assert found == METHODS[method]
    assert objective.trigger_ratio == 1e-4
    assert recipe.model.path.name == MODELS[model]
    assert (objective.advantage, objective.reduction) == ("group_std", "token_mean")
    assert objective.dual_clip == (3.0 if method == "mu_grpo_dual_clip" else None)
    assert objective.second_moment == ("clip" if method == "m2po" else "none")


@pytest.mark.parametrize("model", MODELS)
def test_the_papers_runs_of_a_model_differ_in_method_alone(model: str) -> None:
    runs = {method: load_recipe(PAPER / f"{model}.{method}.toml").model_dump() for method in METHODS}
    first = runs["mu_grpo"]
    for run in runs.values():
        for section in set(first) - {"run", "schedule", "objective", "eval", "checkpoint"}:
            assert run[section] == first[section]
        assert {key for key, value in run["objective"].items() if value != first["objective"][key]} <= ABOUT_THE_METHOD
    assert len({run["run"]["dir"] for run in runs.values()}) == len(METHODS)


@pytest.mark.parametrize("model", MODELS)
def test_the_papers_runs_are_evaluated_as_table_1_is_and_at_the_same_updates(model: str) -> None:
    for method in METHODS:
        recipe = load_recipe(PAPER / f"{model}.{method}.toml")
        samples = {name: recipe.eval.of(name).samples for name in recipe.data.eval.split(",")}
        assert samples == {"amc23": 32, "amc24": 32, "aime24": 32, "aime25": 32, "math500": 4}
        stages, updates = recipe.schedule.stages, recipe.schedule.updates_per_stage
        before = {stage * updates for stage in range(1, stages) if stage % recipe.eval.every_stages == 0}
        ages = [age for age in range(1, updates) if age % recipe.eval.every_updates == 0]
        assert before | {stage * updates + age for stage in range(stages) for age in ages} == set(range(256, 4096, 256))


LABELLED = [
    PAPER / "common.toml",
    PAPER / "evaluation.toml",
    *(PAPER / "models").glob("*.toml"),
    RECIPES / "off_policy_grpo" / "common.toml",
]


@pytest.mark.parametrize("path", LABELLED, ids=lambda path: path.name)
def test_every_value_says_whose_it_is(path: Path) -> None:
    keys = [line for line in path.read_text(encoding="utf-8").splitlines() if re.match(r"\w+ = ", line)]
    assert keys
    for line in keys:
        assert line.startswith(("path = ", "base = ")) or re.search("# (our choice|the paper's|inferred)", line), line


def test_off_policy_grpo_is_v_iterations_a_stage_under_a_clip_that_binds() -> None:
    on, off, unclipped = (
        load_recipe(RECIPES / "off_policy_grpo" / f"{name}.toml")
        for name in ("on_policy", "off_policy", "off_policy_unclipped")
    )
    iterations = [one.schedule.updates_per_stage // one.objective.proximal_every for one in (on, off, unclipped)]
    assert iterations == [1, 8, 8]
    assert len({one.schedule.stages * one.schedule.updates_per_stage for one in (on, off, unclipped)}) == 1
    assert on.objective == off.objective
    assert (off.objective.clip_centre, off.objective.zero_variance) == ("proximal_shifted", "mask")
    assert (off.objective.clip_low, off.objective.clip_high) == STRICT
    assert (unclipped.objective.clip_low, unclipped.objective.clip_high) == NEVER
    assert on.objective.proximal_every > 1


@pytest.mark.parametrize("model", MODELS)
def test_the_papers_runs_fit_four_h200(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = PAPER / f"{model}.mu_grpo.toml"
    code, printed, said = run(["plan", str(path), "--gpus-per-node", "4", "--json"], capsys)
    assert code == 0, said
    plan = json.loads(printed)
    updates = {one["stages"] * one["updates_per_stage"] for one in plan["schedules"]}
    assert updates == {4096}
    assert plan["memory"]["learn"] < plan["memory"]["device"]
    assert all(one["problems"] or one["seconds"] > 0 for one in plan["layouts"])


@pytest.mark.parametrize(
    ("name", "device"),
    [("24gb", "rtx4090"), ("24gb-lora", "rtx4090"), ("80gb", "h100"), ("80gb-lora", "h100"), ("80gb-grpo", "h100")],
)
def test_the_recipes_for_one_gpu_fit_it(name: str, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = RECIPES / "one_gpu" / f"{name}.toml"
    code, printed, said = run(["plan", str(path), "--gpus-per-node", "1", "--gpu", device, "--json"], capsys)
    assert code == 0, said
    memory = json.loads(printed)["memory"]
    assert memory["learn"] < 0.92 * memory["device"]
    assert load_recipe(path).data.train == "gsm8k"


@pytest.mark.parametrize(
    "name",
    [
        "one_gpu/24gb",
        "one_gpu/24gb-lora",
        "one_gpu/80gb",
        "one_gpu/80gb-lora",
        *(f"multi_node/{n}" for n in MULTI_NODE),
    ],
)
def test_our_recipes_for_gpus_take_stages_of_16_with_grpos_clip(name: str) -> None:
    """docs/when.md: stages of 16 updates with GRPO's clip."""
    recipe = load_recipe(RECIPES / f"{name}.toml")
    assert recipe.schedule.updates_per_stage == 16
    assert (recipe.objective.clip_low, recipe.objective.clip_high, recipe.objective.veto) == (*STRICT, "none")


def test_the_matched_recipe_differs_from_its_base_in_the_schedule_alone() -> None:
    ours, grpo = (load_recipe(RECIPES / f"one_gpu/{name}.toml").model_dump() for name in ("80gb", "80gb-grpo-matched"))
    assert {key for key in ours if ours[key] != grpo[key]} == {"run", "schedule", "eval", "checkpoint"}
    for part in ("eval", "checkpoint"):
        assert {key for key in ours[part] if ours[part][key] != grpo[part][key]} == {"every_stages"}
        assert 16 * ours[part]["every_stages"] == 4 * grpo[part]["every_stages"]


@pytest.mark.parametrize(("name", "nodes"), [(name, n) for name, each in MULTI_NODE.items() for n in each])
def test_multi_node_recipes_fit_the_nodes_they_name(name: str, nodes: int, capsys: pytest.CaptureFixture[str]) -> None:
    path = RECIPES / "multi_node" / f"{name}.toml"
    code, printed, said = run(["plan", str(path), "--nodes", str(nodes), "--json"], capsys)
    assert code == 0, said
    assert json.loads(printed)["cluster"]["nodes"] == nodes


@pytest.mark.parametrize(
    ("recipe", "options", "said"),
    [
        ("multi_node/llama-3.3-70b.toml", ["--nodes", "1"], "needs a multiple of 32 ranks but 8 run"),
        (
            "multi_node/llama-3.3-70b.toml",
            ["--nodes", "1"],
            "; or use more devices: 16 fit (--nodes 2 --gpus-per-node 8) as ",
        ),
        (
            "paper/qwen2.5-math-7b.grpo.toml",
            ["--gpus-per-node", "1"],
            "does not fit: the learner phase needs",
        ),
        (
            "paper/qwen2.5-math-7b.grpo.toml",
            ["--gpus-per-node", "4", "--set", "learner.micro_batch_tokens=16384"],
            "what fits is",
        ),
        ("paper/qwen2.5-math-7b.grpo.toml", ["--gpus-per-node", "6"], "does not divide over 6 data parallel ranks"),
        ("paper/qwen2.5-math-7b.grpo.toml", ["--set", "engine.tensor=16"], "engine.tensor = 16 does not divide"),
        ("paper/qwen2.5-math-7b.grpo.toml", ["--set", "parallel.tensor=8"], "the model's 28 attention heads"),
        ("paper/qwen2.5-math-7b.grpo.toml", ["--set", "rollout.max_response_tokens=8192"], "4096 positions"),
        ("paper/qwen2.5-math-7b.grpo.toml", ["--set", "parallel.expert=2"], "the model has no experts"),
        ("multi_node/qwen3-30b-a3b.toml", ["--set", "model.path=models/nobody"], "none of the bundled shapes"),
        ("paper/qwen2.5-math-7b.grpo.toml", ["--gpu", "tpu"], "choose one of h200"),
        ("paper/qwen2.5-math-7b.grpo.toml", ["--nodes", "0"], "takes 1 to 100,000"),
        ("paper/qwen2.5-math-7b.grpo.toml", ["--assume", "mfoo=1"], "names are"),
        ("paper/qwen2.5-math-7b.grpo.toml", ["--assume", "mfu=high"], "'high' is not a number"),
        ("paper/qwen2.5-math-7b.grpo.toml", ["--assume", "mfu=0"], "takes a number from 1e-09 to 1"),
    ],
)
def test_an_impossible_plan_is_refused_with_the_way_out(
    recipe: str, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed, error = run(["plan", str(RECIPES / recipe), *options], capsys)
    assert (code, printed) == (2, "")
    assert said in error
    assert error.count("\n") == 1


def test_assumptions_and_a_config_of_ones_own_change_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(RECIPES / "paper" / "qwen3-1.7b-base.mu_grpo.toml")

    def plan(*options: str) -> dict:
        code, printed, said = run(["plan", path, "--gpus-per-node", "4", "--json", *options], capsys)
        assert code == 0, said
        return json.loads(printed)

    plain, faster = plan(), plan("--assume", "mfu=0.8")
    assert faster["stage_seconds"]["optimize"] < 0.6 * plain["stage_seconds"]["optimize"]
    config = tmp_path / "config.json"
    config.write_text(json.dumps(plain["model"]["config"] | {"num_hidden_layers": 14}), encoding="utf-8")
    half = plan("--model-config", str(config))
    weights = [one["memory"]["learning"]["state"]["weights"] for one in (half, plain)]
    assert weights[0] < weights[1]
