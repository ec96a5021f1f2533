"""What one process does to another's device memory: weights by CUDA IPC, memory that the memory saver takes away.

A virtual machine may refuse either. Without the memory saver, `engine.between_stages = "restart"` still works.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import pytest
import torch
import torch.multiprocessing

from mugrpo_megatron.engine.launch import cuda_runtime_folders
from mugrpo_megatron.weights.buckets import Bucket, ParameterSlots, Slot
from mugrpo_megatron.weights.sync import flattened_bucket, serialize
from tests.gpu.tiny import CUDA, DEVICE
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.process

SAVED = """
import torch
from torch_memory_saver import torch_memory_saver as saver

GIB = 1 << 30
torch.ones(1, device="cuda")
with saver.region(tag="weights", enable_cpu_backup=False):
    x = torch.full((GIB,), 7, dtype=torch.uint8, device="cuda")
address, free = x.data_ptr(), [torch.cuda.mem_get_info()[0]]
torch.cuda.synchronize()  # pause unmaps memory at once, under a kernel that still writes to it
saver.pause("weights")
free.append(torch.cuda.mem_get_info()[0])
saver.resume("weights")
free.append(torch.cuda.mem_get_info()[0])
x.fill_(9)
assert int(x[-1]) == 9 and x.data_ptr() == address
print(*free)
"""


@pytest.mark.gpu
def test_the_memory_saver_gives_memory_back_and_takes_it_again() -> None:
    from torch_memory_saver import configure_subprocess

    libraries = os.pathsep.join([os.environ.get("LD_LIBRARY_PATH", ""), *cuda_runtime_folders()])
    with configure_subprocess():
        environment = os.environ | {"LD_LIBRARY_PATH": libraries}
        done = subprocess.run([sys.executable, "-c", SAVED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    awake, asleep, again = map(int, done.stdout.split())
    assert asleep - awake > 0.9 * (1 << 30)
    assert asleep - again > 0.9 * (1 << 30)


def _read(serialized: bytes, answers: Any) -> None:
    """In a process of its own: what SGLang's scheduler does with a bucket."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    bucket = MultiprocessingSerializer.deserialize(serialized)
    tensors = FlattenedTensorBucket(
        flattened_tensor=bucket["flattened_tensor"], metadata=bucket["metadata"]
    ).reconstruct_tensors()
    answers.put([(name, tensor.tolist()) for name, tensor in tensors])


def test_another_process_reads_a_bucket() -> None:
    """On CUDA by IPC; without it through shared memory, in the same pickle."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    slots: list[Slot] = []
    expected = []
    flat = torch.empty(1 << 21, dtype=torch.uint8, device=DEVICE)
    for name, shape, dtype in (("a", (3, 5), torch.bfloat16), ("b", (7,), torch.float32)):
        tensor = torch.arange(1.0, 1 + math.prod(shape), device=DEVICE).to(dtype).view(shape)
        slots.append(Slot(name, shape, dtype, 512 * len(slots)))
        slots[-1].view(flat).copy_(tensor)
        expected.append((name, tensor.tolist()))
    bucket = Bucket((0, None), (ParameterSlots(cast(Any, None), tuple(slots)),), 1024)
    serialized = serialize(bucket, flat) if CUDA else bytes(ForkingPickler.dumps(flattened_bucket(bucket, flat)))
    if CUDA:
        torch.cuda.synchronize()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    reader = context.Process(target=_read, args=(serialized, answers))
    reader.start()
    try:
        assert answers.get(timeout=PATIENCE_S) == expected
    finally:
        reader.kill()
        reader.join()
