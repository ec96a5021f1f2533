"""Compiles the kernels that SGLang would compile when the engines of ten.py start; needs nvcc, and no GPU.

    TVM_FFI_CACHE_DIR=DIR python -m run_scripts.dev.bench.engine_kernels

SGLang takes a library from that folder by the hash of its sources, the architecture and the version of tvm-ffi
(`load_jit`, jit_kernel/utils.py), so one that was compiled elsewhere is as good.
"""

from __future__ import annotations

import torch

HEAD_DIMS = (128, 64)
ROW_BYTES = (512, 256)
"""Bytes of a token's keys in a layer."""


def compile_kernels() -> None:
    """Compile the kernels in bfloat16 for compute capability 9.0.

    They serve the benchmarks' model, the Qwen3 of tests/gpu and the quickstart's model.
    """
    from sglang.jit_kernel import activation, clamp_position, kvcache, norm, rope
    from sglang.jit_kernel.utils import override_jit_cuda_arch

    with override_jit_cuda_arch(9, 0):
        for row_bytes in ROW_BYTES:
            kvcache._jit_kvcache_module(row_bytes)
        for head_dim in HEAD_DIMS:
            rope._jit_fused_rope_module(True, head_dim, torch.bfloat16)
        rope._jit_rotary_embedding_module()  # of the quickstart's heads, which have 16 dimensions
        activation._jit_activation_module(torch.bfloat16)
        clamp_position._jit_clamp_position_module(torch.int64)
        norm._jit_qknorm_module(64, torch.bfloat16)


if __name__ == "__main__":
    compile_kernels()
