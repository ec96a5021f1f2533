"""Routes next to a stage: read as written, only the parts that are asked for, and no flipped bit passes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.systems import Replay
from mugrpo_megatron.samples import InMemoryRoutes, Sample, expert_type
from mugrpo_megatron.stages import routes as module
from mugrpo_megatron.stages.routes import RouteColumn, route_column, with_routes
from mugrpo_megatron.stages.store import StageStore
from tests.refusals import refuses

OF = {"stage": "0123"}
LENGTHS = [[3, 1, 5], [2, 2]]
LAYERS, CHOSEN = 3, 2


def experts(lengths: list[int], total: int, seed: int) -> np.ndarray:
    """[L, T, k]"""
    rng = np.random.default_rng(seed)
    return rng.integers(0, total, (LAYERS, sum(lengths), CHOSEN)).astype(expert_type(total))


def routes(path: Path) -> RouteColumn:
    return RouteColumn(path, OF, "do this")


def written(path: Path, total: int = 4, lengths: list[list[int]] = LENGTHS) -> list[np.ndarray]:
    tables = [experts(each, total, seed) for seed, each in enumerate(lengths)]
    with routes(path).write() as append:
        for each, table in zip(lengths, tables, strict=True):
            append(each, iter(table))
    return tables


@settings(max_examples=20)
@given(
    lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=3),
    total=st.sampled_from([4, 256, 257, 60_000]),
    layers=st.sets(st.integers(0, LAYERS - 1), min_size=1).map(sorted),
)
def test_what_is_written_is_read(
    lengths: list[list[int]], total: int, layers: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("routes") / "routes.bin"
    tables = written(path, total, lengths)
    for update, table in enumerate(tables):
        ends = np.cumsum(lengths[update])
        found = routes(path).read(update, lengths[update])
        for one, wanted in zip(found, np.split(table, ends[:-1], axis=1), strict=True):
            read = one.read(layers)
            assert read.dtype == table.dtype
            np.testing.assert_array_equal(read, wanted[layers])


def test_a_token_takes_a_byte_for_each_expert_of_each_layer(tmp_path: Path) -> None:
    """And each response four more for each layer, which is its checksum."""
    tokens, responses = sum(map(sum, LENGTHS)), sum(map(len, LENGTHS))
    for total, width in ((4, 1), (257, 2)):
        written(tmp_path / "routes.bin", total)
        size = LAYERS * (tokens * CHOSEN * width + 4 * responses)
        assert (tmp_path / "routes.bin").stat().st_size == size


def test_only_the_bytes_of_the_layers_and_responses_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "routes.bin"
    written(path)
    asked: list[int] = []

    def pread(file: int, size: int, place: int) -> bytes:
        asked.append(size)
        return real(file, size, place)

    real = os.pread
    monkeypatch.setattr(module.os, "pread", pread)
    found = routes(path).read(0, LENGTHS[0])
    assert asked == [4 * LAYERS * 3], "the checksums of an update"
    found[2].read([1])
    assert asked[1:] == [5 * CHOSEN], "one layer of one response"


def test_no_flipped_bit_gives_other_routes(tmp_path: Path) -> None:
    path = tmp_path / "routes.bin"
    tables = written(path)
    for file in (path, routes(path).index):
        whole = file.read_bytes()
        for place in range(0, len(whole), max(1, len(whole) // 150)):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            try:
                parts = [routes(path).read(update, lengths) for update, lengths in enumerate(LENGTHS)]
                found = [np.concatenate([one.read(range(LAYERS)) for one in part], axis=1) for part in parts]
            except UserError as error:
                assert str(error).endswith("do this")  # noqa: PT017
                continue
            assert all((one == other).all() for one, other in zip(found, tables, strict=True)), place
        file.write_bytes(whole)


def test_those_of_another_stage_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "routes.bin"
    written(path)
    with pytest.raises(UserError, match="was computed for other responses or another policy; do this"):
        RouteColumn(path, {"stage": "4567"}, "do this").read(0, LENGTHS[0])
    refuses("for other responses", routes(path).read, 0, [3, 1, 4])


def test_a_file_cut_short_is_absent(tmp_path: Path) -> None:
    path = tmp_path / "routes.bin"
    written(path)

    def cut_short() -> None:
        with routes(path).write() as append:
            append(LENGTHS[0], iter(experts(LENGTHS[0], 4, 0)))
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        cut_short()
    assert not routes(path).complete, "the checksums went first"
    assert not list(tmp_path.glob(".*"))


def test_a_rank_that_does_not_write_takes_part_in_what_computes_the_layers(tmp_path: Path) -> None:
    gone = []
    with routes(tmp_path / "routes.bin").write(enabled=False) as append:
        append([1], (gone.append(layer) or np.zeros((1, 1)) for layer in range(3)))  # type: ignore[func-returns-value]
    assert gone == [0, 1, 2]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("replay", "has"), [("off", False), ("learner", True)])
def test_samples_come_with_the_routes_of_their_update(replay: Replay, has: bool, tmp_path: Path) -> None:
    def sample(tokens: int) -> Sample:
        ids = np.zeros(tokens, dtype=np.int32)
        return Sample(0, "p", ids[:1], ids, np.zeros(tokens, dtype=np.float32), 0.0, 0, "stop")

    samples = [sample(tokens) for tokens in LENGTHS[0]]
    assert with_routes(samples, tmp_path, "0123", 0, replay) == samples, "before they are recorded"
    tables = written(route_column(tmp_path, "learner", OF).path)
    found = with_routes(samples, tmp_path, "0123", 0, replay)
    assert [one.routes is not None for one in found] == [has] * 3
    if has:
        assert found[2].routes is not None
        np.testing.assert_array_equal(found[2].routes.read(range(LAYERS)), tables[0][:, 4:])


def generated(group: int, tokens: list[int], total: int) -> list[Sample]:
    """A group as the engine returns it, routes included."""
    rng = np.random.default_rng(group)
    ids = np.array([group], dtype=np.int32)
    return [
        Sample(
            group,
            f"p{group}",
            ids,
            np.zeros(n, dtype=np.int32),
            np.zeros(n, dtype=np.float32),
            0.0,
            0,
            "stop",
            routes=InMemoryRoutes(rng.integers(0, total, (LAYERS, n, CHOSEN)).astype(expert_type(total))),
        )
        for n in tokens
    ]


@pytest.mark.parametrize("total", [4, 300])
def test_the_engines_routes_go_through_shards_into_a_file_of_their_own(total: int, tmp_path: Path) -> None:
    """Groups of two writers in any order; the sealed stage is that of a run without routes, byte for byte."""
    groups = [generated(group, [1 + group, 2], total) for group in range(6)]
    stores = {}
    for name, kept in (("with", True), ("without", False)):
        directory = tmp_path / name
        one, other = StageStore(directory), StageStore(directory, writer=1)
        for place, group in enumerate([4, 1, 5, 0, 2, 3]):
            samples = groups[group] if kept else [replace(sample, routes=None) for sample in groups[group]]
            (one, other)[place % 2].append(samples)
        other.flush()
        one.seal(3, 2)
        stores[name] = StageStore(directory, replay="rollout" if kept else "off")
    assert stores["with"].content == stores["without"].content
    for update in range(3):
        wanted = [sample for group in groups[2 * update : 2 * update + 2] for sample in group]
        for found, sample in zip(stores["with"].read_update(update), wanted, strict=True):
            assert found.routes is not None
            assert sample.routes is not None
            np.testing.assert_array_equal(found.routes.read([2, 0]), sample.routes.read([2, 0]))
    assert stores["without"].read_update(0)[0].routes is None
    refuses("generate the stage again with", StageStore(tmp_path / "without", replay="rollout").read_update, 0)


def test_a_stage_with_some_routes_is_refused(tmp_path: Path) -> None:
    one, other = generated(0, [2, 2], 4)
    store = StageStore(tmp_path)
    store.append([one, replace(other, routes=None)])
    refuses("1 of 2 samples have the engine's routes; all samples of a stage", store.flush, error=ValueError)
