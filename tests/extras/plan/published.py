"""The paper's hours (Table 1 of arXiv 2605.17570, on its project page) and the plan's for the same runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from mugrpo_megatron.extras.plan.case import PlanCase, find_model, make_case
from mugrpo_megatron.extras.plan.hardware import GIB, Assumptions, Cluster, make_cluster
from mugrpo_megatron.extras.plan.memory import engine_memory, memory
from mugrpo_megatron.extras.plan.time import checkpoint_bytes, phases
from mugrpo_megatron.recipe import load_recipe
from tests.checkout import ROOT

RECIPES = Path(ROOT, "run_scripts/recipes/paper")


@dataclass(frozen=True, slots=True)
class Hours:
    """Of one run on 4 H200."""

    rollout: float
    """T_rollout."""
    total: float
    """T_total."""

    def over(self, other: Hours) -> Hours:
        """Ratio of each figure."""
        return Hours(self.rollout / other.rollout, self.total / other.total)


ROLLOUT = ("switch", "sync", "generate", "score")
"""The plan's phases in T_rollout, as summary.json counts a run's."""
TRAINING = ("logprobs", "optimize")
"""Further phases in T_total; evaluations and saves are in neither. The page does not say what its hours include."""
METHODS = {"grpo": "GRPO, µ=4", "grpo_mu1024": "GRPO, µ=1024", "m2po": "M2PO", "mu_grpo": "mu-GRPO"}
PUBLISHED = {
    "llama-3.2-3b-instruct": ((15.1, 22.7), (13.2, 19.3), (15.3, 21.3), (12.7, 18.6)),
    "qwen2.5-math-7b": ((8.8, 23.7), (3.8, 17.9), (6.7, 20.2), (4.7, 18.1)),
    "qwen3-1.7b-base": ((11.2, 20.5), (6.5, 13.3), (12.9, 24.2), (5.2, 12.4)),
    "qwen3-8b-base": ((21.3, 58.2), (7.4, 23.6), (23.2, 49.7), (7.9, 25.9)),
    "deepseek-r1-distill-qwen-7b": ((26.0, 61.9), (22.3, 54.5), (27.9, 68.3), (21.4, 51.3)),
}
FITTED = {
    "llama-3.2-3b-instruct": 0.66,
    "qwen2.5-math-7b": 0.375,
    "qwen3-1.7b-base": 0.37,
    "qwen3-8b-base": 0.36,
    "deepseek-r1-distill-qwen-7b": 0.415,
}
"""Mean response as a share of the recipe's limit with which the plan has the paper's T_rollout of mu-GRPO."""


def published(model: str, method: str) -> Hours:
    """Table 1's."""
    return Hours(*PUBLISHED[model][list(METHODS).index(method)])


def bundled_case(model: str, method: str, assumptions: Assumptions | None = None) -> PlanCase:
    """The bundled recipe on 1 x 4 H200."""
    return case_of(RECIPES / f"{model}.{method}.toml", make_cluster(1, 4, "h200"), assumptions)


def case_of(path: Path, cluster: Cluster, assumptions: Assumptions | None = None) -> PlanCase:
    """The case of a recipe's file."""
    recipe = load_recipe(path)
    found = find_model(recipe.model)
    return make_case(recipe, found.architecture, found.config, cluster, assumptions or Assumptions())


def planned(model: str, method: str, assumptions: Assumptions | None = None) -> Hours:
    """The plan's."""
    case = bundled_case(model, method, assumptions)
    seconds = asdict(phases(case, memory(case, engine_memory(case))))
    hours = case.recipe.schedule.stages / 3600
    rollout, training = (hours * sum(seconds[name] for name in names) for names in (ROLLOUT, TRAINING))
    return Hours(rollout, rollout + training)


def fitted(model: str, method: str) -> Hours:
    """The plan's, with the model's fitted length."""
    return planned(model, method, Assumptions(mean_response=FITTED[model]))


def hours_row(model: str, method: str) -> str:
    """docs/plan.md's row of a run as shipped."""
    paper, plan = published(model, method), planned(model, method)
    return (
        f"| {model} | {METHODS[method]} | {paper.rollout:.1f} | {plan.rollout:.1f} "
        f"| {paper.total:.1f} | {plan.total:.1f} |"
    )


def speedup_row() -> str:
    """docs/plan.md's row of GRPO's hours over mu-GRPO's, the mean over the models."""
    pairs = [
        [hours(model, "grpo").over(hours(model, "mu_grpo")) for model in PUBLISHED] for hours in (published, planned)
    ]
    paper, plan = (Hours(mean(hours.rollout for hours in rows), mean(hours.total for hours in rows)) for rows in pairs)
    return f"| mean | {paper.rollout:.2f} | {plan.rollout:.2f} | {paper.total:.2f} | {plan.total:.2f} |"


def memory_row(model: str) -> str:
    """docs/plan.md's row of what a model needs."""
    case = bundled_case(model, "mu_grpo")
    need, saved = memory(case, engine_memory(case)), checkpoint_bytes(case)
    kept = case.recipe.checkpoint.keep * saved / 1e12
    return (
        f"| {model} | {case.layout} | {need.learn / GIB:.0f} | {need.generate / GIB:.0f} | {need.host / GIB:.0f} "
        f"| {need.serving.tokens / 1e6:.1f} M | {saved / 1e9:.0f} GB | {kept:.1f} TB |"
    )


def tables() -> str:
    """The rows on the paper's runs; docs/plan.md has those of GRPO and mu-GRPO, memory and speedups."""
    runs = [hours_row(model, method) for model in PUBLISHED for method in METHODS]
    memories = [memory_row(model) for model in PUBLISHED]
    return "\n\n".join("\n".join(rows) for rows in (memories, runs, [speedup_row()]))


if __name__ == "__main__":
    print(tables())
