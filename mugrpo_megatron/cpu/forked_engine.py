"""`sglang.Engine` on CPU, with forked processes, batched attention and functions in C, through SGLang's own hooks.

`Engine.run_*_process_func` and `Engine._launch_*` are hooks for starting processes in another way (SGLang's Ray engine
uses them). `register_attention_backend` adds an attention backend. Ours takes the name of the backend that it replaces,
because SGLang decides by that name which of its Triton kernels to skip.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from setproctitle import setproctitle

from mugrpo_megatron.cpu import delta_kernels
from mugrpo_megatron.cpu.batched_attention import DecodeBatch, attend, plan
from mugrpo_megatron.cpu.deferred import compiler_deferred, compiling_deferred
from mugrpo_megatron.cpu.kernels import Kernels, fits, ready, use_large_pages
from mugrpo_megatron.cpu.sampler import use_sampling
from mugrpo_megatron.files.hf_config import has_delta, read_config

with compiler_deferred():
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.utils import kill_itself_when_parent_died


NAME = "torch_native"
"""SGLang's name of the attention backend that `BatchedAttention` replaces."""


class BatchedAttention(TorchNativeAttnBackend):
    """Causal self-attention, in one call for many sequences; other attention is left to the base class."""

    def __init__(self, model_runner: Any, kernels: Kernels | None = None) -> None:
        """Make the backend. `kernels`, if given, compute attention while decoding, other layers, and sampling."""
        super().__init__(model_runner)
        self._kernels = kernels
        if kernels is not None:
            use_kernels(model_runner.model, kernels)
            use_sampling(model_runner.sampler, kernels)
            pool = self.token_to_kv_pool
            for buffer in [*getattr(pool, "k_buffer", []), *getattr(pool, "v_buffer", [])]:
                use_large_pages(buffer)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Prepare a forward pass. Its first layer makes a plan of batches, which the other layers use too."""
        super().init_forward_metadata(forward_batch)
        self._batches: list[DecodeBatch] | None = None
        self._lengths = forward_batch.seq_lens.long()
        self._requests = forward_batch.req_pool_indices.long()

    def _planned(self, forward_batch: ForwardBatch) -> list[DecodeBatch]:
        if self._batches is None:
            extended = forward_batch.extend_seq_lens
            queries = torch.ones_like(self._lengths) if extended is None else extended.long()
            slots = self.req_to_token_pool.req_to_token
            self._batches = plan(slots, forward_batch.req_pool_indices, queries, self._lengths)
        return self._batches

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):  # type: ignore[no-untyped-def]
        forward = self._forward if _plain(layer) else super().forward_extend
        return forward(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True):  # type: ignore[no-untyped-def]
        forward = self._forward if _plain(layer) else super().forward_decode
        return forward(q, k, v, layer, forward_batch, save_kv_cache)

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
    ) -> torch.Tensor:
        if save_kv_cache and k is not None:
            where = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        if self._kernels and forward_batch.forward_mode.is_decode() and fits(query, keys, values):
            slots = self.req_to_token_pool.req_to_token
            output = self._kernels.decode(query, keys, values, slots, self._requests, self._lengths, layer.scaling)
        else:
            output = attend(query, keys, values, self._planned(forward_batch), layer.scaling)
        return output.view(len(output), -1)


class CpuEngine(Engine):
    """An engine whose schedulers use BatchedAttention, with functions in C if their `library` could be built.

    Its processes are forked. SGLang would spawn them, and each would spend ten CPU seconds on imports that this process
    has done. A fork loses OpenMP's threads; this does no harm, because this process has not used them before.
    """

    def __init__(self, library: ctypes.CDLL | None = None, **arguments: Any) -> None:
        """Start the engine's processes and wait until they have loaded the model."""
        self.run_scheduler_process_func = partial(_run_scheduler, library)
        super().__init__(**arguments)

    @staticmethod
    def run_detokenizer_process_func(server_args: Any, *arguments: Any) -> None:
        """Run the detokenizer's process, which only waits if there is nothing to detokenize (skip_tokenizer_init)."""
        if not server_args.skip_tokenizer_init:
            run_detokenizer_process(server_args, *arguments)
            return
        kill_itself_when_parent_died()
        setproctitle("sglang::detokenizer")
        signal.pause()

    @classmethod
    def _launch_scheduler_processes(cls, *arguments: Any, **named: Any) -> Any:
        with _forking():
            return super()._launch_scheduler_processes(*arguments, **named)

    @classmethod
    def _launch_detokenizer_subprocesses(cls, *arguments: Any, **named: Any) -> Any:
        with _forking():
            return super()._launch_detokenizer_subprocesses(*arguments, **named)


