"""A model's sharded state is filled from a checkpoint without its objects, and loaded without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

from checkpoints_convert.distributed_checkpoint import write_metadata, write_part
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.torch_dist import Reader
from mugrpo_megatron.learner.checkpoint import fill, load_weights

WHOLE = torch.arange(24.0).view(6, 4)


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    with write_part(tmp_path / "__0_0.distcp") as writer:
        for start in (0, 2, 4):
            writer.tensor("w", (start, 0), WHOLE.shape, WHOLE[start : start + 2])
        writer.object("extra", "an object")
    write_metadata(tmp_path, writer.items)
    return Reader(tmp_path)


class Layer(torch.nn.Module):
    """Has a state that is no tensor, as Transformer Engine's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, 4))
        self.told: list[Any] = []

    def get_extra_state(self) -> Any:
        return None

    def set_extra_state(self, state: Any) -> None:
        self.told.append(state)


def part(data: torch.Tensor, rank: int, ranks: int, **options: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("w", data, (0, rank, ranks), **options)


def test_a_shard_is_filled_in_place_and_objects_are_left_out(reader: Reader) -> None:
    layer = Layer()
    state = {
        "weight": part(layer.weight.data, 1, 3),
        "_extra_state": ShardedObject("extra", None, (1,), (0,)),
    }
    filled = fill([state], reader)
    assert filled[0].keys() == {"weight"}
    assert filled[0]["weight"].data_ptr() == layer.weight.data_ptr()
    assert torch.equal(layer.weight, WHOLE[2:4])
    load_weights(layer, filled[0])  # type: ignore[arg-type]
    assert layer.told == [], "no state is set"
    for wrong in ({}, {**filled[0], "other": torch.zeros(1)}):
        with pytest.raises(RuntimeError, match="other names than its sharded state"):
            load_weights(layer, wrong)  # type: ignore[arg-type]


def test_a_factory_builds_and_merges(reader: Reader) -> None:
    def build(key: str, data: torch.Tensor, replica: Any, flattened: Any) -> dict[str, ShardedTensor]:
        return {"up": part(data[:2], 2, 3), "gate": part(data[2:], 0, 3)}

    factory = ShardedTensorFactory("w", torch.zeros(4, 4), build, lambda parts: torch.cat([parts["up"], parts["gate"]]))
    assert torch.equal(fill({"fc1": factory}, reader)["fc1"], torch.cat([WHOLE[4:], WHOLE[:2]]))


def test_padding_is_zero_and_another_shape_is_refused(reader: Reader) -> None:
    padded = part(torch.full((4, 4), -1.0), 1, 2, allow_shape_mismatch=True)
    assert torch.equal(fill(padded, reader), torch.cat([WHOLE[4:], torch.zeros(2, 4)]))
    with pytest.raises(UserError, match="without the region 4:8 x 0:4"):
        fill(part(torch.zeros(4, 4), 1, 2), reader)


def test_anything_else_is_a_mistake_of_ours(reader: Reader) -> None:
    with pytest.raises(TypeError, match="holds tensors, not int"):
        fill({"a": 1}, reader)
