"""What differs between megatron-core 0.16.1 and 0.19: all of it stands here, each with the version that ends it."""

from __future__ import annotations

import logging
from functools import partial
from importlib.metadata import version
from typing import Any

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend

BUILDERS = tuple(map(int, version("megatron-core").split(".")[:2])) >= (0, 17)
"""Whether a layer's parts are functions that build them, no longer `ModuleSpec`s. Ends with 0.16.1."""


def mlp_spec(backend: BackendSpecProvider, experts: int | None, grouped: bool, activation: type | None) -> Any:
    """The feed-forward part of a layer, with `activation` as its own module where there is one.

    `grouped` selects one grouped GEMM for the experts, if any.
    """
    spec: Any = get_mlp_module_spec_for_backend(backend, experts, moe_grouped_gemm=grouped)
    if activation is not None:
        mlp_parts(spec).activation_func = activation
    return spec


def mlp_parts(spec: Any) -> Any:
    """What `mlp_spec` is made of: `linear_fc1`, `linear_fc2` and `activation_func`, or `experts`."""
    return spec.keywords["submodules"] if BUILDERS else spec.submodules


def grouped_mlp(module: type, submodules: Any) -> Any:
    """What a backend's `grouped_mlp_modules` returns: the experts' module with its parts."""
    return partial(module, submodules=submodules) if BUILDERS else (module, submodules)


class _Deprecation(logging.Filter):
    """Leaves out one warning of Megatron 0.19: that GPTModel takes no new features.

    It is none that a user can act on, and every chunk of every rank would say it; docs/architecture.md has the plan for
    HybridModel, which ends this class.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("GPTModel IS DEPRECATED")


logging.getLogger("megatron.core.models.gpt.gpt_model").addFilter(_Deprecation())