def _run_scheduler(library: ctypes.CDLL | None, *arguments: Any) -> None:
    backend = BatchedAttention if library is None else partial(BatchedAttention, kernels=Kernels(library))
    register_attention_backend(NAME)(backend)
    # This process imports the model's modules itself, after the fork, so `torch.compile` is deferred here again.
    with compiling_deferred():
        config = read_config(Path(arguments[0].model_path))
        if config.get("kv_lora_rank"):
            _prepare_latent_attention()
        if has_delta(config):
            delta_kernels.install(arguments[0].dtype)
        run_scheduler_process(*arguments)


def _prepare_latent_attention() -> None:
    """Let a model with multi-head latent attention run on CPU; call it before the model is loaded.

    SGLang prefills with the keys and values of the heads and decodes with the cached latents. Attention on CPU reads
    keys from the cache, which holds only latents, so here SGLang's registry makes prefill use latents too. SGLang's
    rotation for such models on CPU supports YaRN only; without YaRN the general rotation, which runs on CPU as well,
    takes its place.
    """
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod

    AttentionBackendRegistry.register(NAME, lambda attention, batch: AttnForwardMethod.MLA)
    stretched = factory.get_rope_cpu

    def rotation(*arguments: Any) -> Any:
        *_, scaling, _, _, _ = arguments
        return stretched(*arguments) if scaling else factory.get_rope(*arguments[:-1])

    factory.get_rope_cpu = rotation


@contextmanager
def _forking() -> Iterator[None]:
    """Let processes that are started inside the block be forked instead of spawned."""
    multiprocessing.set_start_method("fork", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method("spawn", force=True)


def _plain(layer: RadixAttention) -> bool:
    windowed = layer.sliding_window_size is not None and layer.sliding_window_size > -1
    return not (windowed or layer.is_cross_attention or layer.attn_type == AttentionType.ENCODER_ONLY)


FORWARD = "_forward_method"
"""Attribute of SGLang's layers that holds the function that runs the layer."""


OTHER_NORMS = ("variance_size_override", "cast_x_before_out_mul", "fp32_residual", "override_orig_dtype")
"""If one of these attributes of SGLang's RMSNorm is set, it computes or rounds otherwise than the kernel."""


def use_kernels(model: torch.nn.Module, kernels: Kernels) -> int:
    """Let the model's norms, gates and rotations run the kernels; returns the number of layers that were changed."""
    replaced = 0
    for module in model.modules():
        before = module.__dict__.get(FORWARD)
        if before is None or before != getattr(module, "forward_native", None):
            continue
        if type(module) is RMSNorm and not any(getattr(module, name, None) for name in OTHER_NORMS):
            module.__dict__[FORWARD] = _norm(module, kernels, before)
        elif type(module) is SiluAndMul:
            module.__dict__[FORWARD] = _gate(kernels, before)
        elif isinstance(module, RotaryEmbedding) and _rotates_whole_heads(module):
            module.__dict__[FORWARD] = _rotation(module, kernels, before)
        else:
            continue
        replaced += 1
    return replaced


def _norm(module: Any, kernels: Kernels, before: Any) -> Any:
    def norm(x, residual=None, post_residual_addition=None):  # type: ignore[no-untyped-def]
        if post_residual_addition is not None or not ready(x, module.weight, *([] if residual is None else [residual])):
            return before(x, residual, post_residual_addition)
        if residual is None:
            return kernels.rms_norm(x, None, module.weight, module.variance_epsilon)
        return kernels.rms_norm(x, residual, module.weight, module.variance_epsilon), residual

    return norm


def _gate(kernels: Kernels, before: Any) -> Any:
    def gate(x):  # type: ignore[no-untyped-def]
        return kernels.silu_and_mul(x) if ready(x) else before(x)

    return gate


def _rotation(module: Any, kernels: Kernels, before: Any) -> Any:
    def rotation(positions, query, key, offsets=None, fused_set_kv_buffer_arg=None):  # type: ignore[no-untyped-def]
        cache = module.cos_sin_cache
        fitting = ready(cache) and _in_rows(query, cache) and _in_rows(key, cache) and positions.ndim == 1
        if offsets is not None or not fitting:
            return before(positions, query, key, offsets, fused_set_kv_buffer_arg)
        for x in (query, key):
            kernels.rotate(x, module.head_size, cache, positions)
        return query, key

    return rotation


def _rotates_whole_heads(module: RotaryEmbedding) -> bool:
    """Whether a rotary embedding is of the one kind that the kernel computes.

    It rotates all dimensions of a head, the first half with the second, by a cache of cosines and sines.
    """
    full = module.rotary_dim == module.head_size and module.is_neox_style and not hasattr(module, "sin_cos_cache")
    return full and type(module).forward_native is RotaryEmbedding.forward_native


def _in_rows(x: torch.Tensor, cache: torch.Tensor) -> bool:
    return x.dtype == cache.dtype and x.ndim == 2 and x.stride(1) == 1 and len(x) > 0
