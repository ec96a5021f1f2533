"""A round of the engines: all take prompts from one queue until it is empty; failures are reported at its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from uuid import uuid4

from mugrpo_megatron.engine.client import MOST_FAILURES, PromptSource
from mugrpo_megatron.engine.queue import PromptQueue
from mugrpo_megatron.engine.wire import SampledGroup, Sampling
from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.observe.progress import Bar
from mugrpo_megatron.run.engines import Leader
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.run.stopping import StopRequest
from mugrpo_megatron.run.world import World


def shared_queue(world: World, groups: Sequence[int]) -> PromptQueue:
    """Returns one queue of the main rank's `groups` for all engines; other ranks' `groups` are ignored. Collective."""
    # Counters of the rendezvous store hand out the prompts, so a fast engine takes more than a slow one.
    name, missing = world.broadcast((uuid4().hex, groups))
    if world.ranks.world == 1:
        return PromptQueue(missing)
    return PromptQueue(missing, world.engines, lambda counter, amount: world.count(f"queue/{name}/{counter}", amount))


def sample_groups(
    leader: Leader, queue: PromptQueue, take: PromptSource, n: int, how: Sampling, stop: StopRequest
) -> Iterator[SampledGroup]:
    """Yields the groups that this rank's engine takes from the queue, as they are finished.

    Ends early when the engine fails or the run is asked to `stop`, and drops requests in flight.
    """
    if leader.engine.running and not stop.poll():
        with leader.guarded(), closing(leader.engine.generate_from(take, n, how)) as groups:
            for group in groups:
                yield group
                if stop.poll():
                    break
    if stop.requested:
        queue.close()


def report_failures(run: Run, leader: Leader | None) -> None:
    """Report engines that failed since the last call; the next sync restarts them. Collective.

    Raises EngineFailure on every rank after MOST_FAILURES failures of one engine in a row.
    """
    failure = None
    if leader and leader.failure:
        failure, leader.failure = (str(leader.failure), leader.failures_in_a_row), None
    for rank, report in enumerate(run.world.gather(failure)):
        if report is None:
            continue
        message, failures_in_a_row = report
        text = f"rank {rank}: {message}" if run.world.ranks.world > 1 else message
        if failures_in_a_row >= MOST_FAILURES:
            raise EngineFailure(text)
        run.log.event("engine_failure", text.splitlines()[0])
        run.display.say(f"{text}\nThe engine is restarted for what is missing.")


def show_totals(bar: Bar, queue: PromptQueue, is_main: bool) -> None:
    """Advance the main rank's bar to the groups and tokens that all engines have finished."""
    if is_main:
        groups, tokens = queue.totals()
        bar.advance(groups - bar.done, tokens - bar.tokens)
