"""The door to Megatron-core 0.16.1: the CPU's stand-ins are in place before any part of it is imported.

Importing this package installs them. The learner does that first, so its modules import Megatron directly; every other
room takes the names below from here. ruff (TID251) and `tests/test_megatron_door.py` hold that.
"""

from mugrpo_megatron.cpu import megatron as cpu  # isort: split

cpu.install()
cpu.complete_router()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region  # noqa: E402
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset  # noqa: E402
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint  # noqa: E402

__all__ = [
    "gather_from_tensor_model_parallel_region",
    "get_transformer_layer_offset",
    "make_sharded_tensors_for_checkpoint",
    "parallel_state",
    "tensor_parallel",
]
