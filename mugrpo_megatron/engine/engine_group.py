"""The SGLang engines of one host process, which hold the same weights and answer as one.

Nearly always there is one. On CPU there may be several (`cpu.sglang`): a group of responses goes to the engine
that has the fewest requests, and everything else to all of them.
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
from mugrpo_megatron.engine.queue import EngineLoad, read_load
from mugrpo_megatron.files.tensors import TensorChecksums, tensor_checksums

IDLE_SECONDS = 60.0
"""An engine that has answered everything has to become idle within this time."""


class EngineGroup:
    """Engines that were made one after the other in the main thread, whose event loop they share."""

    def __init__(self, engines: Sequence[Any]) -> None:
        self._engines = engines
        self._running = [0] * len(engines)
        """Requests of each engine."""
        self._updating = False
        """Whether an update of the weights has begun and not ended."""

    @property
    def ranks(self) -> int:
        """Tensor parallel size of each engine."""
        return int(self._engines[0].server_args.tp_size)

    def freeze_gc(self) -> None:
        """Have Python's garbage collector skip what the start has made, here and in the engines' processes."""
        for engine in self._engines:
            engine.freeze_gc()

    def run(self, work: Awaitable[Any]) -> Any:
        """The result of `work`, which the event loop runs."""
        return self._engines[0].loop.run_until_complete(work)

    async def generate(self, input_ids: list[list[int]], masked: bool = False, **request: Any) -> list[dict[str, Any]]:
        """SGLang's outputs of these prompts, which one engine answers together; `masked` as in `sglang_compat`."""
        number = self._running.index(min(self._running))
        self._running[number] += len(input_ids)
        try:
            return await sglang_compat.generate(self._engines[number], masked, input_ids=input_ids, **request)
        finally:
            self._running[number] -= len(input_ids)

    def abort(self) -> None:
        """Abort every request that an engine knows of."""
        for engine in self._engines:
            engine.tokenizer_manager.abort_request(abort_all=True)

    @property
    def states(self) -> Mapping[str, Any]:
        """What SGLang knows of each unfinished request."""
        return ChainMap(*[engine.tokenizer_manager.rid_to_state for engine in self._engines])

    async def load(self, tokens: int) -> EngineLoad:
        """The load, `tokens` being sampled."""
        snapshots = [await engine.tokenizer_manager.get_loads() for engine in self._engines]
        return read_load(tokens, [one for of_engine in snapshots for one in of_engine])

    def update_weights(self, serialized: list[bytes]) -> None:
        """Load a bucket of weights into every engine; one serialisation for each rank of each engine.

        The first bucket of a sync begins the update; `end_update` ends it.
        """
        self._begin_update()
        loaders = [name for name in self._engines[0].server_args.custom_weight_loader if name != SUMMING]
        load_format = loaders[0] if loaders else "flattened_bucket"
        shares = [serialized[start : start + self.ranks] for start in range(0, len(serialized), self.ranks)]
        self.run(
            _all(sglang_compat.update_weights(*pair, load_format) for pair in zip(self._engines, shares, strict=True))
        )

    def _begin_update(self) -> None:
        if not self._updating:
            self.run(_all(map(sglang_compat.begin_update, self._engines)))
        self._updating = True

    def end_update(self) -> None:
        """All weights of a sync are loaded."""
        if self._updating:
            self.run(_all(map(sglang_compat.end_update, self._engines)))
        self._updating = False

    def checksums(self) -> list[TensorChecksums]:
        """Of each tensor parallel rank; RuntimeError when two engines differ."""
        replicas = []
        self._begin_update()
        for engine in self._engines:  # one after the other: they write to the same file
            self.run(sglang_compat.update_weights(engine, [pickle.dumps([])] * self.ranks, SUMMING))
            replicas.append(read_sums())
        self.end_update()
        if any(other != replicas[0] for other in replicas):
            raise RuntimeError("the engine's replicas hold different weights")
        return replicas[0]

    def flush_cache(self) -> None:
        """Empty the prefix caches once the engines are idle: SGLang may run one more step after its last response.

        It ends itself when its memory is released before that.
        """
        self.run(_all(map(_flush_cache, self._engines)))

    def release(self, tags: list[str]) -> None:
        for engine in self._engines:
            engine.release_memory_occupation(tags)

    def resume(self, tags: list[str]) -> None:
        for engine in self._engines:
            engine.resume_memory_occupation(tags)


async def _all(work: Iterable[Awaitable[None]]) -> None:
    await asyncio.gather(*work)


async def _flush_cache(engine: Any) -> None:
    answer = await engine.tokenizer_manager.flush_cache(timeout_s=IDLE_SECONDS)
    if not answer.success:
        raise RuntimeError(f"the engine is not idle after {IDLE_SECONDS:g} s: {answer.message}")


def write_sums(model: torch.nn.Module, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Checksums of the engine's weights: SGLang calls this "loader of weights" in each tensor parallel rank.

    `tensors` is empty. SGLang's own checksums need CUDA, and its `save_sharded_model` writes the whole model to a disk.
    The first rank writes all ranks' sums to the scratch folder that the host shares with the engine's processes. The
    others may be on nodes whose files the host does not see. Left out is what SGLang's own checks leave out: the
    scales of the KV cache in a quantised model, which are parameters there and no weights.
    """
    weights = ((name, one) for name, one in model.named_parameters() if not getattr(one, "_skip_weight_check", False))
    if ranks := sglang_compat.of_all_ranks(tensor_checksums(weights)):
        _file().write_text(json.dumps(ranks), encoding="utf-8")


def read_sums() -> list[TensorChecksums]:
    """Read what was written of each rank of this host's engine."""
    ranks = json.loads(_file().read_text(encoding="utf-8"))
    return [{name: (dtype, sha256) for name, (dtype, sha256) in of_rank.items()} for of_rank in ranks]


def _file() -> Path:
    return Path(os.environ["TMPDIR"]) / "weight-sums.json"  # `tempfile` names /tmp where that disk is full
