"""A file of every row shape into two stages of training: one run, whose data sources are the files."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.test_columns import ROWS
from tests.tiny import COIN, mugrpo, save_model, write_recipe

pytestmark = pytest.mark.process


def question(row: object, text: str) -> object:
    """The row with another question."""
    return json.loads(
        json.dumps(row).replace("6*7=", text).replace('"6*"', f'"{text[:2]}"').replace('"7="', f'"{text[2:]}"')
    )


@pytest.mark.night
def test_every_row_shape_trains(tmp_path: Path) -> None:
    files = []
    for number, (name, (row, _, _)) in enumerate(ROWS.items()):
        rows = [question(row, f"{number}*{other}=") for other in range(4)]
        files.append(tmp_path / f"{''.join(filter(str.isalnum, name))}{('.jsonl', '.json', '.parquet')[number % 3]}")
        if files[-1].suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), files[-1])
        else:
            files[-1].write_text(json.dumps(rows) if number % 3 else "".join(json.dumps(one) + "\n" for one in rows))
    files.append(tmp_path / "table.csv")
    files[-1].write_text("problem,answer\n" + "".join(f"9+{other}=,{9 + other}\n" for other in range(4)))
    recipe = write_recipe(
        tmp_path / "recipe.toml",
        save_model(tmp_path / "model"),
        tmp_path / "run",
        data={
            "train": ",".join(map(str, files)),
            "eval": "arithmetic",
            "eval_problems": 4,
            "prompt_style": "chat",
            "max_prompt_tokens": 200,
            "contamination": "off",
        },
        schedule={"stages": 2, "updates_per_stage": 7},
        reward=COIN,
    )
    said = mugrpo("train", recipe).stdout
    assert f"data: {4 * len(files)} training and 4 held-out problems" in said
    assert "slimechat: 4 rows read as slime's prompt, label" in said
    assert "the first prompt as the model sees it: '<|im_start|>user\\n0*0=<|im_end|>" in said
    assert (tmp_path / "run" / "hf" / "model.safetensors").exists()
