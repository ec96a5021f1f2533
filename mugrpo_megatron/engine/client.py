"""The learner rank's side of an SGLang engine: start it, load weights, generate, put it to sleep, wake it, stop it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal

from mugrpo_megatron.cpu.sglang import replica_arguments
from mugrpo_megatron.cuda import finds_cuda
from mugrpo_megatron.engine.launch import EngineSpec, engine_arguments, engine_environment, replicas, starts_before
from mugrpo_megatron.engine.nodes import PeerFailure
from mugrpo_megatron.engine.placement import ALONE, EngineSlot
from mugrpo_megatron.engine.process import STARTING, ArgumentsRefused, HostProcess, Message
from mugrpo_megatron.engine.queue import LoadRecord
from mugrpo_megatron.engine.wire import Command, CommandKind, PackedGroups, ReplyKind, Request, SampledGroup, Sampling
from mugrpo_megatron.errors import EngineFailure, EngineStopped, UserError
from mugrpo_megatron.files.tensors import TensorChecksums
from mugrpo_megatron.observe.environment import group_memory
from mugrpo_megatron.samples import Prompt, Response

MemoryTag = Literal["weights", "kv_cache"]
SGLANG_TAGS: dict[MemoryTag, list[str]] = {"weights": ["weights"], "kv_cache": ["kv_cache", "cuda_graph"]}
"""Kind of engine memory -> SGLang's tags for it. SGLang frees CUDA graphs only if SGLANG_MEMORY_SAVER_CUDA_GRAPH is set
(docs/engine.md)."""
STOP_SECONDS = 5.0
MOST_FAILURES = 3
"""An engine is not started again after so many failures in a row, with no finished response between them: by then it is
clear that a new start does not help."""
PROMPTS_PER_MESSAGE = 64

PromptSource = Callable[[int, int], list[Prompt]]
"""(number of prompts in flight in the engine, number that it decodes together) -> the next prompts; may be none."""


class Engine:
    """An SGLang engine in a host process.

    `start` returns at once, so engine and learner load in parallel; the first call that needs the engine waits for it.
    A call raises EngineFailure, with the cause and the end of the engine's log, when the engine dies, hangs or answers
    with an error. The engine's processes are gone by then; `wake` or `restart` starts it again, with the weights of its
    model directory.
    """

    def __init__(
        self,
        spec: EngineSpec,
        model_dir: Path,
        log: Path,
        slot: EngineSlot = ALONE,
        cancelled: Callable[[], bool] = lambda: False,
        prelaunched: HostProcess | None = None,
    ) -> None:
        """Prepare an engine that loads `model_dir` and logs to `log`; UserError if no engine can have these settings.

        The first start uses the process `prelaunched` (`launch.prelaunch_host`), if given. Every method that waits
        calls `cancelled` repeatedly; once that returns True, it ends the engine and raises EngineStopped.
        """
        self._spec, self._section, self._cancelled, self.slot = spec, spec.section, cancelled, slot
        self._cuda = finds_cuda()
        self._arguments = engine_arguments(spec, model_dir, self._cuda, slot)
        self._environment = engine_environment(self._section, model_dir, self._cuda, slot)
        self._replicas = replicas(self._section, model_dir, self._cuda, slot)
        self.log, self._prelaunched, self._peers = log, prelaunched, PeerFailure()
        self._host: HostProcess | None = None
        self._ready, self._starts = False, starts_before(log)
        self._asleep: set[MemoryTag] = set()
        self.load_record = LoadRecord()
        """How many tokens and requests the engine had in the course of its last generation."""
        self.version = 0
        """The version of the engine's weights, which each new response is marked with."""
        self._episodes: Any = None

    @classmethod
    def start(
        cls,
        spec: EngineSpec,
        model_dir: Path,
        log: Path,
        slot: EngineSlot = ALONE,
        cancelled: Callable[[], bool] = lambda: False,
        prelaunched: HostProcess | None = None,
    ) -> Engine:
        """Make an engine from the arguments of the class, and start it; returns at once."""
        engine = cls(spec, model_dir, log, slot, cancelled, prelaunched)
        engine.restart()
        return engine

    def rendezvous(self, peers: PeerFailure) -> None:
        """Restart the leader's process of an engine over several nodes, whose processes meet at `peers.address`.

        On the engine's other nodes `FollowerNode.rendezvous` does the same at the same time.
        """
        self._peers, self._arguments = peers, self._arguments | {"dist_init_addr": peers.address}
        # SGLang's queues listen on this address (utils/network.py).
        self._environment = self._environment | {"SGLANG_HOST_IP": peers.host}
        self.restart()

    def restart(self) -> None:
        """End the engine's process if it runs, launch a new one, and return at once.

        Raises UserError for an engine over several nodes if `rendezvous` has not been called, which gives it an
        address.
        """
        if self._section.nodes > 1 and not self._peers.address:
            raise UserError(
                "engine.nodes: an engine over several nodes starts only in a run that has ranks on each of them; set "
                "engine.nodes to 1 for this command"
            )
        self._end()
        # A restarted engine must not repeat the random stream that it began with.
        arguments = self._arguments | {"random_seed": self._arguments["random_seed"] + 1_000_003 * self._starts}
        host, self._prelaunched = self._prelaunched, None
        if host is None or host.cuda != self._cuda:
            host = HostProcess(self._environment, self._cuda, self._section.nodes == 1)
        self._host = host
        host.load(replica_arguments(arguments, self._replicas), self.log, self._cancelled, self._peers.cause)
        self._starts += 1

    @property
    def running(self) -> bool:
        """Whether the engine has been started, and neither been stopped nor failed in a call since."""
        return self._host is not None

    @property
    def memory(self) -> float:
        """Bytes of host memory that the engine's processes hold; 0 if the engine is not running."""
        return group_memory(self._host.pid) if self._host is not None else 0.0

    @property
    def readers(self) -> int:
        """The number of processes that read each bucket of weights: tensor parallel ranks times replicas."""
        return self._section.tensor * self._replicas

    def stop(self) -> None:
        """End the engine. One that has loaded its model is asked to end, and killed after `STOP_SECONDS`.

        An engine that is still loading, or whose run was `cancelled`, is killed at once.
        """
        patience_s = 0.0
        if self._episodes is not None:
            self._episodes.close()
            self._episodes = None
        if self._host is not None and self._ready and self._host.alive and not self._cancelled():
            with suppress(EngineFailure):  # an engine that has just died need not be ended
                self._host.send(("stop", None), STOP_SECONDS, "stop")
                patience_s = STOP_SECONDS
        self._end(patience_s)

    def wait_ready(self) -> None:
        """Wait until the engine has loaded its model.

        If SGLang refuses its arguments, raises UserError if some are from `[engine.extra]`, and ArgumentsRefused if
        not.
        """
        if self._ready:
            return
        try:
            self._receive("ready", self._section.start_timeout_s, STARTING)
        except ArgumentsRefused as refusal:
            if not self._section.extra:
                raise
            raise UserError(
                f"engine.extra: SGLang does not start with {', '.join(self._section.extra)} ({refusal.reason}); "
                "correct or remove the key that SGLang's message names"
            ) from None
        self._ready = True

    def sleep(self) -> None:
        """Free the engine's memory until `wake`; does nothing if it is free already.

        With `engine.between_stages = "restart"` the engine's process is ended. With `"sleep"` SGLang frees device
        memory on CUDA, and on CPU nothing is freed.
        """
        if self._section.between_stages == "restart":
            self.stop()
            return
        awake = [tag for tag in SGLANG_TAGS if tag not in self._asleep]
        if self._cuda and self._host is not None and awake:
            self._call("sleep", [name for tag in awake for name in SGLANG_TAGS[tag]])
            self._asleep.update(awake)

    def wake(self, tag: MemoryTag) -> None:
        """Allocate the memory of `tag` again. An engine that was stopped or has failed is restarted, with all memory.

        The order is: wake `weights`, sync, wake `kv_cache`. The cache comes last, because a bucket might not fit into
        memory beside both weights and cache.
        """
        if self._host is None:
            self.restart()
        elif tag in self._asleep:
            self._call("wake", SGLANG_TAGS[tag])
            self._asleep.remove(tag)

    def load_bucket(self, serialized: list[bytes]) -> None:
        """Load one bucket of weights; `serialized` has an item of `weights.sync.serialize` for each reader."""
        self._call("load_bucket", serialized)

    def set_version(self, version: int) -> None:
        """End a weight sync: empty the prefix cache, and mark every later response with `version`."""
        self._call("set_version", version)
        self.version = version

    def checksums(self) -> list[TensorChecksums]:
        """Compute the checksums of the engine's weights, one mapping for each tensor parallel rank.

        A mapping has, for SGLang's name of each weight, the weight's dtype and SHA-256. SGLang fuses q, k and v into
        one weight, and gate and up into another.
        """
        return self._call("checksums", None)

    def generate(self, prompts: Iterable[Prompt], n: int, sampling: Sampling) -> Generator[SampledGroup]:
        """Sample `n` responses to each prompt; yields groups in order of completion.

        Closing the iterator early aborts the prompts in flight.
        """
        source = iter(prompts)

        def take(in_flight: int, slots: int) -> list[Prompt]:
            # The engine gets twice as many prompts as it decodes together, so that SGLang's scheduler never waits for
            # one.
            return list(islice(source, max(0, min(PROMPTS_PER_MESSAGE, 2 * slots - in_flight))))

        return self.generate_from(take, n, sampling)

    def generate_from(self, take: PromptSource, n: int, sampling: Sampling) -> Generator[SampledGroup]:
        """Sample as `generate` does, from prompts that `take` returns, so that several engines can share a queue.

        `take` is called whenever groups have finished. The iterator ends when no prompt is in flight and `take` returns
        none. If the recipe has episodes, each response is one.
        """
        if self._spec.episodes is not None:
            if self._episodes is None:
                self._episodes = self._spec.episodes(self)
            yield from self._episodes.generate(take, n, sampling)
            return
        in_flight: dict[int, Prompt] = {}
        slots = self.slots(n)
        keys = count()
        with self.generation(sampling):
            while True:
                while prompts := take(len(in_flight), slots):
                    requests = [
                        Request(
                            next(keys),
                            prompt.ids,
                            n,
                            prompt.index,
                            logprob_tokens=prompt.logprob_tokens,
                            support_ids=prompt.support_ids,
                        )
                        for prompt in prompts
                    ]
                    in_flight.update((request.key, prompt) for request, prompt in zip(requests, prompts, strict=True))
                    self.submit(requests)
                if not in_flight:
                    return
                for key, responses in self.receive_groups():
                    yield SampledGroup(in_flight.pop(key), responses)

    def slots(self, n: int) -> int:
        """The number of groups of `n` responses that the engine decodes together."""
        return max(1, int(self._arguments["max_running_requests"]) // n)

    @contextmanager
    def generation(self, sampling: Sampling) -> Iterator[None]:
        """Let the engine answer requests in the block (`submit`, `receive_groups`); its end aborts those in flight."""
        self.wait_ready()
        self._send(("generate", sampling), "generate")
        self.load_record = LoadRecord()
        try:
            yield
        finally:
            if self._host is not None:
                self._send(("close", None), "generate")
                while self._receive_any(self._section.request_timeout_s, "generate")[0] == "groups":
                    pass  # the host sent these groups before it read `close`; they are dropped

    def submit(self, requests: list[Request]) -> None:
        """Send requests; returns at once."""
        self._send(("requests", requests), "generate")

    def abort(self, keys: Collection[int]) -> None:
        """Ask the engine to abort requests, and return at once. Answers that are on the way still come."""
        self._send(("abort", list(keys)), "generate")

    def receive_groups(self) -> Iterator[tuple[int, list[Response]]]:
        """Wait for finished groups, and yield (key of the request, its responses) for each."""
        groups: PackedGroups = self._receive("groups", self._section.request_timeout_s, "generate")
        return groups.unpack()

    def poll_groups(self, others: Sequence[Any], timeout_s: float) -> list[tuple[int, list[Response]]] | None:
        """Receive groups as `receive_groups` does, but wait at most `timeout_s`, or until one of `others` is readable.

        Returns (key of the request, its responses) for each group; an empty list if the engine's message had no groups,
        and None if there was no message.
        """
        with self._connected() as host:
            if not host.wait(others, timeout_s, "generate"):
                return None
            kind, value = host.receive(self._section.request_timeout_s, "generate")
        if kind == "progress":
            self.load_record.add(value)
            return []
        return list(value.unpack())

    def _call(self, command: CommandKind, value: Any) -> Any:
        self.wait_ready()
        self._send((command, value), command)
        return self._receive("result", self._section.request_timeout_s, command)

    def _send(self, message: Command, operation: str) -> None:
        with self._connected() as host:
            host.send(message, self._section.request_timeout_s, operation)

    def _receive(self, kind: ReplyKind, timeout_s: float, operation: str) -> Any:
        received, value = self._receive_any(timeout_s, operation)
        if received != kind:
            raise RuntimeError(
                f"the engine's host has sent {received!r} during {operation} where {kind!r} was expected, which is an "
                "error of this program"
            )
        return value

    def _receive_any(self, timeout_s: float, operation: str) -> Message:
        """Receive the next message that is not `progress`; a `progress` message starts the timeout anew."""
        with self._connected() as host:
            while (message := host.receive(timeout_s, operation))[0] == "progress":
                self.load_record.add(message[1])
            return message

    @contextmanager
    def _connected(self) -> Iterator[HostProcess]:
        """Yield the host process. If it fails in the block, it counts as ended, and the other nodes get the reason."""
        if self._host is None:
            raise EngineFailure(
                "the engine is not running, because it was stopped or failed before; `wake` restarts it"
            )
        try:
            yield self._host
        except EngineFailure as failure:
            self._host = None
            self._peers.report(f"on the node that leads it: {str(failure).splitlines()[0]}")
            raise

    def _end(self, patience_s: float = 0.0) -> None:
        if self._host is not None:
            self._host.end(patience_s)
        self._host, self._ready = None, False
        self._asleep.clear()


def first_start_problem(engine: Engine) -> str:
    """Wait until a run's first engine has started; returns a sentence about why it has not, else "".

    It returns "" too if the run is asked to stop. A failure of the first start is caused by the recipe or the machine.
    """
    try:
        engine.wait_ready()
    except EngineStopped:
        return ""  # the run was asked to stop; this rank ends at its next collective
    except EngineFailure as failure:
        errors = [line.strip() for line in str(failure).splitlines() if re.search(r"\w(Error|Exception): ", line)]
        cause = errors[-1] if errors else str(failure).splitlines()[0]
        return f"the engine does not start ({cause}): check the recipe's engine section; its output is in {engine.log}"
    return ""
