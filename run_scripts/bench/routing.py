"""How many tokens a moving router sends elsewhere during a stage, and what that does to the ratios: CSV and picture.

    python -m run_scripts.bench.routing OUT_DIR [--updates 32] [--lr 3e-5]

It makes a random mixture of experts with the bundled tokenizer, lets `mugrpo train` generate a stage with it and take
that stage's updates with `learner.routing_replay = "learner"`, and branches that run without replay. Then it takes the
same updates on the same responses twice in this process, with replay and without, and after some of them lets the
routers choose for the first update's tokens: OUT_DIR/routing-replay.csv, OUT_DIR/routing-replay.svg.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from mugrpo_megatron.algorithm.advantages import group_advantages
from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer
from mugrpo_megatron.learner.groups import shutdown
from mugrpo_megatron.learner.learner import Learner, build_learner
from mugrpo_megatron.learner.update import record_routes, token_logprobs, update
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.stages.columns import LogprobColumn
from mugrpo_megatron.stages.manifest import of_stage
from mugrpo_megatron.stages.store import StageStore
from run_scripts.svg import LIGHT, write_svg

ROOT = Path(__file__).parents[2]
LAYERS, EXPERTS, CHOSEN = 4, 8, 2
NAMES = {True: "replay", False: "off"}
FIELDS = ("routing_replay", "updates", "tokens_flipped", "choices_flipped", "log_ratio_p50", "log_ratio_p99")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--updates", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model")
        runs = {replay: Path(folder) / NAMES[replay] for replay in (True, False)}
        for replay, run in runs.items():
            tables = sections(Path(folder), run, options.updates, options.lr, replay)
            recipe = Path(folder) / f"{NAMES[replay]}.toml"
            recipe.write_text(tomli_w.dumps(tables))
            command = ["train"] if replay else ["optimize", "--stage", "0", "--from", str(runs[True])]
            subprocess.run([sys.executable, "-m", "mugrpo_megatron", *command, str(recipe)], cwd=ROOT, check=True)
            print(NAMES[replay], summary(run))
        rows = [row for replay in (True, False) for row in arm(Path(folder), runs[True], options, replay)]
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "routing-replay.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, options.out / "routing-replay.svg")


def make_model(directory: Path) -> None:
    """A random Qwen3-MoE, its weights larger than usual, so that responses and routes are far from uniform."""
    tokenizer = build_arithmetic_tokenizer()
    torch.manual_seed(0)
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=LAYERS,
        **heads,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=True,
        max_position_embeddings=128,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.mul_(4.0)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def sections(folder: Path, run: Path, updates: int, lr: float, replay: bool) -> dict[str, dict[str, object]]:
    """A recipe of one stage of that many updates."""
    return {
        "run": {"dir": str(run)},
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"max_prompt_tokens": 32, "eval_problems": 16},
        "schedule": {"stages": 1, "updates_per_stage": updates},
        "rollout": {
            "prompts_per_update": 8,
            "responses_per_prompt": 8,
            "max_response_tokens": 24,
            "behaviour": "learner",
        },
        "objective": {"name": "mu_grpo"},
        "optimizer": {"lr": lr},
        "reward": {"function": "run_scripts.bench.routing_reward:share_of_small_digits"},
        "eval": {"max_tokens": 24},
        "learner": {"threads": 1, "routing_replay": "learner" if replay else "off"},
        "track": {"tensorboard": False},
    }


def summary(run: Path) -> str:
    """What the run's last update says."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if row["kind"] == "update"][-1]
    names = ("update", "reward_mean", "ratio_neg_min", "ratio_neg_max", "ess", "routes_flipped_tokens")
    return ", ".join(f"{name} {last[name]:.4g}" for name in names if last.get(name) is not None)


