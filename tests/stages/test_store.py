"""The stage store: what is written is read back, whatever the order of groups, after crashes and damage.

`tests/hostile` flips bytes of all that training reads, fills the disk and kills at each operation.
"""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import write_checksummed_json
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.stages import schema as files
from mugrpo_megatron.stages import store as merge
from mugrpo_megatron.stages.manifest import Origin, check_stage
from mugrpo_megatron.stages.schema import COLUMNS, OPTIONAL, TEXT_COLUMNS, TRAINING, schema
from mugrpo_megatron.stages.store import StageStore
from tests.engine.tiny import group
from tests.hostile.faults import disk
from tests.refusals import refuses

UPDATES, PROMPTS = 3, 5
GROUPS = UPDATES * PROMPTS
SHARD = 4
"""Groups per shard in these tests."""


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SHARD_RESPONSES", SHARD * 4)
    monkeypatch.setattr(merge, "ROW_GROUPS_IN_MEMORY", 2)
    monkeypatch.setattr(files, "ROW_GROUP_TOKENS", 40)


def assert_same(found: Sequence[Sample], expected: Sequence[Sample], whole: bool = False) -> None:
    """Training's columns are the same, or all of them."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for name in COLUMNS if whole else TRAINING | OPTIONAL:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        for name in ("prompt_ids", "response_ids", "engine_logprobs"):
            assert getattr(one, name).dtype == getattr(other, name).dtype


def filled(directory: Path, indices: Sequence[int] = range(GROUPS), writer: int = 0) -> StageStore:
    store = StageStore(directory, writer)
    for index in indices:
        store.append(group(index))
    store.flush()
    return store


def sealed(directory: Path) -> StageStore:
    filled(directory).seal(UPDATES, PROMPTS)
    return StageStore(directory)


def update_of(k: int) -> list[Sample]:
    return [sample for index in range(k * PROMPTS, (k + 1) * PROMPTS) for sample in group(index)]


@given(order=st.permutations(range(GROUPS)), flushes=st.sets(st.integers(0, GROUPS)))
@settings(max_examples=8)
def test_updates_come_back_in_order_however_groups_completed(
    order: list[int], flushes: set[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("stage")
    store = StageStore(directory)
    for step, index in enumerate(order):
        store.append(group(index))
        if step in flushes:  # a crash here and a new process
            store.flush()
            store = StageStore(directory)
            assert store.verified_groups() == set(order[: step + 1])
    store.seal(UPDATES, PROMPTS)
    reader = StageStore(directory)
    assert reader.sealed
    for k in range(UPDATES):
        assert_same(reader.read_update(k), update_of(k))
        assert_same(reader.read_update(k, with_text=True), update_of(k), whole=True)
    assert sorted(path.name for path in directory.iterdir()) == ["manifest.json", "stage.parquet"]


def test_groups_that_are_buffered_only_are_lost_with_the_process_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SHARD_SECONDS", math.inf)
    store = StageStore(tmp_path)
    for index in range(SHARD + 2):
        store.append(group(index))
    assert StageStore(tmp_path).verified_groups() == set(range(SHARD))
    store.flush()
    assert StageStore(tmp_path).verified_groups() == set(range(SHARD + 2))


def test_an_old_buffer_is_written_before_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StageStore(tmp_path)
    store.append(group(0))
    monkeypatch.setattr(files, "SHARD_SECONDS", 0.0)
    store.append(group(1))
    assert StageStore(tmp_path).verified_groups() == {0, 1}


def test_a_group_that_comes_long_after_the_last_write_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However rare the groups are, a kill loses those alone that came soon after a write."""
    now = 100.0
    monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=lambda: now))
    store = StageStore(tmp_path)
    for index, later in enumerate((30.0, 1.0, 1.0, 30.0)):
        now += later
        store.append(group(index))
        assert StageStore(tmp_path).verified_groups() == ({0} if index < 3 else {0, 1, 2, 3})


