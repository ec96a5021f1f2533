"""The SGLang engines of one host process, which hold the same weights and answer as one.

On CUDA there is one. On CPU there may be several replicas (`cpu.sglang`): the responses to one prompt are sampled by
the replica with the fewest requests, and every other command goes to all replicas.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
from collections import ChainMap
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mugrpo_megatron.engine import sglang_compat
from mugrpo_megatron.engine.launch import SUMMING
from mugrpo_megatron.engine.queue import LoadReading, read_load
from mugrpo_megatron.files.tensors import TensorChecksums, tensor_checksums

IDLE_SECONDS = 600.0
"""The longest wait for an engine to become idle after its last response."""


class Replicas:
    """The SGLang engines of this process, which were created in its main thread and share that thread's event loop."""

    def __init__(self, engines: Sequence[Any]) -> None:
        self._engines = engines
        self._in_flight = [0] * len(engines)
        """Number of requests in flight in each engine."""
        self._updating = False
        """Whether a weight update has begun (`_begin_update`) and not ended."""

    @property
    def ranks(self) -> int:
        return int(self._engines[0].server_args.tp_size)

    def freeze_gc(self) -> None:
        """Tell Python's garbage collection, here and in the engines' processes, to skip all objects that exist now."""
        for engine in self._engines:
            engine.freeze_gc()

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """Run `awaitable` in the event loop and return its result."""
        return self._engines[0].loop.run_until_complete(awaitable)

    async def generate(self, input_ids: list[list[int]], masked: bool = False, **request: Any) -> list[dict[str, Any]]:
        """Generate on the engine with the fewest requests; `masked` asks for sampling masks too.

        Returns SGLang's output for each item of `input_ids`.
        """
        index = self._in_flight.index(min(self._in_flight))
        self._in_flight[index] += len(input_ids)
        try:
            return await sglang_compat.generate(self._engines[index], masked, input_ids=input_ids, **request)
        finally:
            self._in_flight[index] -= len(input_ids)

    def abort(self, names: Sequence[str] | None = None) -> None:
        """Abort the requests whose `rid` begins with one of `names`, by default all; a name without one is ignored."""
        for engine in self._engines:
            if names is None:
                engine.tokenizer_manager.abort_request(abort_all=True)
            for name in names or ():
                engine.tokenizer_manager.abort_request(name)

    @property
    def states(self) -> Mapping[str, Any]:
        """SGLang's state of each unfinished request."""
        return ChainMap(*[engine.tokenizer_manager.rid_to_state for engine in self._engines])

    async def load(self, tokens: int) -> LoadReading:
        """Return the engines' present load, together with `tokens`, the number of tokens sampled so far."""
        snapshots = [await engine.tokenizer_manager.get_loads() for engine in self._engines]
        return read_load(tokens, [snapshot for schedulers in snapshots for snapshot in schedulers])

    def update_weights(self, serialized: list[bytes]) -> None:
        """Load a bucket of weights into every engine; `serialized` has an item for each rank of each engine.

        For SGLang a sync is one weight update, which its first bucket begins and `end_update` ends.
        """
        self._begin_update()
        loaders = [name for name in self._engines[0].server_args.custom_weight_loader if name != SUMMING]
        load_format = loaders[0] if loaders else "flattened_bucket"
        buckets = [serialized[start : start + self.ranks] for start in range(0, len(serialized), self.ranks)]
        self.run(
            _all(
                sglang_compat.update_weights(engine, bucket, load_format)
                for engine, bucket in zip(self._engines, buckets, strict=True)
            )
        )

    def _begin_update(self) -> None:
        if not self._updating:
            self.run(_all(map(sglang_compat.begin_update, self._engines)))
        self._updating = True

    def end_update(self) -> None:
        if self._updating:
            self.run(_all(map(sglang_compat.end_update, self._engines)))
        self._updating = False

    def checksums(self) -> list[TensorChecksums]:
        """Compute the checksums of the weights of each tensor parallel rank; RuntimeError when two engines differ."""
        replicas = []
        self._begin_update()
        for engine in self._engines:  # one after the other, since all engines write the same file
            self.run(sglang_compat.update_weights(engine, [pickle.dumps([])] * self.ranks, SUMMING))
            replicas.append(read_sums())
        self.end_update()
        if any(other != replicas[0] for other in replicas):
            raise RuntimeError(
                "the engine's replicas hold different weights, although each got the same buckets, so one of them has "
                "loaded a bucket wrongly"
            )
        return replicas[0]

    def flush_cache(self) -> None:
        """Wait until the engines are idle, and empty their prefix caches; RuntimeError if they are busy too long."""
        self.run(_all(map(_flush_cache, self._engines)))

    def release(self, tags: list[str]) -> None:
        """Free the engines' memory that SGLang names by `tags`. First call `flush_cache`: the engines must be idle."""
        # SGLang may run one more step after its last response. If it does so now, an assertion that it is idle fails
        # and ends the scheduler (managers/scheduler_components/weight_updater.py).
        self.run(_all(sglang_compat.release_memory(engine, tags) for engine in self._engines))

    def resume(self, tags: list[str]) -> None:
        self.run(_all(sglang_compat.resume_memory(engine, tags) for engine in self._engines))


async def _all(awaitables: Iterable[Awaitable[None]]) -> None:
    await asyncio.gather(*awaitables)


async def _flush_cache(engine: Any) -> None:
    answer = await engine.tokenizer_manager.flush_cache(timeout_s=IDLE_SECONDS)
    if not answer.success:
        raise RuntimeError(f"the engine is not idle after {IDLE_SECONDS:g} s: {answer.message}")


def write_sums(model: torch.nn.Module, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Write checksums of the engine's weights to a file, for `read_sums`.

    SGLang calls this as a `custom_weight_loader` in each tensor parallel rank, with no `tensors`. The first rank writes
    all ranks' sums into the scratch folder that it shares with the host.
    """
    # SGLang's own checksums need CUDA (utils/weight_checker.py), and its `save_sharded_model` writes the whole model to
    # a disk. The parameters that are skipped here, the KV cache's scales, are skipped by its own checker too.
    weights = (
        (name, parameter)
        for name, parameter in model.named_parameters()
        if not getattr(parameter, "_skip_weight_check", False)
    )
    if ranks := sglang_compat.gather_on_first_rank(tensor_checksums(weights)):
        _sums_path().write_text(json.dumps(ranks), encoding="utf-8")


def read_sums() -> list[TensorChecksums]:
    """Read the checksums that `write_sums` wrote: an entry for each tensor parallel rank."""
    ranks = json.loads(_sums_path().read_text(encoding="utf-8"))
    return [{name: (dtype, sha256) for name, (dtype, sha256) in rank.items()} for rank in ranks]


def _sums_path() -> Path:
    # `tempfile.gettempdir()` is not used: if the disk of TMPDIR is full, it names /tmp.
    return Path(os.environ["TMPDIR"]) / "weight-sums.json"
