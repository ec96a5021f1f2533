"""The engine that a process leads (starts and talks to): its launch, failures, verifier, tokenizer and problems.

This module needs no Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mugrpo_megatron.cuda import finds_cuda
from mugrpo_megatron.data.prepare import PreparedData
from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.engine.client import Engine, first_start_problem
from mugrpo_megatron.engine.launch import replayed_routers, training_sampling
from mugrpo_megatron.engine.nodes import FollowerNode
from mugrpo_megatron.engine.placement import EngineSlot, slot_of_environment
from mugrpo_megatron.engine.process import HostProcess
from mugrpo_megatron.engine.wire import Sampling
from mugrpo_megatron.errors import EngineFailure, EngineStopped, UserError
from mugrpo_megatron.observe.environment import usable_cores
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.systems import EngineSection
from mugrpo_megatron.rewards.pool import Verifier
from mugrpo_megatron.run.engine_spec import engine_spec
from mugrpo_megatron.run.world import World


@dataclass(kw_only=True)
class LedEngine:
    """An engine that this process leads, and its failures."""

    engine: Engine
    failure: EngineFailure | None = None
    """The last failure; None once a round (`phases.rounds`) has reported it."""
    failures_in_a_row: int = 0
    """Number of failures since the engine last finished something (`progressed`)."""
    checked: bool = False
    """Whether the weights of this engine were compared with the learner's since its start."""

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """End the block without an exception if the engine fails in it, and note the failure.

        The engine then samples nothing until it is restarted.
        """
        try:
            yield
        except EngineFailure as failure:
            self.note(failure)

    def note(self, failure: EngineFailure) -> None:
        """Note a failure, unless the engine was ended because the run stops."""
        self.checked = False
        if not isinstance(failure, EngineStopped):
            self.failure = failure
            self.failures_in_a_row += 1

    def progressed(self) -> None:
        """Note that the engine has finished something that is kept, so that its failures are counted anew.

        A failure that is not reported yet still counts as one.
        """
        self.failures_in_a_row = int(self.failure is not None)

    def restart_if_failed(self) -> None:
        """If the engine does not run, launch it with the weights of its model directory, and return at once."""
        if not self.engine.running:
            self.engine.restart()


@dataclass(kw_only=True)
class Leader(LedEngine):
    """The engine that this process leads, with its verifier, its tokenizer and its problems."""

    slot: EngineSlot
    verifier: Verifier
    tokenizer: PreTrainedTokenizerBase
    problems: PreparedData
    sampling: Sampling
    """Sampling parameters of training responses."""


def make_leader(recipe: Recipe, slot: EngineSlot, engine: Engine, verifier: Verifier, problems: PreparedData) -> Leader:
    """Make the `Leader` of an engine that serves the recipe's policy."""
    tokenizer = load_tokenizer(recipe.model.directory)
    routers = replayed_routers(recipe.learner, recipe.model)
    sampling = training_sampling(recipe.rollout, recipe.run, tokenizer, routers)
    return Leader(
        engine=engine, slot=slot, verifier=verifier, tokenizer=tokenizer, problems=problems, sampling=sampling
    )


@dataclass(frozen=True, slots=True)
class Launched:
    """The engine, or process of an engine, that this rank has launched, if any; it may still be loading."""

    slot: EngineSlot
    logs: Path
    """Directory of the engines' logs."""
    led: tuple[Engine, Verifier] | None
    """The engine that this rank leads, with its verifier; None on a rank that leads no engine."""
    follower: FollowerNode | None


def loads_beside_learner(engine: EngineSection) -> bool:
    """Whether an engine may load while the learner is built: on CPU, if it is on one node."""
    # A GPU may be too small for an engine beside a learner that is being built. There the learner is built first, and
    # offloaded before the engine measures free memory for its KV cache (SGLang's mem_fraction_static). On CPU an engine
    # over several nodes waits, because its nodes must start together.
    return not finds_cuda() and engine.nodes == 1


def launch(
    recipe: Recipe, logs: Path, stopping: Callable[[], bool], stack: ExitStack, host: HostProcess | None = None
) -> Launched:
    """Launch an engine and a verifier, if this rank leads an engine. The verifier has `reward.workers` processes, by
    default half of the node's cores divided by the node's engines. A rank that joins another node's engine gets a
    `FollowerNode` instead.

    The engine loads in the process `host`, or without it in a new one; this does not wait until it has loaded. `stack`
    ends engine and verifier. An engine over several nodes is only prepared: `engines.rendezvous` launches its
    processes. Once `stopping()` is true, a call that waits for the engine ends it and raises EngineStopped.
    """
    slot = slot_of_environment(recipe.engine, finds_cuda())
    spec, directory = engine_spec(recipe), recipe.model.directory
    if slot.joins:
        follower = FollowerNode(spec, directory, logs / f"engine-{slot.number:04d}-node-{slot.node}.log", slot)
        stack.callback(follower.stop)
        return Launched(slot, logs, None, follower)
    if not slot.leads_engine:
        return Launched(slot, logs, None, None)
    log = logs / (f"engine-{slot.number:04d}.log" if slot.number else "engine.log")
    engine = Engine(spec, directory, log, slot, stopping, host)
    if recipe.engine.nodes == 1:
        engine.restart()
    stack.callback(engine.stop)
    # By default the verifiers of a node get half of its cores; the engines' schedulers and tokenizers need the others.
    workers = recipe.reward.workers or max(1, usable_cores() // 2 // slot.local_engines)
    verifier = stack.enter_context(Verifier(recipe.reward.model_copy(update={"workers": workers})))
    return Launched(slot, logs, (engine, verifier), None)


def wait_for_engines(leader: LedEngine | None, world: World) -> None:
    """Wait until every engine has started; UserError on every rank when one does not start."""
    problem = first_start_problem(leader.engine) if leader else ""
    # An engine may load for longer than a collective's timeout, so that the gather alone would fail. The barrier has no
    # timeout while all ranks are alive.
    world.barrier()
    # The engines' errors are gathered, so that every rank ends with the same one instead of waiting for a failed rank.
    for rank, reason in enumerate(world.gather(problem)):
        if reason:
            where = f"rank {rank}: " if world.size > 1 else ""
            raise UserError(f"{where}{reason}")
