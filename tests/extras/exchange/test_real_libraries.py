"""Traces that OpenEnv and verifiers write become a stage, and they read ours; each in an environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mugrpo_megatron.extras.exchange.import_rollouts import import_rollouts
from mugrpo_megatron.extras.exchange.traces import flatten_trace
from mugrpo_megatron.recipe import load_recipe
from mugrpo_megatron.stages.store import StageStore
from tests.extras.exchange.test_traces import TWO, VERIFIERS
from tests.tiny import COIN, save_model, write_recipe

pytestmark = [pytest.mark.process, pytest.mark.night]
ROUNDING = 6e-5
"""Of logprobs: verifiers saves four decimals."""


def installed(library: str, folder: Path) -> Path:
    """The Python of a new environment with the newest release of the library; skips where pip cannot get it."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", library]
    result = subprocess.run(pip, capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"pip cannot install {library}: {result.stderr.strip().splitlines()[-1]}")
    return folder / "bin" / "python"


@pytest.mark.parametrize(
    ("library", "ours", "files"),
    [("openenv", TWO, ["theirs.jsonl"]), ("verifiers", VERIFIERS, ["theirs.jsonl", "records.jsonl"])],
)
def test_files_go_both_ways(library: str, ours: dict[str, Any], files: list[str], tmp_path: Path) -> None:
    python = installed(library, tmp_path / "environment")
    (tmp_path / "ours.json").write_text(json.dumps(ours))
    subprocess.run([python, Path(__file__).parent / f"with_{library}.py", tmp_path], check=True)
    views = json.loads((tmp_path / "views.json").read_text())
    print(library, views["version"])

    read = flatten_trace(ours)
    place = len(read["prompt_ids"])
    end = place + len(read["response_ids"])
    assert views["ours"]["ids"][:end] == read["prompt_ids"] + read["response_ids"]
    assert [bool(token) for token in views["ours"]["mask"]] == [
        *[False] * place,
        *map(bool, read["loss_mask"]),
        *[False] * (len(views["ours"]["ids"]) - end),
    ]
    assert views["ours"]["logprobs"][place:end] == read["logprobs"]

    path = write_recipe(
        tmp_path / "recipe.toml",
        save_model(tmp_path / "model"),
        tmp_path / "run",
        schedule={"stages": 1, "updates_per_stage": 2},
        rollout={"prompts_per_update": 2, "responses_per_prompt": 2, "max_response_tokens": 64},
        reward=COIN,
    )
    for file in files:
        stage = tmp_path / f"{file}.stage"
        import_rollouts(tmp_path / file, load_recipe(path), stage, say=lambda line: None)
        store = StageStore(stage / "stages" / "00000")
        samples = [row for update in range(store.updates) for row in store.read_update(update, with_text=True)]
        assert len(samples) == len(views["theirs"]) == 8
        for sample, view in zip(samples, views["theirs"], strict=True):
            assert sample.loss_mask is not None
            begin, length = len(sample.prompt_ids), len(sample.response_ids)
            assert [*sample.prompt_ids.tolist(), *sample.response_ids.tolist()] == view["ids"][: begin + length]
            assert not any(view["mask"][begin + length :])
            assert sample.loss_mask.tolist() == [bool(token) for token in view["mask"][begin : begin + length]]
            logprobs = view["logprobs"][begin : begin + length]
            np.testing.assert_allclose(sample.engine_logprobs, logprobs, atol=ROUNDING)
            assert sample.reward == pytest.approx(view["reward"])
            assert sample.finish_reason == ("length" if view["cut"] else "stop")
