"""What a rank that leads an engine has, and how often its engine failed it."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mugrpo_megatron.data.ready import Ready
from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.rewards.pool import Verifier
from mugrpo_megatron.rollout.engine import Engine
from mugrpo_megatron.rollout.placement import Seat


@dataclass
class Generator:
    """An engine, the verifier that scores its responses, and the problems."""

    seat: Seat
    engine: Engine
    verifier: Verifier
    tokenizer: PreTrainedTokenizerBase
    problems: Ready
    failure: EngineFailure | None = None
    """The last failure that nobody has been told of yet."""
    failures_in_a_row: int = 0
    """Failures without a finished group between them."""

    def failed(self, failure: EngineFailure) -> None:
        """Take note of a failure."""
        self.failure = failure
        self.failures_in_a_row += 1


def start(recipe: Recipe, logs: Path, seat: Seat, stack: ExitStack) -> tuple[Seat, Engine, Verifier]:
    """Launch the seat's engine, which loads while this returns, and a verifier with its share of the node's cores.

    `stack` ends them.
    """
    name = f"engine-{seat.number:04d}.log" if seat.number else "engine.log"
    engine = Engine.start(recipe, recipe.model.path, logs / name, seat)
    stack.callback(engine.stop)
    workers = recipe.reward.workers or max(1, (os.cpu_count() or 1) // 2 // seat.local_engines)
    verifier = stack.enter_context(Verifier(recipe.reward.model_copy(update={"workers": workers})))
    return seat, engine, verifier


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


def rest(generator: Generator) -> None:
    """Let the engine give its device back; one that fails at it is ended, which gives the device back as well."""
    try:
        generator.engine.sleep()
    except EngineFailure as failure:
        generator.failed(failure)
