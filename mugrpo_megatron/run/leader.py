"""The engine that a process leads: its launch, its failures, and what it samples and scores with. Needs no Megatron."""

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
    """An engine that this process leads, and its failures until a round reports them."""

    engine: Engine
    failure: EngineFailure | None = None
    """The last failure, until it is reported."""
    failures_in_a_row: int = 0
    """Number of failures since the last progress."""
    checked: bool = False
    """Whether the weights of this engine were compared with the learner's since its start."""

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Note a failure of the engine in the block instead of raising it; the engine then samples nothing until it is
        restarted."""
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
        """Note that something the engine made is kept, which ends a row of failures; only a failure that is not
        reported yet still counts."""
        self.failures_in_a_row = int(self.failure is not None)

    def restart_if_failed(self) -> None:
        """Start an engine that has failed again, with the weights of its model directory; returns at once."""
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
    """The leader of an engine that serves the recipe's policy."""
    tokenizer = load_tokenizer(recipe.model.directory)
    routers = replayed_routers(recipe.learner, recipe.model)
    sampling = training_sampling(recipe.rollout, recipe.run, tokenizer, routers)
    return Leader(
        engine=engine, slot=slot, verifier=verifier, tokenizer=tokenizer, problems=problems, sampling=sampling
    )


@dataclass(frozen=True, slots=True)
class Launched:
    """The part of the engines that this rank runs; an engine that was launched may still be loading."""

    slot: EngineSlot
    logs: Path
    """Directory of the engines' logs."""
    led: tuple[Engine, Verifier] | None
    """The engine that this rank leads, with its verifier; None on a rank that leads no engine."""
    follower: FollowerNode | None


def loads_beside_learner(engine: EngineSection) -> bool:
    """Whether an engine may load while the learner is built."""
    # A GPU may not hold both: there the learner loads first and is offloaded before the engine measures free memory
    # for its KV cache (SGLang's mem_fraction_static). The nodes of one engine must start together.
    return not finds_cuda() and engine.nodes == 1


def launch(
    recipe: Recipe, logs: Path, stopping: Callable[[], bool], stack: ExitStack, host: HostProcess | None = None
) -> Launched:
    """Launch this rank's engine, if it leads one, with a verifier that has its share of the node's cores.

    Returns while the engine loads, in the process `host` if it can. `stack` ends them. An engine over several nodes is
    only prepared: `rendezvous` launches its processes. Once `stopping()`, no call waits for an engine.
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
    # Half of the cores: the engine's scheduler and tokenizer need the others while the verifier scores.
    workers = recipe.reward.workers or max(1, usable_cores() // 2 // slot.local_engines)
    verifier = stack.enter_context(Verifier(recipe.reward.model_copy(update={"workers": workers})))
    return Launched(slot, logs, (engine, verifier), None)


def wait_for_engines(leader: LedEngine | None, world: World) -> None:
    """Wait until every engine has started; UserError on every rank when one does not start."""
    problem = first_start_problem(leader.engine) if leader else ""
    # An engine may load for longer than a collective's timeout: the barrier waits as long as all ranks are alive, so
    # the gather after it finds all of them there.
    world.barrier()
    # Gathered, so that every rank ends with the same error; else the others would wait for the one that failed.
    for rank, reason in enumerate(world.gather(problem)):
        if reason:
            where = f"rank {rank}: " if world.size > 1 else ""
            raise UserError(f"{where}{reason}")
