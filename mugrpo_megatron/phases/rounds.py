"""Rounds: all engines together sample what is missing, for a stage, an evaluation or an auxiliary model.

    round = open_round(run, led, missing, bar)     makes one queue of what is missing, for all engines
    for group in round.groups(...): ...            on a rank that leads an engine (`led`): keep what it samples
    outcome = round.end(mine)                      gives every rank the results and failures of all ranks
    report(run, outcome.failures)                  prints the failures, and ends the run after MOST_FAILURES

An engine that fails or is asked to stop takes no more items in its round. What it has not finished is missing, and the
next round samples it. A failed engine is started again before that round: by the weight sync in a run with a learner,
elsewhere by `restart_if_failed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Generic, TypeVar
from uuid import uuid4

from mugrpo_megatron.engine.client import MOST_FAILURES, PromptSource
from mugrpo_megatron.engine.queue import PromptQueue
from mugrpo_megatron.engine.wire import SampledGroup, Sampling
from mugrpo_megatron.errors import EngineFailure, UserError
from mugrpo_megatron.observe.progress import Bar
from mugrpo_megatron.run.leader import LedEngine
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.run.world import World
from mugrpo_megatron.samples import Prompt
from mugrpo_megatron.stages.store import StageStore

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failed:
    """The failure of an engine in a round, or in the weight sync before it."""

    text: str
    in_a_row: int
    """Number of failures of this engine, this one included, since it last finished something that was
    kept: an item of a `durable` round (`open_round`), or a whole evaluation."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """The outcome of a round, the same on every rank."""

    results: list[T]
    """The result of each rank."""
    failures: list[Failed]
    stopping: bool
    """Whether any rank was asked to stop."""


class Round:
    """One round: all engines together sample the items of one queue."""

    def __init__(self, run: Run, led: LedEngine | None, queue: PromptQueue, bar: Bar, durable: bool) -> None:
        """Make a round of the items in `queue`; the other arguments are those of `open_round`."""
        self.queue = queue
        self._run, self._led, self._bar, self._durable = run, led, bar, durable
        self._before = bar.done, bar.tokens

    def groups(self, prompt_of: Callable[[int], Prompt], n: int, how: Sampling) -> Iterator[SampledGroup]:
        """Yield each group of `n` responses once it is finished. `prompt_of` maps an item that this engine takes from
        the queue to its prompt; `how` says how to sample."""
        led = self._led
        assert led
        for group in self.groups_from(lambda free, slots: [*map(prompt_of, self.queue.take(free, slots))], n, how):
            if self._durable:
                led.progressed()
            yield group
            self.finished(sum(len(response.ids) for response in group.responses))

    def groups_from(self, take: PromptSource, n: int, how: Sampling) -> Iterator[SampledGroup]:
        """Yield groups as `groups` does; here `take` takes items from the queue, and the caller calls `finished`.

        The iterator ends early when the engine fails or the run is asked to stop; unfinished requests are dropped.
        """
        led, stop = self._led, self._run.stop
        assert led
        if led.engine.running and not stop.poll():
            with led.guarded(), closing(led.engine.generate_from(take, n, how)) as groups:
                for group in groups:
                    yield group
                    if stop.poll():
                        break
        if self._durable and not led.engine.running:
            self.queue.leave()
        if stop.requested:
            self.queue.close()

    def finished(self, tokens: int) -> None:
        """Count one more item as finished; `tokens` is the number of its sampled tokens."""
        self.queue.finished(tokens)
        self.show()

    def show(self) -> None:
        """Advance the main rank's bar to what all engines have finished."""
        if self._run.is_main:
            (items, tokens), (done, earlier) = self.queue.totals(), self._before
            self._bar.advance(done + items - self._bar.done, earlier + tokens - self._bar.tokens)

    def end(self, mine: T) -> Outcome[T]:
        """Wait until every engine is done; returns the outcome, with `mine` as this rank's result. Collective."""
        # Not a barrier of torch: a long generation would exceed the timeout of its collective (ProcessGroupNCCL). The
        # world's barrier waits as long as the other ranks have heartbeats.
        self._run.world.barrier(self.show)
        self.show()
        failed, led = None, self._led
        if led and led.failure:
            failed, led.failure = Failed(str(led.failure), led.failures_in_a_row), None
        parts = self._run.world.gather((mine, failed, self._run.stop.requested))
        prefix = [f"rank {rank}: " if len(parts) > 1 else "" for rank in range(len(parts))]
        failures = [Failed(prefix[rank] + f.text, f.in_a_row) for rank, (_, f, _) in enumerate(parts) if f]
        return Outcome([result for result, _, _ in parts], failures, any(stopping for _, _, stopping in parts))


def open_round(
    run: Run,
    led: LedEngine | None,
    missing: Sequence[int],
    bar: Bar,
    engines: int | None = None,
    durable: bool = True,
) -> Round:
    """Open a round over rank 0's `missing` items; `led` is this rank's engine, if it leads one. Collective.

    Args:
        engines: number of engines that share the round; by default those of the run.
        durable: whether finished items are kept if an engine fails. If so, a finished item sets the engine's failures
            in a row to 0, and once half of the engines have failed the others end the round too, so that all are
            restarted together. If not, as in an evaluation, which is dropped unless it is complete, the others go on.
    """
    world = run.world
    if world.size == 1:
        return Round(run, led, PromptQueue(missing), bar, durable)
    # Counters of the rendezvous store hand out the items, so a fast engine takes more than a slow one.
    name, items = world.broadcast((uuid4().hex, missing))
    queue = PromptQueue(
        items,
        world.engines if engines is None else engines,
        lambda counter, amount: world.count(f"queue/{name}/{counter}", amount),
    )
    return Round(run, led, queue, bar, durable)


def report(run: Run, failures: Iterable[Failed], subject: str = "The engine") -> None:
    """Log and print the failures of a round. Every rank calls this with the same failures.

    Raises EngineFailure after MOST_FAILURES failures of one engine in a row.
    """
    for failed in failures:
        if failed.in_a_row >= MOST_FAILURES:
            raise EngineFailure(failed.text)
        run.log.event("engine_failure", failed.text.splitlines()[0])
        run.display.say(f"{failed.text}\n{subject} is restarted for what is missing.")


def check_shared(world: World, stage: StageStore, seen: bool) -> None:
    """Raise UserError on every rank if `seen` is false on one: that rank does not see what others have written to the
    stage. Collective."""
    blind = [rank for rank, sees in enumerate(world.gather(seen)) if not sees]
    if blind:
        raise UserError(
            f"rank {blind[0]} does not see what other ranks have written to {stage.directory}: put run.dir on a "
            "file system that all nodes share, under the same path"
        )
