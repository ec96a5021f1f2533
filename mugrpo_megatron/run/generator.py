"""What an engine leader holds: its engine, the verifier and the problems."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mugrpo_megatron.data.prepare import PreparedData
from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.placement import EngineSlot
from mugrpo_megatron.engine.process import HostProcess
from mugrpo_megatron.errors import EngineFailure, EngineStopped
from mugrpo_megatron.observe.environment import usable_cores
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.rewards.pool import Verifier


@dataclass
class Generator:
    """An engine leader's engine, verifier and problems, with a count of the engine's failures."""

    slot: EngineSlot
    engine: Engine
    verifier: Verifier
    tokenizer: PreTrainedTokenizerBase
    problems: PreparedData
    failure: EngineFailure | None = None
    """The last failure that is not reported yet."""
    failures_in_a_row: int = 0
    """Failures without a finished group between them."""
    checked: bool = False
    """Whether this engine's weights were compared with the learner's after a sync."""

    def failed(self, failure: EngineFailure) -> None:
        """Record a failure; that the engine was ended because the run stops is none."""
        self.checked = False
        if not isinstance(failure, EngineStopped):
            self.failure = failure
            self.failures_in_a_row += 1


def start(
    recipe: Recipe,
    logs: Path,
    slot: EngineSlot,
    stack: ExitStack,
    stopping: Callable[[], bool],
    ahead: HostProcess | None = None,
) -> tuple[EngineSlot, Engine, Verifier]:
    """Launch the slot's engine, which loads while this returns, and a verifier with its share of the node's cores.

    `stack` ends them. The engine takes the process `ahead` if it can. Once `stopping()` is True, no call waits for the
    engine. One of several nodes is not launched yet: `together.meet` does.
    """
    name = f"engine-{slot.number:04d}.log" if slot.number else "engine.log"
    make = Engine if recipe.engine.nodes > 1 else Engine.start
    engine = make(recipe, recipe.model.directory, logs / name, slot, stopping, ahead)
    stack.callback(engine.stop)
    workers = recipe.reward.workers or max(1, usable_cores() // 2 // slot.local_engines)
    verifier = stack.enter_context(Verifier(recipe.reward.model_copy(update={"workers": workers})))
    return slot, engine, verifier


def first_start_problem(engine: Engine) -> str:
    """Why the engine does not start, empty when it does. At a run's start the cause is the recipe or the machine."""
    try:
        engine.wait_ready()
    except EngineStopped:
        return ""  # another rank was asked to stop, and the next collective ends this one
    except EngineFailure as failure:
        errors = [line.strip() for line in str(failure).splitlines() if re.search(r"\w(Error|Exception): ", line)]
        cause = errors[-1] if errors else str(failure).splitlines()[0]
        return f"the engine does not start ({cause}): check the recipe's engine section; its output is in {engine.log}"
    return ""
