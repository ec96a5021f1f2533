"""What forked processes of the tests need, imported once: the fork server of `tests.forked` loads this module."""

from __future__ import annotations

import gc

import hypothesis
import pytest
import torch

import mugrpo_megatron.cli
import mugrpo_megatron.commands.sft
import mugrpo_megatron.commands.training
import mugrpo_megatron.run.branch
import mugrpo_megatron.run.run
import mugrpo_megatron.train
import mugrpo_megatron.weights.check
import tests.extras.plan.measured
import tests.learner.tiny
import tests.models
import tests.tiny
import tests.weights.ranks_work
import tests.weights.tiny
from mugrpo_megatron.data import arithmetic
from tests.remembered import remember_problems

__all__ = ["hypothesis", "mugrpo_megatron", "pytest", "tests", "torch"]

remember_problems()
arithmetic.problems(0, "train", arithmetic.GENERATED)

# A collection in a forked process would touch, and so copy, every page that it shares with the others.
gc.collect()
gc.freeze()
