"""Sampling by all engines from one queue of prompts, for a stage or an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from uuid import uuid4

from mugrpo_megatron.engine.client import MOST_FAILURES, PromptSource
from mugrpo_megatron.engine.queue import PromptQueue
from mugrpo_megatron.engine.wire import SampledGroup, Sampling
from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.observe.progress import Bar
from mugrpo_megatron.run.leader import EngineLeader
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.run.stopping import StopRequest
from mugrpo_megatron.run.world import World


def shared_queue(world: World, groups: Sequence[int]) -> PromptQueue:
    """The main rank's `groups` as one queue for all engines. Collective; the other ranks' `groups` do not count."""
    name, missing = world.broadcast((uuid4().hex, groups))
    if world.ranks.world == 1:
        return PromptQueue(missing)
    return PromptQueue(missing, world.engines, lambda counter, amount: world.count(f"queue/{name}/{counter}", amount))


def sample_groups(
    leader: EngineLeader, queue: PromptQueue, take: PromptSource, n: int, how: Sampling, stop: StopRequest
) -> Iterator[SampledGroup]:
    """Yields the groups that this rank's engine takes from the queue, as they are finished.

    Ends early when the engine fails or the run is asked to `stop`; what is in flight is then dropped.
    """
    if leader.engine.running and not stop.poll():
        try:
            with closing(leader.engine.generate_from(take, n, how)) as groups:
                for group in groups:
                    yield group
                    if stop.poll():
                        break
        except EngineFailure as failure:
            leader.record_failure(failure)
    if stop.requested:
        queue.close()


def report_failures(run: Run, leader: EngineLeader | None) -> None:
    """Say which engines failed since the last call; each is restarted at the next sync. Collective.

    Raises EngineFailure on every rank after MOST_FAILURES failures of one engine in a row.
    """
    mine = None
    if leader and leader.failure:
        mine, leader.failure = (str(leader.failure), leader.failures_in_a_row), None
    for rank, report in enumerate(run.world.gather(mine)):
        if report is None:
            continue
        text = f"rank {rank}: {report[0]}" if run.world.ranks.world > 1 else report[0]
        if report[1] >= MOST_FAILURES:
            raise EngineFailure(text)
        run.log.event("engine_failure", text.splitlines()[0])
        run.display.say(f"{text}\nThe engine is restarted for what is missing.")


def show_totals(bar: Bar, queue: PromptQueue, is_main: bool) -> None:
    """Advance the main rank's bar to what all engines have finished of the queue."""
    if is_main:
        groups, tokens = queue.totals()
        bar.advance(groups - bar.done, tokens - bar.tokens)
