from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from mugrpo_megatron.data.problems import load
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.sections import DataSection


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """A hub that holds two shards of one set in the layout of its Parquet branch; returns what was asked of it."""
    folder = tmp_path / "default" / "train"
    folder.mkdir(parents=True)
    for shard in range(2):
        rows = [{"problem": f"q{shard}", "answer": str(shard)}]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"000{shard}.parquet")
    asked: list[dict[str, object]] = []

    def snapshot(repository: str, **options: object) -> str:
        asked.append({"repository": repository, **options})
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    return asked


@pytest.mark.parametrize("source", ["deepscaler", "someone/some-set", "someone/some-set/default:train"])
def test_shards_of_a_split_are_read_in_order(stored: list[dict[str, object]], source: str) -> None:
    assert [p.question for p in load(source, DataSection(), "train").problems] == ["q0", "q1"]
    assert stored[0]["repo_type"] == "dataset"
    assert stored[0]["revision"] == "refs/convert/parquet"
    assert stored[0]["allow_patterns"] == ["default/train/*.parquet"]


@pytest.mark.usefixtures("stored")
def test_a_split_that_is_not_there_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match=r"someone/some-set \(default, test\) has no Parquet files"):
        load("someone/some-set", DataSection(), "eval")


def test_no_network_is_one_sentence_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("cannot reach the hub\nand much more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(UserError, match=r"openai/gsm8k \(main, test\) .*cannot reach the hub\).* NAME@FILE"):
        load("gsm8k", DataSection(), "eval")
