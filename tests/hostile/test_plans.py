"""Plans of clusters and rates that cannot be: a sentence, or a plan that ends within a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkout import ROOT
from tests.hostile.outcome import answered, command, refused

RECIPE = str(ROOT / "run_scripts/recipes/quickstart.toml")
CUDA = ["--set", "model.dtype=bfloat16"]  # a plan is for GPUs, which refuse the recipe's float32
MODEL = ["--set", "model.path=Qwen/Qwen2.5-0.5B", *CUDA]
CLUSTERS = {
    "--nodes 1000000000000": "takes 1 to 100,000",
    "--nodes 100001": "takes 1 to 100,000",
    "--nodes 0": "takes 1 to 100,000",
    "--nodes -1": "takes 1 to 100,000",
    "--gpus-per-node 0": "takes 1 to 1,024",
    "--gpus-per-node -8": "takes 1 to 1,024",
    "--gpus-per-node 1000000000": "takes 1 to 1,024",
    "--nodes 1.5": "invalid int value",
    "--nodes nan": "invalid int value",
    "--nodes 9e9": "invalid int value",
    "--nodes ''": "invalid int value",
    "--gpu h300": "known are h200",
    "--gpu ''": "known are h200",
    "--nodes 100000 --gpus-per-node 1024": "does not divide over 102400000 data parallel ranks",
    "--nodes 99991 --gpus-per-node 1021": "does not divide over",
    "--gpu cpu --gpus-per-node 1024": "does not divide over",
}
RATES = [
    *(
        f"{name}={value}"
        for name in ("mfu", "spread", "disk", "fragmentation")
        for value in ("nan", "inf", "-inf", "-5")
    ),
    "packing=200",
    "mfu=1.01",
    "decode=2",
    "mean_prompt=1.5",
    "mean_response=0",
    "fragmentation=1.5",
    "spread=11",
    "cores=1e19",
    "step_floor=0",
    "mfu=",
    "mfu",
    "mfu=0.4=0.5",
    "mfu=0x1",
    "=1",
    "unknown=1",
    "MFU=0.4",
    "__class__=1",
]
EXTREMES = [
    "--nodes 1 --gpus-per-node 1",
    "--nodes 512 --gpus-per-node 1",
    "--assume spread=10",
    "--assume spread=1e-9",
    "--assume decode=1e-300",
    "--assume mfu=1e-300",
    "--assume step_floor=1e18",
    "--assume fragmentation=1",
    "--assume fragmentation=0",
    "--assume mean_prompt=1e-17",
    "--assume mean_response=1",
    "--assume cores=1e18 --assume verifier=1e-18",
    "--assume cores=1e-9",
    "--assume disk=1e-300",
    "--assume engine_rest=1e18",
    "--set rollout.prompts_per_update=1000000000 --set schedule.stages=1000000000",
    "--set schedule.updates_per_stage=9007199254740992",
    "--set rollout.max_response_tokens=9007199254740992",
    "--set data.max_prompt_tokens=9007199254740992",
    "--set eval.samples=9007199254740992",
    "--set rollout.responses_per_prompt=9007199254740992",
    "--set learner.micro_batch_tokens=9007199254740992",
    "--set learner.micro_batch_tokens=1",
    "--set engine.max_running_requests=9007199254740992",
    "--set engine.per_node=9007199254740992",
    "--set engine.tensor=7",
    "--set parallel.tensor=9007199254740992",
    "--set parallel.context=512",
    "--set parallel.virtual_pipeline=9007199254740992",
    "--set reward.workers=9007199254740992",
    "--set data.eval=,,,",
]


def words(options: str) -> list[str]:
    return ["" if word == "''" else word for word in options.split(" ")]


@pytest.mark.parametrize("options", CLUSTERS)
def test_a_cluster_that_cannot_be(options: str) -> None:
    ended = command("plan", RECIPE, *MODEL, *words(options))
    assert ended.code == 2
    assert CLUSTERS[options] in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("rate", RATES)
def test_a_rate_that_cannot_be(rate: str) -> None:
    refused("plan", RECIPE, *MODEL, "--assume", rate, says=f"--assume {rate}: ")


@pytest.mark.parametrize("options", EXTREMES)
def test_an_extreme_plan_is_numbers_or_a_sentence(options: str) -> None:
    ended = answered("plan", RECIPE, *MODEL, "--json", *words(options))
    if ended.code == 0:
        json.loads(ended.out, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
        assert command("plan", RECIPE, *MODEL, *words(options)).code == 0


CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
ODD: list[Any] = [None, 0, -1, 3, 2**31, 10**30, 1e308, float("nan"), "8", "", [], [1], {}, {"a": 1}, True]


def test_what_the_odd_ones_change_is_planned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = ["--gpus-per-node", "1", "--model-config", tmp_path / "config.json"]
    for ended in (command("plan", RECIPE, *CUDA, *model), command("plan", RECIPE, *MODEL, *words(EXTREMES[0]))):
        assert ended.code == 0, ended.err


@pytest.mark.parametrize("key", CONFIG)
def test_a_model_config_with_an_odd_value(key: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for value in ODD:
        path.write_text(json.dumps({**CONFIG, key: value}))
        answered("plan", RECIPE, *CUDA, "--gpus-per-node", "1", "--model-config", path)
    path.write_text(json.dumps({name: value for name, value in CONFIG.items() if name != key}))
    answered("plan", RECIPE, *CUDA, "--gpus-per-node", "1", "--model-config", path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"model_type": "\xff"}',
        "{}".encode("utf-16"),
        b'{"a": "\\ud800"}',
        b"\0",
    ],
    ids=lambda content: repr(content[:12]),
)
def test_a_model_config_that_is_not_one(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    refused("plan", RECIPE, *CUDA, "--model-config", tmp_path / "config.json")
    refused("plan", RECIPE, *CUDA, "--set", f"model.path={tmp_path}")


def test_places_that_hold_no_model_config(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("folder", "device", "loop", "nowhere", "x" * 300):
        refused("plan", RECIPE, *CUDA, "--model-config", tmp_path / name)
        refused("plan", RECIPE, *CUDA, "--set", f"model.path={tmp_path / name}")
