"""The parameter names of Transformer Engine's layers, as a rename of those in the families' tables.

Transformer Engine puts a norm into the linear layer behind it, and an expert's weights into one module with those of
the other experts. Nothing else differs, and the shapes do not: a row of a table holds for both.
"""

from __future__ import annotations

import re

NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Table -> fused; the second stays as it is before experts, which have no linear layer that it could go into.

Megatron's distributed checkpoints know the fused names alone, whatever the layers that wrote them (`mapping.stored`).
"""
_GROUPED = re.compile(r"\.experts\.(linear_fc[12])\.weight(\d+)$")
_ALONE = re.compile(r"\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")


def table_name(name: str) -> str:
    """The name that the tables know a parameter by; a name of theirs is left as it is."""
    for plain, fused in NORMS.items():
        name = name.replace(f".{fused}", f".{plain}")
    return _GROUPED.sub(r".experts.local_experts.\2.\1.weight", name)


def fused_name(name: str, experts: bool) -> str:
    """What Transformer Engine calls the parameter `name` of the tables, in a model with or without experts."""
    for plain, fused in NORMS.items():
        if not (experts and plain == "pre_mlp_layernorm."):
            name = name.replace(f".{plain}", f".{fused}")
    return _ALONE.sub(r".experts.\2.weight\1", name)
