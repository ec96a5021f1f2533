"""Several writers of one stage: all durable groups count, also a dead writer's, and writer 0 seals them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.stages import schema
from mugrpo_megatron.stages import store as store_module
from mugrpo_megatron.stages.store import StageStore
from tests.engine.tiny import group
from tests.hostile.damage import flip
from tests.stages.test_store import GROUPS, PROMPTS, UPDATES, assert_same, filled, update_of

WRITERS = 3


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "SHARD_RESPONSES", 2 * 4)


def assert_sealed_and_tidy(directory: Path) -> None:
    for reader in (StageStore(directory), StageStore(directory, writer=1)):
        assert reader.sealed
        for k in range(UPDATES):
            assert_same(reader.read_update(k), update_of(k))
    assert sorted(path.name for path in directory.iterdir()) == ["manifest.json", "stage.parquet"]


@given(
    owners=st.lists(st.integers(0, WRITERS - 1), min_size=GROUPS, max_size=GROUPS), order=st.permutations(range(GROUPS))
)
@settings(max_examples=6)
def test_the_stage_is_the_union_of_what_its_writers_wrote(
    owners: list[int], order: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("stage")
    stores = [StageStore(directory, writer) for writer in range(WRITERS)]
    for index in order:
        stores[owners[index]].append(group(index))
    durable: set[int] = set()
    for writer, store in enumerate(stores):
        store.flush()
        durable |= {index for index in range(GROUPS) if owners[index] == writer}
        assert all(durable <= other.verified_groups() == other.listed_groups() for other in stores)
    assert stores[0].verified_groups() == set(range(GROUPS))
    stores[0].seal(UPDATES, PROMPTS)
    assert all(store.sealed for store in stores)
    assert_sealed_and_tidy(directory)


@pytest.mark.parametrize("survivor", [0, 2])
def test_a_writer_that_died_loses_only_what_it_had_not_written(survivor: int, tmp_path: Path) -> None:
    dead = StageStore(tmp_path, writer=1)
    for index in (0, 1, 2):  # two make a shard
        dead.append(group(index))
    filled(tmp_path, [3, 4], survivor)
    resumed = StageStore(tmp_path, survivor)
    assert resumed.verified_groups() == {0, 1, 3, 4}


def test_a_group_that_two_writers_have_counts_once(tmp_path: Path) -> None:
    filled(tmp_path, range(8), 1)
    filled(tmp_path, range(6, GROUPS), 2)
    StageStore(tmp_path).seal(UPDATES, PROMPTS)
    assert_sealed_and_tidy(tmp_path)


def test_opening_one_writer_s_files_leaves_the_others_alone(tmp_path: Path) -> None:
    filled(tmp_path, [0, 1], 1)
    (tmp_path / "shard-0001-00007.parquet").write_bytes(b"unnamed")
    (tmp_path / ".shard-0002-00000.parquet.0123abcd.partial").write_bytes(b"being written")
    filled(tmp_path, [2])
    assert (tmp_path / "shard-0001-00007.parquet").exists()
    assert (tmp_path / ".shard-0002-00000.parquet.0123abcd.partial").exists()
    filled(tmp_path, [3], 1)
    assert not (tmp_path / "shard-0001-00007.parquet").exists()
    assert StageStore(tmp_path).verified_groups() == {0, 1, 2, 3}


def test_damage_to_a_shard_that_is_not_needed_does_not_matter(tmp_path: Path) -> None:
    filled(tmp_path, [0, 1], 1)
    filled(tmp_path, range(GROUPS))
    flip(tmp_path / "shard-0001-00000.parquet")
    StageStore(tmp_path).seal(UPDATES, PROMPTS)
    assert_sealed_and_tidy(tmp_path)


def test_a_damaged_shard_of_another_writer_stops_the_seal_and_is_generated_again(tmp_path: Path) -> None:
    filled(tmp_path, [0, 1], 1)
    filled(tmp_path, range(2, GROUPS))
    flip(tmp_path / "shard-0001-00000.parquet")
    with pytest.raises(UserError, match=r"shard-0001-00000\.parquet: damaged.*run the same command again"):
        StageStore(tmp_path).seal(UPDATES, PROMPTS)
    resumed = StageStore(tmp_path)
    assert set(range(GROUPS)) - resumed.verified_groups() == {0, 1}
    filled(tmp_path, [0, 1])
    StageStore(tmp_path).seal(UPDATES, PROMPTS)
    assert_sealed_and_tidy(tmp_path)


def test_what_another_process_writes_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that shows files late, and one that never does because it is not shared."""
    leader = StageStore(tmp_path)
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            filled(tmp_path, [4, 5], 1)

    monkeypatch.setattr(store_module.time, "sleep", nap)
    assert leader.wait_for({4, 5}, sealed=False)
    assert len(naps) == 3
    monkeypatch.setattr(store_module, "VISIBLE_SECONDS", 0.0)
    assert not leader.wait_for({4, 5, 6}, sealed=False)
    assert not leader.wait_for(set(), sealed=True)


def test_shards_of_a_writer_without_its_manifest_are_named_and_kept(tmp_path: Path) -> None:
    """A shared file system may say for a while that the manifest is not there."""
    filled(tmp_path, [0])
    filled(tmp_path, [1, 2], 2)
    manifest = (tmp_path / "manifest-0002.json").rename(tmp_path / "aside")
    store = StageStore(tmp_path, writer=2)
    with pytest.raises(UserError, match=r"manifest-0002.json is missing.*shard-0002-00000.parquet"):
        store.append(group(3))
    manifest.rename(tmp_path / "manifest-0002.json")
    store.append(group(3))
    assert StageStore(tmp_path).verified_groups() == {0, 1, 2}
