"""A run with two guests, killed with its engines while one has its turn: what is on disk is not asked again."""

from __future__ import annotations

from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from mugrpo_megatron.data.tokenizer import CHAT_ML, build_arithmetic_tokenizer
from mugrpo_megatron.observe.log import read_rows
from tests.forked import started
from tests.tiny import COIN, mugrpo, save_model, write_recipe

pytestmark = [pytest.mark.process, pytest.mark.night]

UPDATES = 80


def recipe_of(folder: Path, **objective: object) -> Path:
    """A teacher, and a judge that samples: asked again, it would answer something else."""
    model = save_model(folder / "model")
    build_arithmetic_tokenizer(CHAT_ML).save_pretrained(model)
    (folder / "question.j2").write_text("{{ prompt }} {{ response }} {{ gold }}", encoding="utf-8")
    judge = {
        "function": "judge",
        "model": "wise",
        "prompt": str(folder / "question.j2"),
        "parse": "tests.extras.guests.parsing:characters",
        "max_tokens": 8,
        "temperature": 1.0,
    }
    return write_recipe(
        folder / "recipe.toml",
        model,
        folder / "run",
        data={"prompt_style": "plain"},
        schedule={"stages": 1, "updates_per_stage": UPDATES},
        objective={"teacher": "wise", "teacher_coef": 0.1, **objective},
        eval={"every_stages": 0},
        reward={"functions": {"coin": COIN, "quality": judge}},
        guest={"wise": {"model": str(model), "engine": {"max_running_requests": 4}}},
    )


def kill_in_turn(recipe: Path, what: str) -> dict[str, list[dict[str, object]]]:
    """Kill the run and its engines once a part of a column is there; the rows of the parts by name."""
    guests = recipe.parent / "run" / "guests"
    with started("train", recipe) as command:
        while not any(guests.glob(f"*{what}*.parts-*/*.parquet")):
            assert command.wait(0.005) is None, command.said
        family = command.family
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
    parts = sorted(guests.glob(f"*{what}*.parts-*/*.parquet"))
    return {part.stem: pq.read_table(part).to_pylist() for part in parts}


@pytest.mark.parametrize("what", ["teacher-wise", "reward-quality"])
def test_killed_while_a_guest_has_its_turn(what: str, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    durable = kill_in_turn(recipe, what)
    assert 0 < len(durable) < UPDATES
    mugrpo("train", recipe)
    guests = tmp_path / "run" / "guests"
    with pq.ParquetFile(guests / f"stage00000-{what}.parquet") as column:
        assert column.num_row_groups == UPDATES
        for update, rows in durable.items():
            assert column.read_row_group(int(update)).to_pylist() == rows
    assert not list(guests.glob("*.parts-*"))
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert sum(row["kind"] == "update" for row in rows) == UPDATES
    turns = [row for row in rows if row.get("phase") == "guest"]
    assert len(turns) == 1, "the killed one wrote no row"
