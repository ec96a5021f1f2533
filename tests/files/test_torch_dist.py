"""Distributed checkpoints are read as data: any region of any grid of chunks, and an index like torch's own."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from checkpoints_convert.hf_to_megatron import write_metadata, write_part
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.torch_dist import INDEX, Reader, read_index
from tests.refusals import refuses

CUTS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=3)
"""Sizes of the chunks along each axis."""


def write(directory: Path, cuts: list[list[int]], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor `w` cut at every axis, next to an object; each chunk lies in one of two files."""
    whole = torch.arange(math.prod(map(sum, cuts)), dtype=torch.float32).view([sum(axis) for axis in cuts]).to(dtype)
    chunks: list[tuple[tuple[int, ...], torch.Tensor]] = [((), whole)]
    for axis, sizes in enumerate(cuts):
        starts = [sum(sizes[:place]) for place in range(len(sizes))]
        chunks = [
            ((*offsets, start), chunk.narrow(axis, start, size))
            for offsets, chunk in chunks
            for start, size in zip(starts, sizes, strict=True)
        ]
    items = []
    for number in range(2):
        with write_part(directory / f"__{number}_0.distcp") as writer:
            for offsets, chunk in chunks[number::2]:
                writer.tensor("w", offsets, whole.shape, chunk)
            writer.object(f"extra/{number}", [None])
        items += writer.items
    write_metadata(directory, items)
    return whole


@settings(max_examples=25)
@given(cuts=CUTS, data=st.data())
def test_any_region_comes_from_any_grid(tmp_path_factory: pytest.TempPathFactory, cuts: Any, data: Any) -> None:
    directory = tmp_path_factory.mktemp("grid")
    whole = write(directory, cuts, data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    reader = Reader(directory)
    assert reader.shape("w") == tuple(whole.shape)
    assert reader.dtype("w") == whole.dtype
    starts = [data.draw(st.integers(0, size - 1)) for size in whole.shape]
    sizes = [data.draw(st.integers(1, size - start)) for size, start in zip(whole.shape, starts, strict=True)]
    region = whole[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]
    target = torch.full(sizes, -1.0)
    reader.fill(target, "w", tuple(starts))
    assert torch.equal(target, region.float())
    padded = torch.full([size + 2 for size in sizes], -1.0)
    reader.fill(padded, "w", tuple(starts), padded=True)
    rest = whole[tuple(slice(start, start + size + 2) for start, size in zip(starts, sizes, strict=True))]
    assert padded[tuple(map(slice, rest.shape))].equal(rest.float())
    assert padded.sum() == rest.float().sum()
    refuses("without the region", reader.fill, padded, "w", tuple(size - 1 for size in whole.shape))


@settings(max_examples=10)
@given(cuts=CUTS)
def test_the_index_says_what_torch_reads_in_it(tmp_path_factory: pytest.TempPathFactory, cuts: Any) -> None:
    directory = tmp_path_factory.mktemp("index")
    write(directory, cuts)
    theirs: Metadata = pickle.loads((directory / INDEX).read_bytes())
    ours = read_index(directory)
    described = {
        key: value for key, value in theirs.state_dict_metadata.items() if isinstance(value, TensorStorageMetadata)
    }
    assert ours.keys() == described.keys() == {"w"}
    for key, tensor in ours.items():
        assert tensor.shape == tuple(described[key].size)
        assert tensor.dtype == str(described[key].properties.dtype).removeprefix("torch.")
        chunks = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in described[key].chunks}
        assert {(chunk.offsets, chunk.sizes) for chunk in tensor.chunks} == chunks
    places = {(chunk.file, chunk.start, chunk.length) for tensor in ours.values() for chunk in tensor.chunks}
    stored = {
        (info.relative_path, info.offset, info.length)
        for index, info in theirs.storage_data.items()
        if index.offset is not None
    }
    assert places == stored


def edited(directory: Path, edit: Any) -> None:
    metadata = pickle.loads((directory / INDEX).read_bytes())
    (directory / INDEX).write_bytes(pickle.dumps(edit(metadata) or metadata))


def first(metadata: Metadata) -> tuple[Any, Any]:
    return next((index, info) for index, info in metadata.storage_data.items() if index.offset is not None)


