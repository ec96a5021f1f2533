"""A run that is asked to stop in mid generation: it continues the responses that it had begun."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from mugrpo_megatron.observe.log import read_rows
from mugrpo_megatron.stages.store import StageStore
from tests.forked import started
from tests.tiny import mugrpo, save_model, write_recipe

pytestmark = [pytest.mark.process, pytest.mark.night]


def test_a_run_asked_to_stop_while_generating_continues_what_it_began(tmp_path: Path) -> None:
    prompts, updates = 256, 12
    shape: dict[str, dict[str, Any]] = {
        "schedule": {"stages": 1, "updates_per_stage": updates},
        "rollout": {"prompts_per_update": prompts, "max_response_tokens": 64},
    }
    recipe = write_recipe(tmp_path / "recipe.toml", save_model(tmp_path / "model"), tmp_path / "run", **shape)
    stage = tmp_path / "run" / "stages" / "00000"
    with started("train", recipe) as command:
        while not list(stage.glob("shard-*.parquet")):
            assert command.wait(0.05) is None, command.said
        psutil.Process(command.pid).send_signal(signal.SIGTERM)
        assert command.wait() == 0, command.said
        said = re.search(r"\d+ of 3072 groups of this stage are on disk, and ([\d,]+) tokens of unf", command.said)
        assert said, command.said
    assert (stage / "unfinished-0000.npz").exists()
    assert f"{said[1]} tokens of" in mugrpo("train", recipe).stdout
    assert not list(stage.glob("unfinished-*"))
    assert StageStore(stage).updates == updates
    [row] = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "stage"]
    assert row["mismatch_max"] < 1e-4
