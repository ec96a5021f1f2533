"""The learner with the weights of a checkpoint for a while, for a forward pass under another policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mugrpo_megatron.learner.learner import Learner
from mugrpo_megatron.learner.model import policy
from mugrpo_megatron.weights.hf import load_hf


@contextmanager
def holding(learner: Learner, directory: Path) -> Iterator[None]:
    """Inside the block every rank's parameters are those of the checkpoint; then its own again, bit by bit.

    The own ones wait in host memory: no second model on the device, and no communication. Moments, gradients and, but
    for float32, master weights are not touched; in float32 these are the parameters, so no step and no save may happen
    inside. Raises UserError for a checkpoint that does not fit; the learner then has its own weights.
    """
    chunks = [policy(chunk) for chunk in learner.chunks]
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    own = [parameter.detach().to("cpu", copy=True) for parameter in parameters]
    try:
        load_hf(chunks, directory, learner.architecture)
        yield
    finally:
        with torch.no_grad():
            for parameter, kept in zip(parameters, own, strict=True):
                parameter.copy_(kept)