def place(path: Any = "__0_0.distcp", start: Any = 0, length: Any = 10, transforms: Any = None) -> Any:
    def edit(metadata: Metadata) -> None:
        metadata.storage_data[first(metadata)[0]] = _StorageInfo(path, start, length, transforms)

    return edit


def tensor(**fields: Any) -> Any:
    def edit(metadata: Metadata) -> None:
        for name, value in fields.items():
            setattr(metadata.state_dict_metadata["w"], name, value)

    return edit


WRONG: dict[str, tuple[Any, str]] = {
    "a file above": (
        place("../c/__0_0.distcp"),
        r"names the file '\.\./c/__0_0\.distcp', but only names of files beside it are allowed",
    ),
    "an absolute file": (place("/etc/passwd"), "names the file '/etc/passwd', but only"),
    "a number as a file": (place(3), "names the file 3, but only"),
    "no such file": (place("__7_0.distcp"), r"__7_0\.distcp is missing, though \.metadata names it"),
    "beyond the file": (
        place(start=10**9),
        r"__0_0\.distcp is truncated: \.metadata expects at least 1000000010 bytes",
    ),
    "before the file": (place(start=-1), "a tensor's shape or its place in a file is not a list of whole numbers"),
    "a text as a length": (
        place(length="10"),
        "a tensor's shape or its place in a file is not a list of whole numbers",
    ),
    "a flag as a length": (
        place(length=True),
        "a tensor's shape or its place in a file is not a list of whole numbers",
    ),
    "compressed": (place(transforms=["zstd"]), r"stored with the transformation \['zstd'\]"),
    "another shape": (tensor(size=torch.Size([9, 9])), "the chunks of w do not add up to its size"),
    "a smaller shape": (tensor(size=torch.Size([1, 1])), "that is outside of the tensor"),
    "other axes": (tensor(size=torch.Size([4])), "damaged"),
    "no chunks": (tensor(chunks=[]), "the chunks of w do not add up to its size"),
    "a list as a shape": (
        tensor(size=[4, 4]),
        "a tensor's shape or its place in a file is not a list of whole numbers",
    ),
    "no properties": (tensor(properties=None), "damaged"),
    "chunks twice": (
        lambda metadata: metadata.state_dict_metadata["w"].chunks.extend(metadata.state_dict_metadata["w"].chunks),
        "has two chunks that overlap",
    ),
    "a lost chunk": (lambda metadata: metadata.storage_data.pop(first(metadata)[0]) and None, "that is in no file"),
    "a list": (lambda metadata: [1, 2], "the index does not hold a checkpoint's metadata"),
    "nothing": (lambda metadata: Metadata({}), "damaged or not checkpoint metadata"),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_index_that_does_not_fit_is_refused(what: str, tmp_path: Path) -> None:
    edit, sentence = WRONG[what]
    directory = tmp_path / "c"
    directory.mkdir()
    write(directory, [[2, 2], [4]])
    edited(directory, edit)
    with pytest.raises(UserError, match=sentence) as refused:
        read_index(directory)
    assert "\n" not in str(refused.value)


def test_a_data_file_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [[2], [3]])
    chunk = read_index(tmp_path)["w"].chunks[0]
    whole = (tmp_path / chunk.file).read_bytes()
    for other in (torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64), [1, 2], {"w": torch.zeros(2, 3)}, None):
        path = tmp_path / chunk.file
        torch.save(other, path)
        data = path.read_bytes()
        path.write_bytes(data + bytes(max(0, len(whole) - len(data))))
        edited(tmp_path, place(chunk.file, 0, len(data)))
        refuses(r"__0_0\.distcp is damaged", Reader(tmp_path).read, "w", (), (2, 3))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    write(tmp_path, [[2], [3]])
    reader = Reader(tmp_path)
    assert reader.shape("v") is None
    refuses("has no v, which this model needs", reader.read, "v", (), (2, 3))
    refuses(r"w has shape \[2, 3\], without the region 0:2 x 0:4", reader.read, "w", (), (2, 4))
    assert reader.files == {INDEX, "__0_0.distcp"}
