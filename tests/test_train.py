"""Whole runs with the real learner and the real engine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mugrpo_megatron.checks.preflight import check_run
from mugrpo_megatron.engine.sglang_compat import has_gated_delta
from mugrpo_megatron.recipe import load_recipe
from mugrpo_megatron.train import train
from tests.ranks import run_ranks
from tests.tiny import COIN, mugrpo, rows, save_model, write_recipe

pytestmark = pytest.mark.process


def test_a_run_leaves_everything_that_it_promises(finished_run: Path) -> None:
    assert "reward after" in (finished_run.parent / "output").read_text()
    summary = json.loads((finished_run / "summary.json").read_text())
    assert {"reward_before", "reward_after", "reward_interval", "seconds", "tokens"} <= summary.keys()
    assert {"sync", "generate", "score", "optimize", "total"} <= summary["seconds"].keys()
    assert summary["tokens"]["generated"] == summary["tokens"]["trained"] > 0
    assert (summary["stages"], summary["updates"], summary["seed"]) == (2, 24, 0)
    assert (finished_run / "report.html").stat().st_size > 10_000
    assert sorted(path.name for path in (finished_run / "stages").iterdir()) == ["00000", "00001"]
    AutoModelForCausalLM.from_pretrained(finished_run / "hf")
    tokenizer = AutoTokenizer.from_pretrained(finished_run / "hf")
    assert tokenizer.decode(tokenizer.encode("12+34=")) == "12+34="


def test_ratio_is_exactly_one_at_a_stages_first_update(finished_run: Path) -> None:
    first = [row for row in rows(finished_run, "update") if row["age"] == 0]
    assert len(first) == 2
    assert [(row["kl_k1"], row["kl_k3"], row["second_moment"], row["ess"]) for row in first] == [
        (0.0, 0.0, 0.0, 1.0)
    ] * 2
    stale = [row for row in rows(finished_run, "update") if row["age"] == 1 and row["grad_norm"] > 0]
    assert all(row["second_moment"] > 0 for row in stale)


def test_engine_and_learner_agree_after_every_sync(finished_run: Path) -> None:
    stages = rows(finished_run, "stage")
    assert len(stages) == 2
    assert all(row["mismatch_max"] < 1e-4 for row in stages)


def test_the_first_sync_alone_compares_the_engine_s_weights_with_the_learner_s(finished_run: Path) -> None:
    first, *later = [row.get("checked") for row in rows(finished_run, "phase") if row["phase"] == "sync"]
    layers = 4
    assert first == 2 + layers * 7  # embedding and last norm; norms, qkv with bias, output, gate_up, down
    assert later == [None] * 2  # the second stage and the last evaluation


def test_a_finished_run_is_shown_again_not_trained_again(finished_run: Path) -> None:
    before = len(rows(finished_run, "update"))
    assert "reward after" in mugrpo("train", finished_run / "recipe.toml").stdout
    assert len(rows(finished_run, "update")) == before


def test_an_engine_that_fails_to_start_is_named(model: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "r.toml", model, tmp_path / "run", engine={"extra": {"chunked_prefil_size": 64}})
    failed = mugrpo("train", recipe, code=2).stderr
    assert re.search(r"^mugrpo: engine\.extra: SGLang does not start .*'chunked_prefil_size'.*remove", failed, re.M)
    assert "Traceback" not in failed


def train_as(recipe: Path) -> None:
    train(*check_run(load_recipe(recipe)))


@pytest.mark.slow
def test_layouts_train_alike(model: Path, tmp_path: Path) -> None:
    """TP2 x PP2 with sequence parallelism and an engine of two ranks: the same first update as one process."""
    recipe = write_recipe(
        tmp_path / "r.toml",
        model,
        tmp_path / "run",
        schedule={"stages": 1},
        rollout={"behaviour": "learner"},
        parallel={"tensor": 2, "pipeline": 2},
        engine={"tensor": 2},
    )
    run_ranks(4, train_as, recipe)
    assert rows(tmp_path / "run", "update")[0]["second_moment"] == 0.0
    assert all(row["mismatch_max"] < 1e-4 for row in rows(tmp_path / "run", "stage"))


@pytest.mark.slow
def test_a_model_of_deepseek_v3_s_shape_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage with replayed routes: every sync is compared tensor by tensor, and the routers' bias stays."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # SGLang compiles its experts, which takes longer than all the rest
    recipe = write_recipe(
        tmp_path / "recipe.toml",
        save_model(tmp_path / "model", "deepseek_v3"),
        tmp_path / "run",
        schedule={"stages": 1},
        learner={"routing_replay": "learner"},
        engine={"check_weights": "every"},
        rollout={"behaviour": "learner"},
        reward=COIN,
    )
    mugrpo("train", recipe)
    run = tmp_path / "run"
    assert all(row["mismatch_max"] < 1e-4 for row in rows(run, "stage"))
    updates = rows(run, "update")
    assert [row["ratio_pos_max"] for row in updates if row["age"] == 0] == [1.0]
    synced = [row["checked"] for row in rows(run, "phase") if row["phase"] == "sync"]
    assert set(synced) == {3 + 4 * 8 + 2 + 3 * 6}  # norms, latents and heads; one dense layer, three with experts
    before, after = (load_file(one / "model.safetensors") for one in (tmp_path / "model", run / "hf"))
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert not any("e_score_correction_bias" in name for name in moved)
    assert {"gate", "kv_b_proj", "q_a_proj", "shared_experts"} <= {part for name in moved for part in name.split(".")}


@pytest.mark.night
@pytest.mark.skipif(not has_gated_delta(), reason="the pinned SGLang has no class for the text of Qwen3.5")
def test_a_model_of_qwen3_5_s_shape_trains(tmp_path: Path) -> None:
    """Packed rows on TP2 x PP2 and an engine of two ranks: ratios are exact, every sync is compared bitwise."""
    recipe = write_recipe(
        tmp_path / "recipe.toml",
        save_model(tmp_path / "model", "qwen3_5_text"),
        tmp_path / "run",
        parallel={"tensor": 2, "pipeline": 2},
        engine={"tensor": 2, "check_weights": "every"},
        rollout={"behaviour": "learner"},
        reward=COIN,
    )
    run_ranks(4, train_as, recipe)
    run = tmp_path / "run"
    assert all(row["mismatch_max"] < 1e-4 for row in rows(run, "stage"))
    assert {row["ratio_pos_max"] for row in rows(run, "update") if row["age"] == 0} == {1.0}
    assert all(row["checked"] for row in rows(run, "phase") if row["phase"] == "sync")
    before, after = (load_file(one / "model.safetensors") for one in (tmp_path / "model", run / "hf"))
    assert {name for name in before if torch.equal(before[name], after[name])} == set()
