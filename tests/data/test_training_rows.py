"""Rows of every project go through two stages of training, each from a small file of its own."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from mugrpo_megatron.data.tokenizer import CHAT_ML, build_arithmetic_tokenizer
from mugrpo_megatron.observe.log import read_rows
from mugrpo_megatron.stages.store import StageStore
from tests.data.test_columns import ROWS, write
from tests.tiny import COIN, mugrpo, save_model, write_recipe

SUFFIXES = (".jsonl", ".json", ".parquet")


def files(folder: Path) -> dict[str, str]:
    """A file for each format of rows, with a question of its own: path -> the format's name."""
    folder.mkdir()
    made = {}
    for number, (name, (row, _, _)) in enumerate(ROWS.items()):
        own = json.loads(json.dumps(row).replace("6*", f"{number + 10}*"))
        made[write(folder / f"rows{number}{SUFFIXES[number % 3]}", own)] = name
    for number, (suffix, delimiter) in enumerate({".csv": ",", ".tsv": "\t"}.items()):
        path = folder / f"table{suffix}"
        with path.open("w", newline="") as file:
            table = csv.writer(file, delimiter=delimiter)
            table.writerows([["question", "answer"], [f"{number + 80}{delimiter}6=", 9]])
        made[str(path)] = suffix
    return made


@pytest.mark.process
def test_every_format_is_trained_on_in_both_stages(tmp_path: Path) -> None:
    formats = files(tmp_path / "rows")
    model = save_model(tmp_path / "model")
    build_arithmetic_tokenizer(CHAT_ML).save_pretrained(model)
    recipe = write_recipe(
        tmp_path / "recipe.toml",
        model,
        tmp_path / "run",
        data={"train": ",".join(formats), "max_prompt_tokens": 100, "contamination": "off"},
        rollout={"prompts_per_update": len(formats) // 2},
        reward=COIN,
    )
    said = mugrpo("train", recipe).stdout
    assert "the first prompt as the model sees it (chat): '<|im_start|>user\\n10*7=<|im_end|>" in said
    for count in ("rows read as verl's prompt, reward_model.ground_truth", "rows read as messages, the last message"):
        assert count in said
    for stage in range(2):
        store = StageStore(tmp_path / "run" / "stages" / f"{stage:05}")
        asked = {sample.problem.rpartition(":")[0] for update in range(2) for sample in store.read_update(update)}
        assert {formats[path] for path in asked} == set(formats.values())
    updates = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "update"]
    assert len(updates) == 4
    assert max(row["grad_norm"] for row in updates) > 0