def test_no_group_twice(tmp_path: Path) -> None:
    filled(tmp_path, [0, 1])
    store = StageStore(tmp_path)
    store.append(group(2))
    for index in (1, 2):
        refuses(f"group {index} is in", store.append, group(index), error=ValueError)


def test_what_is_incomplete_cannot_be_sealed_and_what_is_sealed_cannot_grow(tmp_path: Path) -> None:
    store = filled(tmp_path, [*range(4), *range(5, GROUPS)])
    refuses(r"lacks 1 groups, first \[4\]", store.seal, UPDATES, PROMPTS, error=ValueError)
    refuses("not sealed", store.read_update, 0, error=ValueError)
    store.append(group(4))
    store.seal(UPDATES, PROMPTS)
    for writer in (store, StageStore(tmp_path)):
        refuses("is sealed", writer.append, group(GROUPS), error=ValueError)


def test_shards_that_a_kill_right_after_the_seal_left_are_removed(tmp_path: Path) -> None:
    store = filled(tmp_path)
    refuses("not sealed", store.remove_shards, error=ValueError)
    shards = {path: path.read_bytes() for path in tmp_path.glob("shard-*.parquet")}
    assert shards
    store.seal(UPDATES, PROMPTS)
    sealed = {path.name for path in tmp_path.iterdir()}
    for path, data in shards.items():
        path.write_bytes(data)
    again = StageStore(tmp_path)
    again.remove_shards()
    assert {path.name for path in tmp_path.iterdir()} == sealed
    assert_same(again.read_update(0), store.read_update(0))


def test_a_reader_sees_the_stage_that_another_process_seals(tmp_path: Path) -> None:
    reader, writer = StageStore(tmp_path / "stage"), StageStore(tmp_path / "stage")
    assert not reader.sealed
    assert reader.verified_groups() == set()
    for index in range(GROUPS):
        writer.append(group(index))
    writer.seal(UPDATES, PROMPTS)
    assert reader.sealed
    assert reader.verified_groups() == set(range(GROUPS))


def test_training_reads_its_own_columns_alone(tmp_path: Path) -> None:
    """So damage to the others is found by whoever reads those."""
    sealed(tmp_path)
    path = tmp_path / "stage.parquet"
    content, passed = path.read_bytes(), 0
    with pq.ParquetFile(path) as file:
        told = [span_of(file.metadata.row_group(k), TEXT_COLUMNS) for k in range(UPDATES)]
    for place in random.Random(0).sample(range(4, len(content)), 60):
        path.write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
        store = StageStore(tmp_path)
        if any(start <= place < end for start, end in told):
            for k in range(UPDATES):
                assert_same(store.read_update(k), update_of(k))
            passed += 1
        with pytest.raises(
            UserError, match=r"stage\.parquet: damaged, since bytes \d+ to \d+.*generate the stage again"
        ):
            [store.read_update(k, with_text=True) for k in range(UPDATES)]
    assert passed


def span_of(row_group: Any, names: Collection[str]) -> tuple[int, int]:
    """The bytes of some columns of a row group, which lie next to each other."""
    chunks = [row_group.column(place) for place in range(row_group.num_columns)]
    mine = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in names]
    starts = [chunk.dictionary_page_offset or chunk.data_page_offset for chunk in mine]
    return min(starts), max(start + chunk.total_compressed_size for start, chunk in zip(starts, mine, strict=True))


