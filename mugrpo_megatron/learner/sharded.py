"""Fill Megatron's sharded state from a distributed checkpoint of any layout, tensors only.

Megatron's own loader unpickles the checkpoint's index and its objects freely; `files.torch_dist` reads neither so.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

from mugrpo_megatron.files.torch_dist import Reader
from mugrpo_megatron.learner.model import PolicyModel

EXTRA_STATE = "_extra_state"


def fill(state: Any, reader: Reader) -> Any:
    """The state with a filled tensor for each sharded one, in its own memory where it has some, and without objects.

    Every rank reads what it holds; nothing is collective. Raises UserError when the checkpoint lacks a tensor, holds
    another shape of it, or is damaged.
    """
    match state:
        case ShardedTensor():
            return _tensor(state, reader)
        case ShardedTensorFactory():
            return state.merge_fn(fill(state.build(), reader))
        case Mapping():
            kept = {name: value for name, value in state.items() if not isinstance(value, ShardedObject)}
            return {name: fill(value, reader) for name, value in kept.items()}
        case list():
            return [fill(value, reader) for value in state]
        case _:
            raise TypeError(f"a sharded state holds tensors, not {type(state).__name__}")


def load_weights(chunk: PolicyModel, tensors: dict[str, torch.Tensor]) -> None:
    """Load a chunk's whole state, without the objects that `fill` leaves out."""
    missing, unexpected = chunk.load_state_dict(tensors, strict=False)
    if unexpected or (lost := [name for name in missing if not name.endswith(EXTRA_STATE)]):
        raise RuntimeError(f"the model's state has other names than its sharded state: {unexpected or lost}")


def load_model(chunks: list[PolicyModel], directory: Path) -> None:
    """Fill this rank's parameters from a distributed checkpoint of any layout."""
    reader = Reader(directory)
    for chunk in chunks:
        load_weights(chunk, fill(chunk.sharded_state_dict(), reader))


def _tensor(sharded: ShardedTensor, reader: Reader) -> torch.Tensor:
    data = torch.empty(sharded.local_shape, dtype=sharded.dtype) if sharded.data is None else sharded.data.detach()
    whole = data.view((1,) * sharded.prepend_axis_num + tuple(data.shape))
    reader.fill(whole, sharded.key, tuple(sharded.global_offset), padded=sharded.allow_shape_mismatch)
    return data
