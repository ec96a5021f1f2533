"""Save the learner's full state (weights, master weights, moments, counters) and load it in any layout.

megatron.core.dist_checkpointing writes the state in model space: a moment has its parameter's shape and name. So
tensor, pipeline and data parallel sizes may change between save and load. Each state is written once, by one of the
data parallel ranks that hold a part of it. A checkpoint has no states of random generators: dropout is off, and all
randomness of a run derives from `run.seed` and the cursor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.checkpoint_state import (
    Saved,
    create_empty_directory,
    file_checksums,
    first_damage,
    publish,
    read_state,
)
from mugrpo_megatron.files.durable import full_disk_as_user_error, resumable
from mugrpo_megatron.files.torch_dist import Reader
from mugrpo_megatron.learner.groups import Ranks, named_phase
from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.learner.model import PolicyModel, policy
from mugrpo_megatron.learner.optimizer import (
    assign_writers,
    gather_states,
    read_states,
    scaler_state,
    set_scaler_state,
    set_steps,
    shards,
)

EXTRA_STATE = "_extra_state"


def fill_state(state: Any, reader: Reader) -> Any:
    """Read the tensors of a Megatron sharded state from a checkpoint, and return them in the state's structure.

    Tensors that have memory are filled in place; values that are not tensors (ShardedObject) are left out. Every rank
    reads its own shards, without a collective. Raises UserError when the checkpoint lacks a tensor, holds another shape
    of it, or is damaged.
    """
    match state:
        case ShardedTensor():
            return _tensor(state, reader)
        case ShardedTensorFactory():
            return state.merge_fn(fill_state(state.build(), reader))
        case Mapping():
            values = {name: value for name, value in state.items() if not isinstance(value, ShardedObject)}
            return {name: fill_state(value, reader) for name, value in values.items()}
        case list():
            return [fill_state(value, reader) for value in state]
        case _:
            raise TypeError(f"a sharded state holds tensors, not {type(state).__name__}")


def load_weights(chunk: PolicyModel, tensors: dict[str, torch.Tensor]) -> None:
    """Load `tensors`, as `fill_state` returns them, into a chunk.

    Raises RuntimeError if the tensor of a trained parameter is missing, or if the chunk has no parameter for a tensor.
    """
    missing, unexpected = chunk.load_state_dict(tensors, strict=False)
    frozen = {name for name, parameter in chunk.named_parameters() if not parameter.requires_grad}
    if unexpected or (absent := [name for name in missing if name not in frozen and not name.endswith(EXTRA_STATE)]):
        raise RuntimeError(
            "a model chunk and its sharded state name different parameters, which is an error of this program: "
            f"{unexpected or absent}"
        )


def load_model(chunks: list[PolicyModel], directory: Path) -> None:
    """Fill this rank's parameters from a distributed checkpoint of any layout."""
    reader = Reader(directory)
    for chunk in chunks:
        load_weights(chunk, fill_state(chunk.sharded_state_dict(), reader))


def _tensor(sharded: ShardedTensor, reader: Reader) -> torch.Tensor:
    data = torch.empty(sharded.local_shape, dtype=sharded.dtype) if sharded.data is None else sharded.data.detach()
    stacked = data.view((1,) * sharded.prepend_axis_num + tuple(data.shape))
    reader.fill(stacked, sharded.key, tuple(sharded.global_offset), padded=sharded.allow_shape_mismatch)
    return data


class DiskWriter(torch_checkpoint.FileSystemWriter):
    """A writer that turns the error of a full disk into a UserError on the rank that has it.

    torch sends the other ranks only the last exception of a chain, and the error of the full disk may be an earlier
    one.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with full_disk_as_user_error(Path(self.path)):
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with full_disk_as_user_error(Path(self.path)):
            super().finish(metadata, results)


class WriteInProcess(TorchDistSaveShardedStrategy):
    """Writes Megatron's `torch_dist` format in this process, not in forked ones.

    `async_save` returns a request, and executing the request writes the files. Its collectives use `group`.

    Megatron's own strategy forks writers and starts a manager process for their results. That takes seconds for the
    first save of a small model, forks a process that has threads, and leaves the manager running if a rank is killed.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__("torch_dist", 1)
        self._group = group

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path, *_: Any) -> AsyncRequest:
        tensors, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        torch_state = mcore_to_pyt_state_dict(tensors, False)

        def write() -> None:
            torch_checkpoint.save(
                torch_state,
                storage_writer=DiskWriter(checkpoint_dir, single_file_per_rank=True),
                planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
                process_group=self._group,
            )

        return AsyncRequest(write, (), [])


def begin_save(
    learner: Learner,
    directory: Path,
    position: dict[str, Any],
    group: dist.ProcessGroup | None = None,
    copy: bool = False,
) -> Callable[[], None]:
    """Collect the learner's state, and return the function that writes it and `position` to `directory`.

    `position` holds JSON values: `run`, the run's id, and `cursor`, at which it resumes.

    Every rank calls the returned function once; the directory then appears complete or not at all. With `copy` training
    may continue between the two calls, and the function may run in another thread of every rank: `group` is then a gloo
    group of all ranks that nothing else uses. Both calls are collective, and both raise UserError on every rank when
    the disk is full.
    """
    ranks = learner.ranks
    # All ranks write into this directory, so its name cannot be a random one.
    partial = resumable(directory)
    with named_phase(ranks, f"saving {directory}"):
        _on_rank_zero(ranks, None, lambda: create_empty_directory(partial, _bytes(learner)))
        with full_disk_as_user_error(directory):
            request = dist_checkpointing.save(
                _to_save(learner, copy), str(partial), WriteInProcess(group), async_sharded_save=True
            )
            for finalize in request.finalize_fns:
                # This writes Megatron's metadata. The checkpoint is not complete before `publish` writes its state.
                finalize()
    state = position | _state(learner)

    def write() -> None:
        with named_phase(ranks, f"saving {directory}"):
            try:
                request.async_fn()
            except torch_checkpoint.CheckpointException as failure:
                raise _explained(failure) from failure
            sums: list[dict[str, str]] = [{}] * ranks.world
            dist.all_gather_object(sums, file_checksums(partial, ranks.rank, ranks.world), group=group)
            files = {name: sha256 for rank_sums in sums for name, sha256 in rank_sums.items()}
            _on_rank_zero(ranks, group, lambda: publish(partial, directory, {**state, "files": files}))

    return write