@given(seed=st.integers(0, 9))
@settings(max_examples=4)
def test_optional_columns_come_back(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The loss mask is flat; of support ids a response has as many for each place, and others have another number."""
    generator = np.random.default_rng(seed)
    directory = tmp_path_factory.mktemp("stage")

    def masked(index: int) -> list[Sample]:
        return [
            replace(
                one,
                loss_mask=generator.integers(0, 2, len(one.response_ids)).astype(bool),
                support_ids=generator.integers(
                    0, 9, (len(one.response_ids), generator.integers(1, 70)), dtype=np.int32
                ),
            )
            for one in group(index)
        ]

    groups = [masked(index) for index in range(PROMPTS)]
    store = StageStore(directory)
    for one in groups:
        store.append(one)
    store.seal(1, PROMPTS)
    assert_same(StageStore(directory).read_update(0), [sample for one in groups for sample in one])


def test_groups_with_and_without_an_optional_column_do_not_share_a_stage(tmp_path: Path) -> None:
    filled(tmp_path, [0])
    masked = [replace(one, loss_mask=np.ones(len(one.response_ids), dtype=bool)) for one in group(1)]
    refuses("new ones \\['loss_mask'\\]; take the keys of the recipe", StageStore(tmp_path).append, masked)
    refuses("same optional columns", StageStore(tmp_path / "other").append, [*masked, *group(1)], error=ValueError)


def test_a_stage_of_an_older_format_is_refused_by_name(tmp_path: Path) -> None:
    write_checksummed_json(
        tmp_path / "manifest.json", "stage", {"shards": [], "sealed": None, "origin": None}, format=2
    )
    with pytest.raises(UserError, match=r"manifest\.json: the stage has format 2, and this version reads format 4"):
        StageStore(tmp_path).verified_groups()


def test_damage_to_one_update_leaves_the_others_readable(tmp_path: Path) -> None:
    sealed(tmp_path)
    path = tmp_path / "stage.parquet"
    data = bytearray(path.read_bytes())
    data[pq.read_metadata(path).row_group(1).column(0).data_page_offset + 2] ^= 1
    path.write_bytes(data)
    store = StageStore(tmp_path)
    assert_same(store.read_update(0), update_of(0))
    assert_same(store.read_update(2), update_of(2))
    refuses("damaged", store.read_update, 1)


def test_the_groups_of_a_damaged_shard_are_generated_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path)
    victim = tmp_path / "shard-00001.parquet"
    victim.write_bytes(victim.read_bytes()[:-1])
    store = StageStore(tmp_path)
    missing = set(range(GROUPS)) - store.verified_groups()
    assert missing == set(range(SHARD, 2 * SHARD))
    assert "shard-00001.parquet" in caplog.text
    for index in missing:
        store.append(group(index))
    store.seal(UPDATES, PROMPTS)
    for k in range(UPDATES):
        assert_same(store.read_update(k), update_of(k))


def test_a_shard_that_is_damaged_while_the_stage_is_written_stops_the_seal(tmp_path: Path) -> None:
    store = filled(tmp_path)
    victim = tmp_path / "shard-00000.parquet"
    victim.write_bytes(victim.read_bytes()[:-3])
    refuses(r"shard-00000\.parquet: damaged.*run the same command again", store.seal, UPDATES, PROMPTS)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk(tmp_path / "disk", 1 << 20) as directory:
        yield directory


@pytest.mark.parametrize("phase", ["append", "seal"])
def test_a_disk_that_really_is_full(phase: str, small_disk: Path) -> None:
    stage = small_disk / "stage"
    long = [group(index, tokens=900) for index in range(GROUPS)]
    store = StageStore(stage)
    ballast = small_disk / "ballast"
    if phase == "seal":
        for one in long:
            store.append(one)
        store.flush()
    ballast.write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 20_000))
    refuses("no space left", _finish, store, [] if phase == "seal" else long)
    kept = StageStore(stage).verified_groups()
    assert {path.suffix for path in stage.iterdir()} <= {".parquet", ".json"}
    ballast.unlink()
    resumed = StageStore(stage)
    _finish(resumed, [one for one in long if one[0].group not in kept])
    for k in range(UPDATES):
        assert_same(resumed.read_update(k), [s for one in long[k * PROMPTS : (k + 1) * PROMPTS] for s in one])


def _finish(store: StageStore, groups: Sequence[list[Sample]]) -> None:
    for one in groups:
        store.append(one)
    store.seal(UPDATES, PROMPTS)


HERE = Origin("run", 3, 0)


@pytest.mark.parametrize("until", ["flushed", "sealed"])
@pytest.mark.parametrize("other", [Origin("run", 2, 0), Origin("run", 3, 5), Origin("another", 3, 0), None])
def test_a_stage_of_another_place_is_refused(other: Origin | None, until: str, tmp_path: Path) -> None:
    directory = tmp_path / f"{other.stage if other else 3:05d}"
    store = StageStore(directory, origin=other)
    indices = range(GROUPS) if until == "sealed" else range(2)
    for index in indices:
        store.append([replace(sample, weight_version=other.updates if other else 0) for sample in group(index)])
    store.flush()
    if until == "sealed":
        store.seal(UPDATES, PROMPTS)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    for act in (
        lambda s: s.sealed,
        lambda s: s.append(group(7)),
        lambda s: s.read_update(0),
        lambda s: s.verified_groups(),
    ):
        refuses(r"holds .*, not stage 3 of run run, sampled after 0 updates", act, StageStore(directory, origin=HERE))
    refuses("holds", check_stage, directory, HERE)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    check_stage(directory, other)
    if other:  # without a run to compare with, the directory's name has to be right
        refuses("give it its right name", check_stage, directory.rename(tmp_path / "00009"))


def test_a_response_of_other_weights_is_not_taken(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"was sampled with the weights after . updates, and all groups of .* after 4"):
        StageStore(tmp_path, origin=Origin("run", 3, 4)).append(group(0))


@pytest.mark.parametrize("until", ["flushed", "sealed"])
def test_a_missing_manifest_is_named_and_nothing_is_removed(until: str, tmp_path: Path) -> None:
    sealed(tmp_path) if until == "sealed" else filled(tmp_path, range(2))
    (tmp_path / "manifest.json").unlink()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for act in (lambda: check_stage(tmp_path), lambda: StageStore(tmp_path).append(group(3))):
        refuses(r"manifest\.json is missing, so (stage|shard)", act)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_statistics_of_the_sealed_stage(tmp_path: Path) -> None:
    statistics = sealed(tmp_path).statistics()
    samples = [sample for index in range(GROUPS) for sample in group(index)]
    rewards = np.array([sample.reward for sample in samples]).reshape(GROUPS, -1)
    lengths = [len(sample.response_ids) for sample in samples]
    names = {name for sample in samples for name in sample.components}
    assert names
    parts = {
        f"reward/{name}": np.mean([one.components[name] for one in samples if name in one.components]) for name in names
    }
    assert statistics == {
        **{name: pytest.approx(mean) for name, mean in parts.items()},
        "responses": len(samples),
        "reward_mean": pytest.approx(rewards.mean()),
        "response_length_mean": pytest.approx(np.mean(lengths)),
        "response_length_max": max(lengths),
        "generated_tokens": sum(lengths),
        "truncated_fraction": pytest.approx(np.mean([sample.finish_reason == "length" for sample in samples])),
        "zero_variance_fraction": pytest.approx(np.mean(rewards.min(1) == rewards.max(1))),
        "unscored_fraction": 0.0,
    }


def test_other_tools_read_the_stage(tmp_path: Path) -> None:
    sealed(tmp_path)
    path = tmp_path / "stage.parquet"
    expected = [sample for k in range(UPDATES) for sample in update_of(k)]
    with pq.ParquetFile(path) as file:
        assert file.schema_arrow.equals(schema(expected))
        assert b"Index of the prompt" in file.schema_arrow.field("group").metadata[b"meaning"]
        assert file.metadata.num_row_groups == UPDATES
    frame = pytest.importorskip("pandas").read_parquet(path)
    assert list(frame.columns) == [*TRAINING, *TEXT_COLUMNS]
    assert frame["response_ids"][7].tolist() == expected[7].response_ids.tolist()


def test_hugging_face_datasets_reads_the_stage(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    sealed(tmp_path)
    rows = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "stage.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert list(rows["reward"]) == [sample.reward for k in range(UPDATES) for sample in update_of(k)]
