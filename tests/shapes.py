"""Checks that the arrays of a record have the dtypes and shapes that its types say.

A dimension's name stands for one length in the whole record, those inside it included: `" tokens"` of the loss inputs
is `" tokens"` of their segments.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any, get_type_hints

import jaxtyping
import numpy as np
import torch


def wrong_shapes(record: Any) -> list[str]:
    """`field: type, not what it is` of every array that is not what its type says."""
    with jaxtyping.jaxtyped("context"):
        return _wrong_shapes(record)


def _wrong_shapes(record: Any) -> list[str]:
    found = []
    for name, hint in get_type_hints(type(record), localns=vars(jaxtyping)).items():
        value = getattr(record, name)
        if is_dataclass(value):
            found += [f"{name}.{line}" for line in _wrong_shapes(value)]
        elif isinstance(value, (torch.Tensor, np.ndarray)) and not isinstance(value, hint):
            found.append(f"{name}: {hint}, not {value.dtype} {tuple(value.shape)}")
    return found
