"""The bundled recipes: each resolves, and each has a plan on the machines that it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mugrpo_megatron.cli import main
from mugrpo_megatron.data.presets import PRESETS
from mugrpo_megatron.data.prompts import STYLES
from mugrpo_megatron.recipe import Recipe, load_recipe

RECIPES = Path("run_scripts/recipes")
PAPER = sorted((RECIPES / "paper").glob("*.toml"))
PAPER_RUNS = [path for path in PAPER if path.name != "common.toml"]
MULTI_NODE = {"qwen2.5-32b": (2, 4, 16), "llama-3.3-70b": (4, 8, 16), "qwen3-30b-a3b": (2, 4)}
"""Recipe -> numbers of nodes of 8 that it says it runs on."""


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(arguments)
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.toml")), ids=str)
def test_every_recipe_resolves(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, _ = run(["train", str(path), "--dry-run"], capsys)
    assert code == 0
    assert "[schedule]" in printed


@pytest.mark.parametrize("path", PAPER_RUNS, ids=lambda path: path.name)
def test_the_papers_runs_fit_four_h200(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, said = run(["plan", str(path), "--gpus-per-node", "4", "--json"], capsys)
    assert code == 0, said
    plan = json.loads(printed)
    updates = {one["stages"] * one["updates_per_stage"] for one in plan["schedules"]}
    assert updates == {4096}
    assert plan["memory"]["learn"] < plan["memory"]["device"]
    assert all(one["problems"] or one["seconds"] > 0 for one in plan["layouts"])


def test_the_papers_runs_of_a_model_differ_in_method_alone() -> None:
    models = {path.name.rsplit(".", 2)[0] for path in PAPER_RUNS}
    assert len(models) == 5
    for model in models:
        grpo, mu, m2po = (
            load_recipe(RECIPES / "paper" / f"{model}.{method}.toml") for method in ("grpo", "mu_grpo", "m2po")
        )
        assert (grpo.schedule.stages, grpo.schedule.updates_per_stage) == (1024, 4)
        assert (mu.schedule.stages, mu.schedule.updates_per_stage) == (4, 1024)
        assert mu.schedule == m2po.schedule
        assert [one.objective.name for one in (grpo, mu, m2po)] == ["grpo", "mu_grpo", "m2po"]
        assert (grpo.objective.clip_low, grpo.objective.clip_high) == (0.8, 1.2)
        assert (mu.objective.clip_low, mu.objective.clip_high, mu.objective.veto) == (0, 5, "suffix_non_trigger")
        for section in ("model", "data", "rollout", "optimizer", "parallel", "learner", "engine", "reward"):
            assert getattr(grpo, section) == getattr(mu, section) == getattr(m2po, section)
        assert len({one.run.dir for one in (grpo, mu, m2po)}) == 3


@pytest.mark.parametrize(("name", "nodes"), [(name, n) for name, each in MULTI_NODE.items() for n in each])
def test_multi_node_recipes_fit_the_nodes_they_name(name: str, nodes: int, capsys: pytest.CaptureFixture[str]) -> None:
    path = RECIPES / "multi_node" / f"{name}.toml"
    code, printed, said = run(["plan", str(path), "--nodes", str(nodes), "--json"], capsys)
    assert code == 0, said
    assert json.loads(printed)["cluster"]["nodes"] == nodes


@pytest.mark.parametrize("path", [*PAPER_RUNS, *(RECIPES / "multi_node").glob("*.toml")], ids=lambda path: path.name)
def test_data_sets_and_prompt_styles_have_these_names(path: Path) -> None:
    recipe: Recipe = load_recipe(path)
    assert set(recipe.data.train.split(",")) | set(recipe.data.eval.split(",")) <= set(PRESETS)
    assert recipe.data.prompt_style in {"chat", *STYLES}


@pytest.mark.parametrize(
    ("recipe", "options", "said"),
    [
        ("multi_node/llama-3.3-70b.toml", ["--nodes", "1"], "needs a multiple of 32 ranks but 8 run"),
        ("multi_node/llama-3.3-70b.toml", ["--nodes", "1"], "nearest layout that 8 ranks can run: tensor = "),
        (
            "paper/qwen2.5-math-7b.grpo.toml",
            ["--gpus-per-node", "1", "--set", "parallel.tensor=1", "--set", "parallel.sequence=false"],
            "does not fit: the learner phase needs",
        ),
        (
            "paper/qwen2.5-math-7b.grpo.toml",
            ["--gpus-per-node", "4", "--set", "parallel.tensor=1", "--set", "parallel.sequence=false"],
            "the nearest layout that fits is",
        ),
        ("paper/qwen2.5-math-7b.grpo.toml", ["--gpus-per-node", "6"], "does not divide over 3 data parallel ranks"),
        ("paper/qwen2.5-math-7b.grpo.toml", ["--set", "engine.tensor=16"], "engine.tensor = 16 does not divide"),
        ("paper/qwen2.5-math-7b.grpo.toml", ["--set", "parallel.tensor=8"], "the model's 28 attention heads"),
        ("paper/qwen2.5-math-7b.grpo.toml", ["--set", "rollout.max_response_tokens=8192"], "4096 positions"),
        ("paper/qwen2.5-math-7b.grpo.toml", ["--set", "parallel.expert=2"], "the model has no experts"),
        ("multi_node/qwen3-30b-a3b.toml", ["--set", "parallel.sequence=false"], "needs parallel.sequence = true"),
        ("multi_node/qwen3-30b-a3b.toml", ["--set", "model.path=models/nobody"], "none of the bundled shapes"),
        ("paper/qwen2.5-math-7b.grpo.toml", ["--gpu", "tpu"], "known are h200"),
        ("paper/qwen2.5-math-7b.grpo.toml", ["--nodes", "0"], "both are at least 1"),
        ("paper/qwen2.5-math-7b.grpo.toml", ["--assume", "mfoo=1"], "names are"),
        ("paper/qwen2.5-math-7b.grpo.toml", ["--assume", "mfu=high"], "'high' is no number"),
        ("paper/qwen2.5-math-7b.grpo.toml", ["--assume", "mfu=0"], "has to be above 0"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(
    recipe: str, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed, error = run(["plan", str(RECIPES / recipe), *options], capsys)
    assert (code, printed) == (2, "")
    assert said in error
    assert error.count("\n") == 1


def test_the_layout_that_a_refusal_names_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(RECIPES / "paper" / "qwen2.5-math-7b.mu_grpo.toml")
    wrong = ["--set", "parallel.tensor=1", "--set", "parallel.sequence=false"]
    _, _, error = run(["plan", path, "--gpus-per-node", "4", *wrong], capsys)
    named = error.strip().rpartition(": ")[2].split()
    assert named[0] == "--set"
    code, printed, _ = run(["plan", path, "--gpus-per-node", "4", *wrong, *named], capsys)
    assert code == 0
    assert "learner at work" in printed


def test_assumptions_and_a_config_of_ones_own_change_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(RECIPES / "paper" / "qwen2.5-math-1.5b.mu_grpo.toml")

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
