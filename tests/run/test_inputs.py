"""A run's data are its problems, wherever their files lie."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mugrpo_megatron.data.prepare import Problems, read_problems
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.recipe.sections import DataSection
from mugrpo_megatron.run.inputs import check_data, problem_sums, record_data
from mugrpo_megatron.samples import Problem

ROW = {"problem": "6*7=", "answer": 42, "tests": ["assert a"]}
WITH_ROW = Problem("/here/set.jsonl:1", "6*7=", "42", "set", ({"role": "user", "content": "6*7="},), row=ROW)


def cached(cache: Path, monkeypatch: pytest.MonkeyPatch, last: int = 2) -> Problems:
    """The problems of a data set of the hub whose files lie in `cache`."""
    folder = cache / "datasets--openai--gsm8k" / "snapshots" / "abc"
    for split in ("train", "test"):
        place = folder / "main" / split / "0000.parquet"
        place.parent.mkdir(parents=True)
        texts = [f"{split}: what is 1+{n} apples?" for n in range(last)]
        pq.write_table(pa.table({"question": texts, "answer": [f"#### {n + 1}" for n in range(last)]}), place)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_args, **_options: str(folder))
    return read_problems(DataSection(train="gsm8k", eval="gsm8k"), RewardSection())


def test_a_set_of_the_hub_is_the_same_in_another_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = cached(tmp_path / "a", monkeypatch)
    record_data(tmp_path, here)
    moved = cached(tmp_path / "b", monkeypatch)
    assert {problem.id for problem in moved.train}.isdisjoint(problem.id for problem in here.train)
    check_data(tmp_path, moved)
    assert problem_sums(moved) == problem_sums(here)
    with pytest.raises(UserError, match=r"other problems of gsm8k \(train\), gsm8k \(held-out\)"):
        check_data(tmp_path, cached(tmp_path / "c", monkeypatch, last=3))


def test_a_file_may_move(tmp_path: Path) -> None:
    row = '{"problem": "6*7=", "answer": 42}\n'
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "set.jsonl").write_text(row)
    found = [
        problem_sums(read_problems(DataSection(train=str(tmp_path / folder / "set.jsonl")), RewardSection()))
        for folder in ("a", "b")
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("change", [{"question": "6*8="}, {"answer": "43"}, {"messages": ()}, {"row": {"tests": []}}])
def test_what_a_reward_depends_on_is_told(change: dict[str, Any], tmp_path: Path) -> None:
    record_data(tmp_path, Problems([WITH_ROW], [], []))
    with pytest.raises(UserError, match=r"other problems of set \(train\)"):
        check_data(tmp_path, Problems([replace(WITH_ROW, **change)], [], []))
