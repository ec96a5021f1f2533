"""Figures of README and of the paper's page that other pages hold: planned hours, times against TRL; the loop."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from mugrpo_megatron.extras.plan.plan import make_plan
from mugrpo_megatron.recipe import load_recipe
from run_scripts.dev import real_model_picture
from tests.checkout import ROOT, text_of

README = text_of("README.md")
PAPER = text_of("docs/paper.md")
PLAN, PERFORMANCE = (Path(ROOT, f"docs/{name}.md").read_text(encoding="utf-8") for name in ("plan", "performance"))


def cells(page: str, *words: str) -> list[str]:
    """The cells of the one line of a table that begins with these cells."""
    (line,) = [line for line in page.splitlines() if line.startswith("| " + " | ".join(words) + " |")]
    return [cell.strip() for cell in line.strip("| ").split(" | ")]


def planned_hours() -> tuple[float, float]:
    """Hours of mu-GRPO's and of GRPO's schedule that `mugrpo plan` prints for README's 7B model: every phase counts."""
    recipe = load_recipe(Path(ROOT, "run_scripts/recipes/paper/qwen2.5-math-7b.mu_grpo.toml"))
    _, grpo, mu = make_plan(recipe, nodes=1, per_node=4, device="h200").schedules
    return mu.total / 3600, grpo.total / 3600


def test_the_hours_and_the_memory_of_7b_are_the_plans() -> None:
    mu, grpo = planned_hours()
    _, _, _, engine, host, _, checkpoint, kept = cells(PLAN, "qwen2.5-math-7b", "DP4")
    assert f"{mu:.0f} hours, {engine} of 139 GiB per GPU, {host} GiB of host memory" in PAPER
    assert f"GRPO's schedule takes {grpo:.0f} hours in the same plan" in PAPER
    assert f"and {kept} of disk for all 16 checkpoints" in PAPER
    assert f"needs {2 * float(checkpoint.split()[0]) / 1000:.1f} TB" in PAPER
    mean = cells(PLAN, "mean")
    assert f"the plan says {mean[4]} times as long, on average" in README


def against_trl() -> list[list[str]]:
    """The cells of the table against TRL: task, machine, seconds of TRL, of our GRPO and of our mu-GRPO, ratio."""
    return [line.strip("| ").split(" | ") for line in PERFORMANCE.splitlines() if re.search(r"\| (Xeon|EPYC) \|", line)]


def test_the_times_against_trl_are_those_of_the_table() -> None:
    rows = against_trl()
    ratios = [float(trl) / float(ours) for _, _, trl, ours, *_ in rows]
    assert [float(row[-1]) for row in rows] == pytest.approx(ratios, abs=0.05)
    *longer, short = ratios
    assert f"{min(longer):.1f} to {max(longer):.1f} times as long as our GRPO" in README
    assert f"{short:.2f} times on answers of five" in README


def test_what_a_switch_costs_is_that_of_the_table() -> None:
    slowest = min(float(grpo) / float(mu) for *_, grpo, mu, _ in against_trl() if mu != "–")
    sleeps = f"{slowest:.2f} to {cells(PERFORMANCE, 'sleeps (the default)')[-1]} times as long if SGLang sleeps"
    restarts = cells(PERFORMANCE, "is stopped and started")[-1]
    assert f"GRPO takes {sleeps} while the model trains, and {restarts} times if SGLang is stopped" in README


def test_the_picture_of_the_real_model_is_that_of_its_cells(tmp_path: Path) -> None:
    drawn = real_model_picture.draw(real_model_picture.read_rows(), tmp_path / "picture.svg")
    assert drawn.read_text(encoding="utf-8") == real_model_picture.PICTURE.read_text(encoding="utf-8")


def test_the_loop_on_the_pages_is_train_py_without_its_docstrings() -> None:
    source = Path(ROOT, "mugrpo_megatron/train.py").read_text(encoding="utf-8")
    functions = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
            docstring = node.body[0]
            del lines[docstring.lineno - node.lineno : (docstring.end_lineno or 0) - node.lineno + 1]
            functions.append("\n".join(lines))
    for file, name, shown in (("docs/architecture.md", "train.py", functions), ("README.md", "train", functions[:1])):
        page = Path(ROOT, file).read_text(encoding="utf-8")
        block = page.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- /{name} -->")[0]
        assert block == "```python\n{}\n```\n".format("\n\n\n".join(shown))
