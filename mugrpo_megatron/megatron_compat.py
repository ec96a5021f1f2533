"""Compatibility with Megatron-core 0.16.1 and 0.19, and with a machine without CUDA.

Importing this module first puts stand-ins (`cpu.megatron`) in the place of what Megatron calls in `torch.cuda`, if
there is no CUDA device, and then imports Megatron. The learner's package imports it first, so its modules
may import Megatron directly; every other package takes the names below from here. ruff (TID251) and
`tests/test_megatron_compat.py` check that. This module also bridges the differences of the two versions; a comment at
each bridge says with which version it can go (`tests/test_stack_versions.py`).
"""

import logging
from functools import partial
from importlib.metadata import version
from typing import Any

from mugrpo_megatron.cpu import megatron as cpu  # isort: split

cpu.install()
cpu.complete_router()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.backends import BackendSpecProvider  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend  # noqa: E402
from megatron.core.ssm.mamba_mixer import _split_tensor_factory as split_tensor_factory  # noqa: E402
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region  # noqa: E402
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset  # noqa: E402
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint  # noqa: E402

__all__ = [
    "gather_from_tensor_model_parallel_region",
    "get_transformer_layer_offset",
    "grouped_mlp",
    "make_sharded_tensors_for_checkpoint",
    "mlp_parts",
    "mlp_spec",
    "parallel_state",
    "split_tensor_factory",
    "tensor_parallel",
]

BUILDERS = tuple(map(int, version("megatron-core").split(".")[:2])) >= (0, 18)
"""Whether a layer's submodules are builder functions instead of `ModuleSpec`s. This flag goes when Megatron 0.16.1 is
no longer supported; 0.17 has both."""


def mlp_spec(backend: BackendSpecProvider, experts: int | None, grouped: bool, activation: type | None) -> Any:
    """The specification of a layer's feed-forward: dense if `experts` is None, else a router and that many experts.

    With `grouped` the experts are one grouped GEMM. `activation`, if given, is the class of the activation.
    """
    spec: Any = get_mlp_module_spec_for_backend(backend, experts, moe_grouped_gemm=grouped)
    if activation is not None:
        mlp_parts(spec).activation_func = activation
    return spec


def mlp_parts(spec: Any) -> Any:
    """The submodules in a result of `mlp_spec`.

    A dense feed-forward has `linear_fc1`, `linear_fc2` and `activation_func`, one with experts has `experts`.
    """
    return spec.keywords["submodules"] if BUILDERS else spec.submodules


def grouped_mlp(module: type, submodules: Any) -> Any:
    """The return value of a backend's `grouped_mlp_modules`, from the experts' class `module` and its submodules."""
    return partial(module, submodules=submodules) if BUILDERS else (module, submodules)


LEFT_OUT = {
    # Remove this entry once the model is a HybridModel; docs/architecture.md has the plan.
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    # Without the argument Megatron computes the layout itself. Remove this entry once it requires the argument.
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param_layout not provided",
}
"""Warnings of Megatron 0.19 that are not printed, because a user cannot act on them and every rank would repeat them:
name of the logger -> how the text begins."""


def _leave_out(logger: str, start: str) -> None:
    logging.getLogger(logger).addFilter(lambda record: not str(record.msg).startswith(start))


for _logger, _start in LEFT_OUT.items():
    _leave_out(_logger, _start)
