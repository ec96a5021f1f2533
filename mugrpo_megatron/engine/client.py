"""Client of an SGLang engine: start it, load weights, generate, put it to sleep, wake it, stop it."""

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
"""Kind of engine memory -> SGLang's tags for it. It frees CUDA graphs where SGLANG_MEMORY_SAVER_CUDA_GRAPH is set
(docs/engine.md)."""
STOP_SECONDS = 5.0
MOST_FAILURES = 3
"""Failures in a row, without a finished response between them, after which an engine is not started again: the third
has the cause of the first two."""
PROMPTS_PER_MESSAGE = 64

PromptSource = Callable[[int, int], list[Prompt]]
"""(prompts in flight in the engine, prompts that it decodes together) -> the next prompts, possibly empty."""


class Engine:
    """An SGLang engine in a host process.

    `start` returns at once, so engine and learner load in parallel; the first call that needs the engine waits for it.
    A call raises EngineFailure, with the cause and the end of the engine's log, when the engine dies, hangs or refuses.
    Its processes are gone by then; `wake` or `restart` starts it again, with the weights of its model directory.
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
        """Prepare an engine on `model_dir` that logs to `log`; UserError when the recipe cannot be served.

        Its first start uses `prelaunched` (`launch.prelaunch_host`). Every wait calls `cancelled` repeatedly; once that
        returns True, the call ends the engine and raises EngineStopped.
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
        """Readings of the engine's load in the last generation."""
        self.version = 0
        """Version of the weights, which new responses carry."""
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
        """Launch an engine and return at once; takes the arguments of the class."""
        engine = cls(spec, model_dir, log, slot, cancelled, prelaunched)
        engine.restart()
        return engine

    def rendezvous(self, peers: PeerFailure) -> None:
        """Restart a multi-node engine; every node calls this (`FollowerNode.rendezvous`)."""
        self._peers, self._arguments = peers, self._arguments | {"dist_init_addr": peers.address}
        # SGLang's queues listen on this address (utils/network.py).
        self._environment = self._environment | {"SGLANG_HOST_IP": peers.host}
        self.restart()

    def restart(self) -> None:
        """End the process, if any, launch a new one, and return at once."""
        if self._section.nodes > 1 and not self._peers.address:
            raise UserError("an engine of several nodes needs a run's ranks on each of them: set engine.nodes to 1")
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
        """Whether the engine is started: True until a stop, or until a call notices a failure."""
        return self._host is not None

    @property
    def memory(self) -> float:
        """Resident bytes of the engine's processes, without device memory; 0 when not running."""
        return group_memory(self._host.pid) if self._host is not None else 0.0

    @property
    def readers(self) -> int:
        """Number of processes (tensor parallel ranks, replicas) that read weights: `load_bucket` takes a copy for
        each."""
        return self._section.tensor * self._replicas

    def stop(self) -> None:
        """End the engine: with a stop message when it is idle, else by killing its process group."""
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
        """Wait until the engine has loaded its model; UserError when SGLang refuses `[engine.extra]`."""
        if self._ready:
            return
        try:
            self._receive("ready", self._section.start_timeout_s, STARTING)
        except ArgumentsRefused as refusal:
            if not self._section.extra:
                raise
            raise UserError(
                f"engine.extra: SGLang does not start with {', '.join(self._section.extra)} ({refusal.reason}); "
                "correct or remove what it names"
            ) from None
        self._ready = True

    def sleep(self) -> None:
        """Free memory until `wake`: release it or end the process (`engine.between_stages`). Idempotent."""
        if self._section.between_stages == "restart":
            self.stop()
            return
        awake = [tag for tag in SGLANG_TAGS if tag not in self._asleep]
        if self._cuda and self._host is not None and awake:
            self._call("sleep", [name for tag in awake for name in SGLANG_TAGS[tag]])
            self._asleep.update(awake)

    def wake(self, tag: MemoryTag) -> None:
        """Allocate the memory of `tag` again; restart an engine that was stopped or has failed, with all memory awake.

        Wake `weights`, sync, then wake `kv_cache`: a bucket may not fit next to both.
        """
        if self._host is None:
            self.restart()
        elif tag in self._asleep:
            self._call("wake", SGLANG_TAGS[tag])
            self._asleep.remove(tag)

    def load_bucket(self, serialized: list[bytes]) -> None:
        """Load one bucket of weights (`weights.sync.serialize`), one serialisation a reader."""
        self._call("load_bucket", serialized)

    def set_version(self, version: int) -> None:
        """End a weight sync: flush the prefix cache, and tag every later response with `version`."""
        self._call("set_version", version)
        self.version = version

    def checksums(self) -> list[TensorChecksums]:
        """Per tensor parallel rank: SGLang's name of each weight (q, k, v and gate, up fused) -> dtype and SHA-256."""
        return self._call("checksums", None)

    def generate(self, prompts: Iterable[Prompt], n: int, sampling: Sampling) -> Generator[SampledGroup]:
        """Sample `n` responses to each prompt; yields groups in order of completion.

        Closing the iterator early aborts the prompts in flight.
        """
        source = iter(prompts)

        def take(in_flight: int, slots: int) -> list[Prompt]:
            # Twice what is decoded together, so that SGLang's scheduler never waits for a request.
            return list(islice(source, max(0, min(PROMPTS_PER_MESSAGE, 2 * slots - in_flight))))

        return self.generate_from(take, n, sampling)

    def generate_from(self, take: PromptSource, n: int, sampling: Sampling) -> Generator[SampledGroup]:
        """Sample as `generate` does, from a source that several engines share; `take` is called whenever groups have
        finished.

        Ends when no prompt is in flight and `take` returns none. With `rollout.function` a response is an episode.
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
        """Groups of `n` responses that are decoded together."""
        return max(1, int(self._arguments["max_running_requests"]) // n)

    @contextmanager
    def generation(self, sampling: Sampling) -> Iterator[None]:
        """Open a generation, for `submit` and `receive_groups`; closing it aborts requests in flight."""
        self.wait_ready()
        self._send(("generate", sampling), "generate")
        self.load_record = LoadRecord()
        try:
            yield
        finally:
            if self._host is not None:
                self._send(("close", None), "generate")
                while self._receive_any(self._section.request_timeout_s, "generate")[0] == "groups":
                    pass  # groups that the host sent before it read the abort are dropped

    def submit(self, requests: list[Request]) -> None:
        """Send requests; returns at once."""
        self._send(("requests", requests), "generate")

    def abort(self, keys: Collection[int]) -> None:
        """Abort requests in flight, whose answers may still come; returns at once."""
        self._send(("abort", list(keys)), "generate")

    def receive_groups(self) -> Iterator[tuple[int, list[Response]]]:
        """Wait for finished groups; returns (key of the request, responses)."""
        groups: PackedGroups = self._receive("groups", self._section.request_timeout_s, "generate")
        return groups.unpack()

    def poll_groups(self, others: Sequence[Any], timeout_s: float) -> list[tuple[int, list[Response]]] | None:
        """Receive groups as `receive_groups` does, but wait at most `timeout_s`, or until one of `others` is readable.

        Returns None where the engine has sent no message; a message may hold no group.
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
            raise RuntimeError(f"expected {kind!r} from the engine's host, got {received!r}")
        return value

    def _receive_any(self, timeout_s: float, operation: str) -> Message:
        """Receive a message other than `progress`, each of which restarts the timeout."""
        with self._connected() as host:
            while (message := host.receive(timeout_s, operation))[0] == "progress":
                self.load_record.add(message[1])
            return message

    @contextmanager
    def _connected(self) -> Iterator[HostProcess]:
        """Yields the host process; on a failure drops the process and notifies the other nodes."""
        if self._host is None:
            raise EngineFailure("the engine is not running: it was stopped, or it failed before; restart it")
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
    """The failure of a run's first start, empty when the engine starts; its cause is the recipe or the machine."""
    try:
        engine.wait_ready()
    except EngineStopped:
        return ""  # another rank was asked to stop; this rank ends at its next collective
    except EngineFailure as failure:
        errors = [line.strip() for line in str(failure).splitlines() if re.search(r"\w(Error|Exception): ", line)]
        cause = errors[-1] if errors else str(failure).splitlines()[0]
        return f"the engine does not start ({cause}): check the recipe's engine section; its output is in {engine.log}"
    return ""
