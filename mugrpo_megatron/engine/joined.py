"""The part of an engine that runs on a node other than its leader's: SGLang's ranks of that node, in a host process.

SGLang's rank 0 hands every request, of weights and of memory too, to the ranks of all nodes. So nothing is asked of
this part: it is started with the leader's, watched, and ended with it.
"""

from __future__ import annotations

import math
import threading
from contextlib import suppress
from pathlib import Path

from mugrpo_megatron.engine.launch import engine_arguments, engine_environment, runs_on_cuda
from mugrpo_megatron.engine.meeting import Bond
from mugrpo_megatron.engine.placement import EngineSlot, rank_of_environment
from mugrpo_megatron.engine.process import DEATH_SECONDS, STARTING, HostProcess
from mugrpo_megatron.errors import CollectiveFailure, EngineFailure, EngineStopped
from mugrpo_megatron.recipe import Recipe

STOP_SECONDS = DEATH_SECONDS + 2.0
"""The watching thread ends the process within this time."""


class JoinedEngine:
    """The host process of one of an engine's other nodes, and the thread that watches it.

    When the process ends, the thread tells the leader why; when the leader's process or that of a third node has ended,
    it ends this one. Either way the engine's leader reports the failure, and the next `meet` starts all parts again.
    """

    def __init__(self, recipe: Recipe, model_dir: Path, log: Path, slot: EngineSlot) -> None:
        """Prepare it, with its output in `log`; UserError when the recipe cannot be served."""
        self._section, self._cuda, self.slot, self.log = recipe.engine, runs_on_cuda(recipe), slot, log
        self._arguments = engine_arguments(recipe, model_dir, self._cuda, slot)
        self._environment = engine_environment(recipe, model_dir, self._cuda, slot)
        self._bond = Bond()
        self._host: HostProcess | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    @property
    def running(self) -> bool:
        """Whether there is a process that nothing has ended yet."""
        return self._thread is not None and self._thread.is_alive()

    def meet(self, bond: Bond) -> None:
        """End the process if there is one, and start one that meets the leader's; returns at once."""
        self.stop()
        self._bond, self._stopping = bond, threading.Event()
        # Made in this thread: the kernel ends it with the thread that made it.
        host = HostProcess(self._environment, self._cuda, self._section.compiled, alone=False)
        host.load([self._arguments | {"dist_init_addr": bond.address}], self.log, self._stopping.is_set, bond.broken)
        self._host = host
        self._thread = threading.Thread(target=self._watch, args=(host, bond), name="joined engine", daemon=True)
        self._thread.start()

    def sleep(self) -> None:
        """After the leader's engine was put to sleep: end the process where the leader's has ended, for any reason."""
        if self._section.between_stages == "restart" or self._bond.broken(now=True):
            self.stop()

    def stop(self) -> None:
        """End the process; returns when it has gone."""
        if self._thread is not None and self._host is not None:
            self._stopping.set()
            self._thread.join(STOP_SECONDS)  # which ends it, unless it waits for a rendezvous that is gone
            self._host.end()
            self._host, self._thread = None, None

    def _watch(self, host: HostProcess, bond: Bond) -> None:
        try:
            host.receive(self._section.start_timeout_s, STARTING)
            host.receive(math.inf, "service")  # nothing comes but its end
        except EngineStopped:
            return
        except CollectiveFailure:  # the run ends, and its other ranks with it
            host.end()
            return
        except EngineFailure as failure:
            with suppress(CollectiveFailure):
                bond.ended(f"on its node {self.slot.node}, that of rank {rank_of_environment()}: {failure}")
