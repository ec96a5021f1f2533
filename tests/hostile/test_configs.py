"""Odd model configurations, tokenizers and plans: used as they say, or refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer, load_tokenizer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hf_config import read_config, read_model_config
from mugrpo_megatron.files.vocabulary import check_vocabulary
from mugrpo_megatron.weights.families import read_architecture
from tests.checkout import ROOT
from tests.files.test_hf_config import DENSE
from tests.hostile.damage import ODD_TEXTS, damages
from tests.hostile.outcome import answered, command, refused


def test_damaged_texts(tmp_path: Path) -> None:
    whole = json.dumps({"model_type": "llama", **DENSE}, indent=1).encode()
    readers: tuple[Callable[[Path], object], ...] = (read_config, read_architecture, read_model_config)
    (tmp_path / "model.safetensors").touch()
    for content in (*ODD_TEXTS, *damages(whole, 300, seed=2)):
        (tmp_path / "config.json").write_bytes(content)
        for read in readers:
            with suppress(UserError):
                read(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json", "vocab.json"])
def test_damaged_tokenizers(name: str, tmp_path: Path) -> None:
    build_arithmetic_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / name
    if not path.exists():
        (tmp_path / "tokenizer.json").unlink()
        path.write_text('{"a": 0, "b": 1}')
    whole = path.read_bytes()
    refused = 0
    for content in (*ODD_TEXTS, *damages(whole, 60, seed=3)):
        path.write_bytes(content)
        for read in (partial(check_vocabulary, vocab_size=1 << 20), load_tokenizer):
            try:
                read(tmp_path)
            except UserError as error:
                refused += 1
                assert str(tmp_path) in str(error)
                assert "\n" not in str(error)
    assert refused


RECIPE = str(ROOT / "run_scripts/recipes/quickstart.toml")
CUDA = ["--set", "model.dtype=bfloat16"]  # a plan is for GPUs, which refuse the recipe's float32
MODEL = ["--set", "model.path=Qwen/Qwen2.5-0.5B", *CUDA]
CLUSTERS = {
    "--nodes 100001": "takes 1 to 100,000",
    "--nodes 0": "takes 1 to 100,000",
    "--gpus-per-node -8": "takes 1 to 1,024",
    "--nodes 1.5": "invalid int value",
    "--gpu h300": "choose one of h200",
    "--nodes 99991 --gpus-per-node 1021": "does not divide over",
}
RATES = ["mfu=nan", "spread=inf", "disk=-5", "mfu=1.01", "cores=1e19", "mfu", "mfu=0.4=0.5", "__class__=1"]
HUGE = 9007199254740992
EXTREMES = [
    "--nodes 1 --gpus-per-node 1",
    "--assume mfu=1e-300",
    "--assume mean_prompt=1e-17",
    "--assume cores=1e18 --assume verifier=1e-18",
    "--set rollout.prompts_per_update=1000000000 --set schedule.stages=1000000000",
    *(f"--set {key}={HUGE}" for key in ("rollout.max_response_tokens", "engine.tensor", "parallel.tensor")),
    "--set learner.micro_batch_tokens=1",
    "--set data.eval=,,,",
]


@pytest.mark.parametrize("options", CLUSTERS)
def test_a_cluster_that_cannot_be(options: str) -> None:
    ended = command("plan", RECIPE, *MODEL, *options.split())
    assert ended.code == 2
    assert CLUSTERS[options] in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("rate", RATES)
def test_a_rate_that_cannot_be(rate: str) -> None:
    refused("plan", RECIPE, *MODEL, "--assume", rate, says=f"--assume {rate}: ")


@pytest.mark.parametrize("options", EXTREMES)
def test_an_extreme_plan_is_numbers_or_a_sentence(options: str) -> None:
    ended = answered("plan", RECIPE, *MODEL, "--json", *options.split())
    if ended.code == 0:
        json.loads(ended.out, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    else:
        assert options != EXTREMES[0], "an ordinary plan is made"


@pytest.mark.parametrize("content", [b"", b"[" * 100_000], ids=lambda content: content[:9])
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
