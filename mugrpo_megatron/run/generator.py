"""What a rank that leads an engine has, and how often its engine failed it."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mugrpo_megatron.data.prepare import PreparedData
from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.placement import EngineSlot
from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.rewards.pool import Verifier


@dataclass
class Generator:
    """An engine, the verifier that scores its responses, and the problems."""

    slot: EngineSlot
    engine: Engine
    verifier: Verifier
    tokenizer: PreTrainedTokenizerBase
    problems: PreparedData
    failure: EngineFailure | None = None
    """The last failure that nobody has been told of yet."""
    failures_in_a_row: int = 0
    """Failures without a finished group between them."""
    checked: bool = False
    """Whether this engine's weights were compared with the learner's after a sync."""

    def failed(self, failure: EngineFailure) -> None:
        """Take note of a failure."""
        self.failure = failure
        self.failures_in_a_row += 1
        self.checked = False


def start(recipe: Recipe, logs: Path, slot: EngineSlot, stack: ExitStack) -> tuple[EngineSlot, Engine, Verifier]:
    """Launch the slot's engine, which loads while this returns, and a verifier with its share of the node's cores.

    `stack` ends them.
    """
    name = f"engine-{slot.number:04d}.log" if slot.number else "engine.log"
    engine = Engine.start(recipe, recipe.model.path, logs / name, slot)
    stack.callback(engine.stop)
    workers = recipe.reward.workers or max(1, (os.cpu_count() or 1) // 2 // slot.local_engines)
    verifier = stack.enter_context(Verifier(recipe.reward.model_copy(update={"workers": workers})))
    return slot, engine, verifier


def first_start_problem(engine: Engine) -> str:
    """Why the engine does not come up at the run's start, empty when it does; a matter of recipe or machine."""
    try:
        engine.wait_ready()
    except EngineFailure as failure:
        errors = [line.strip() for line in str(failure).splitlines() if re.search(r"\w(Error|Exception): ", line)]
        cause = errors[-1] if errors else str(failure).splitlines()[0]
        return (
            f"the engine does not start ({cause}): check the recipe's engine section; "
            f"all that it said is in {engine.log}"
        )
    return ""


def sleep_engine(generator: Generator) -> None:
    """Let the engine give its device back; one that fails at it is ended, which gives the device back as well."""
    try:
        generator.engine.sleep()
    except EngineFailure as failure:
        generator.failed(failure)
