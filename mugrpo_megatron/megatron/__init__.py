"""The door to Megatron-core 0.16.1: the CPU's stand-ins are in place before any part of it is imported.

Importing the package `learner` installs them, so its modules import Megatron directly. Every other room takes the names
below from here; ruff (TID251) and `tests/test_megatron_door.py` hold that.
"""

import mugrpo_megatron.learner  # noqa: F401, I001  installs; so it comes first
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

__all__ = [
    "gather_from_tensor_model_parallel_region",
    "get_transformer_layer_offset",
    "parallel_state",
]