def arm(folder: Path, run: Path, options: argparse.Namespace, replay: bool) -> list[dict[str, object]]:
    """The stage's updates, with replay or without; the routers' own choices after 0, 1, 2, 4, ... of them."""
    learner = build_learner(Recipe.model_validate(sections(folder, run, options.updates, options.lr, True)))
    stage = StageStore(run / "stages" / "00000", replay="learner")
    probe = _stored(stage, 0)
    recorded = np.concatenate([sample.routes.read(range(LAYERS)) for sample in probe if sample.routes], axis=1)
    ages = {0, options.updates, *(2**power for power in range(20) if 2**power < options.updates)}
    rows = []
    for age in range(options.updates + 1):
        if age in ages:
            rows.append(
                {"routing_replay": NAMES[replay], "updates": age, **_measured(learner, probe, recorded, replay)}
            )
            print(rows[-1], flush=True)
        if age < options.updates:
            samples = _told(_stored(stage, age), replay)
            rewards, groups = np.array([s.reward for s in samples]), np.array([s.group for s in samples])
            update(learner, samples, group_advantages(rewards, groups, learner.recipe.objective))
    shutdown(learner.ranks)
    return rows


def _stored(stage: StageStore, number: int) -> list[Sample]:
    path = stage.directory / "behaviour.parquet"
    own = LogprobColumn(path, of_stage(stage.content)).read(number)
    return [replace(s, behaviour_logprobs=each) for s, each in zip(stage.read_update(number), own, strict=True)]


def _told(samples: list[Sample], replay: bool) -> list[Sample]:
    return samples if replay else [replace(sample, routes=None) for sample in samples]


def _measured(learner: Learner, probe: list[Sample], recorded: np.ndarray, replay: bool) -> dict[str, float]:
    """Flips of the routers' own choices, and |log ratio| of the response tokens as the arm computes it."""
    _, layers = record_routes(learner, probe)
    flips = (np.sort(np.stack(list(layers)), axis=-1) != np.sort(recorded, axis=-1)).any(-1)
    own = np.concatenate(token_logprobs(learner, _told(probe, replay)))
    distance = np.abs(own - np.concatenate([sample.behaviour_logprobs for sample in probe]))
    return {
        "tokens_flipped": float(flips.any(0).mean()),
        "choices_flipped": float(flips.mean()),
        "log_ratio_p50": float(np.quantile(distance, 0.5)),
        "log_ratio_p99": float(np.quantile(distance, 0.99)),
    }


def draw(rows: list[dict[str, object]], path: Path) -> None:
    """Flipped tokens and the ratios' tail over the updates of the stage."""
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    flips, tail = figure.subplots(1, 2)
    for name, color in (("off", LIGHT["orange"]), ("replay", LIGHT["blue"])):
        mine = [row for row in rows if row["routing_replay"] == name]
        updates = [row["updates"] for row in mine]
        label = "with replay" if name == "replay" else "without"
        flips.plot(updates, [row["tokens_flipped"] for row in mine], color=color, marker=".", label=f"tokens, {label}")
        flips.plot(
            updates, [row["choices_flipped"] for row in mine], color=color, linestyle="--", label=f"choices, {label}"
        )
        tail.plot(updates, [row["log_ratio_p99"] for row in mine], color=color, marker=".", label=f"p99, {label}")
        tail.plot(updates, [row["log_ratio_p50"] for row in mine], color=color, linestyle="--", label=f"p50, {label}")
    flips.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _plain(flips, "Routers that would choose other experts")
    _plain(tail, "|log ratio| of response tokens")
    write_svg(figure, path)


def _plain(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", color=LIGHT["ink"], fontsize=11)
    axes.set_xscale("symlog", linthresh=1, base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda updates, _: f"{updates:g}"))
    axes.set_xlabel("updates of the stage", color=LIGHT["soft"])
    axes.set_facecolor(LIGHT["paper"])
    axes.grid(axis="y", color=LIGHT["line"], linewidth=0.8)
    axes.tick_params(which="both", colors=LIGHT["soft"], length=0)
    axes.legend(facecolor=LIGHT["paper"], edgecolor="none", labelcolor=LIGHT["ink"], fontsize=8)
    for side in ("top", "left", "right", "bottom"):
        axes.spines[side].set_visible(side == "bottom")
        axes.spines[side].set_color(LIGHT["line"])


if __name__ == "__main__":
    main()