def _bytes(learner: Learner) -> int:
    """The approximate bytes of a checkpoint, from the bytes of this rank's shards and the number of shards."""
    stages = learner.ranks.pp_size
    dense = learner.ranks.tp_size * stages
    experts = parallel_state.get_expert_tensor_and_model_parallel_world_size() * stages
    return sum(
        # 12 bytes for the master weight and two moments in float32.
        p.numel() * (p.element_size() + 12) * (dense if getattr(p, "allreduce", True) else experts)
        for chunk in learner.chunks
        for p in chunk.parameters()
        if p.requires_grad
    )


def find_damage(learner: Learner, directory: Path) -> str | None:
    """A sentence about the first damage that a rank finds in the checkpoint in `directory`; None if none finds any.

    Collective; each rank checks its share of the files (`first_damage`).
    """
    ranks = learner.ranks
    causes: list[str | None] = [None] * ranks.world
    dist.all_gather_object(causes, first_damage(directory, ranks.rank, ranks.world))
    return next(filter(None, causes), None)


def load(learner: Learner, directory: Path) -> Saved:
    """Load the checkpoint in `directory` into this learner, whatever layout wrote it.

    Returns the saved state's JSON values, among them `run` and `cursor` (`begin_save`). Collective. Raises UserError
    when the directory is not a complete checkpoint or belongs to another model.
    """
    state = read_state(directory)
    expected = _state(learner)["model"]
    if state["model"] != expected:
        raise UserError(
            f"{directory}: the checkpoint holds the model {state['model']}, but the recipe, with model.path = "
            f"{learner.recipe.model.directory}, describes {expected}; resume with the model the run was started from, "
            "and with the same [lora]"
        )
    with named_phase(learner.ranks, f"loading {directory}"), torch.no_grad():
        reader, model = Reader(directory), _model(learner)
        for chunk, sharded in zip(learner.chunks, model, strict=True):
            load_weights(policy(chunk), fill_state(sharded, reader))
        for shard in shards(learner.optimizer):
            read_states(shard, model, lambda state: cast(torch.Tensor, fill_state(state, reader)))
        set_steps(learner.optimizer, state["steps_done"])
        set_scaler_state(learner.optimizer, state.get("loss_scaler", {}))
    learner.updates_done, learner.steps_done = state["updates_done"], state["steps_done"]
    return state


def _to_save(learner: Learner, copy: bool) -> dict[str, Any]:
    """The learner's sharded weights as `model`, and the optimizer states that this rank writes as `optimizer`.

    The optimizer states are copies in host memory; with `copy`, so are the weights that this rank writes.
    """
    model = _model(learner)
    for shard in shards(learner.optimizer):
        assign_writers(shard, model)
    states = [state for shard in shards(learner.optimizer) for state in gather_states(shard, model)]
    if copy:
        for value in nested_values(model):
            if isinstance(value, ShardedTensor | ShardedTensorFactory) and is_main_replica(value.replica_id):
                value.data = value.data.detach().to("cpu", copy=True)
    # An empty list is left out, because Megatron would save it as a value that every rank must have.
    return {"model": model, **({"optimizer": states} if states else {})}


def _model(learner: Learner) -> list[dict[str, Any]]:
    """The sharded state of each chunk. If adapters are trained, only theirs, because no other weight changes."""
    states = [chunk.sharded_state_dict() for chunk in learner.models]
    if learner.adapters is None:
        return states
    return [{name: value for name, value in state.items() if _is_trained(value)} for state in states]


def _is_trained(value: Any) -> bool:
    return isinstance(value, ShardedTensor | ShardedTensorFactory) and value.data.requires_grad


def _state(learner: Learner) -> dict[str, Any]:
    return {
        "updates_done": learner.updates_done,
        "steps_done": learner.steps_done,
        "loss_scaler": scaler_state(learner.optimizer),
        "model": {
            "family": learner.architecture.family,
            **learner.architecture.letters,
            **(learner.adapters.identity if learner.adapters else {}),
        },
    }


def _explained(failure: torch_checkpoint.CheckpointException) -> BaseException:
    """The UserError that a full disk has raised on a rank (`DiskWriter`); without one, `failure` itself."""
    return next((error for error, _ in failure.failures.values() if isinstance(error, UserError)), failure)


def _on_rank_zero(ranks: Ranks, group: dist.ProcessGroup | None, action: Callable[[], None]) -> None:
    """Run `action` on rank 0 while the others wait; a UserError on rank 0 is raised on every rank."""
    outcome: list[UserError | None] = [None]
    if ranks.rank == 0:
        try:
            action()
        except UserError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, group=group)
    if outcome[0] is not None:
        raise outcome[0]
