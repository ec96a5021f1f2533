"""Client of an SGLang engine: start it, load weights, generate, put it to sleep, wake it, stop it."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal

from mugrpo_megatron.cpu.sglang import replica_arguments
from mugrpo_megatron.cuda import finds_cuda
from mugrpo_megatron.engine.launch import engine_arguments, engine_environment, replicas, starts_before
from mugrpo_megatron.engine.nodes import PeerFailure
from mugrpo_megatron.engine.placement import ALONE, EngineSlot
from mugrpo_megatron.engine.process import STARTING, EngineRefused, HostProcess
from mugrpo_megatron.engine.queue import LoadRecord
from mugrpo_megatron.engine.wire import Groups, Message, Request, Sampling
from mugrpo_megatron.errors import EngineFailure, EngineStopped, UserError
from mugrpo_megatron.files.tensors import TensorChecksums
from mugrpo_megatron.observe.environment import group_memory
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.functions import load_function
from mugrpo_megatron.samples import Prompt, Response

Tag = Literal["weights", "kv_cache"]
TAGS: tuple[Tag, ...] = ("weights", "kv_cache")
STOP_SECONDS = 5.0
MOST_FAILURES = 3
"""Failures in a row, without a finished response between them, after which an engine is not started again: the third
has the cause of the first two."""
PROMPTS_PER_MESSAGE = 64
EPISODES = "mugrpo_megatron.extras.episodes.episodes:Episodes"
"""What answers prompts with a user's function (`rollout.function`) instead of one response."""

PromptSource = Callable[[int, int], list[Prompt]]
"""(prompts in flight in the engine, prompts that it decodes together) -> the next prompts, possibly empty."""


class Engine:
    """One SGLang engine in a host process of its own.

    `start` returns at once, so engine and learner load in parallel; the first call that needs the engine waits for it.
    A call raises EngineFailure, with the cause and the end of the engine's log, when the engine dies, hangs or refuses.
    Its processes are gone by then; `wake` or `restart` starts it again, with the weights of its model directory.
    """

    def __init__(
        self,
        recipe: Recipe,
        model_dir: Path,
        log: Path,
        slot: EngineSlot = ALONE,
        cancelled: Callable[[], bool] = lambda: False,
        ahead: HostProcess | None = None,
    ) -> None:
        """Prepare an engine on `model_dir` that logs to `log`; UserError when the recipe cannot be served.

        Its first process is `ahead`, if that was started for this recipe on this device. Every wait calls `cancelled`
        repeatedly; once that is True, the call ends the engine and raises EngineStopped.
        """
        self._recipe, self._section, self._cancelled, self.slot = recipe, recipe.engine, cancelled, slot
        self._cuda = finds_cuda()
        self._arguments = engine_arguments(recipe, model_dir, self._cuda, slot)
        self._environment = engine_environment(recipe, model_dir, self._cuda, slot)
        self._replicas = replicas(self._section, model_dir, self._cuda, slot)
        self.log, self._ahead, self._bond = log, ahead, PeerFailure()
        self._host: HostProcess | None = None
        self._ready, self._starts = False, starts_before(log)
        self._asleep: set[Tag] = set()
        self.load_record = LoadRecord()
        """Readings of the engine's load in the last generation."""
        self.version = 0
        """That responses are tagged with."""
        self._episodes: Any = None

    @classmethod
    def start(
        cls,
        recipe: Recipe,
        model_dir: Path,
        log: Path,
        slot: EngineSlot = ALONE,
        cancelled: Callable[[], bool] = lambda: False,
        ahead: HostProcess | None = None,
    ) -> Engine:
        """Launch an engine and return at once; the arguments are those of the class."""
        engine = cls(recipe, model_dir, log, slot, cancelled, ahead)
        engine.restart()
        return engine

    def rendezvous(self, bond: PeerFailure) -> None:
        """`restart` an engine of several nodes, while its other nodes do the same (`engine.nodes`)."""
        self._bond, self._arguments = bond, self._arguments | {"dist_init_addr": bond.address}
        self._environment = self._environment | {"SGLANG_HOST_IP": bond.host}  # where SGLang's queues listen
        self.restart()

    def restart(self) -> None:
        """End the process if there is one, launch a new one, and return at once."""
        if self._section.nodes > 1 and not self._bond.address:
            raise UserError("an engine of several nodes needs a run's ranks on each of them: set engine.nodes to 1")
        self._end()
        # A restarted engine must not repeat the random stream that it began with.
        arguments = self._arguments | {"random_seed": self._arguments["random_seed"] + 1_000_003 * self._starts}
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.cuda != self._cuda:
            ahead = HostProcess(self._environment, self._cuda, self._section.nodes == 1)
        self._host = ahead
        self._host.load(replica_arguments(arguments, self._replicas), self.log, self._cancelled, self._bond.broken)
        self._starts += 1

    @property
    def running(self) -> bool:
        """Whether there is a process: True from a start until a stop or a failure that a call has noticed."""
        return self._host is not None

    @property
    def memory(self) -> float:
        """Resident bytes of the engine's processes, 0 without any; an engine on CUDA has more on its devices."""
        return group_memory(self._host.pid) if self._host is not None else 0.0

    @property
    def readers(self) -> int:
        """Processes that read weights, tensor parallel ranks and replicas: `load_bucket` takes a serialisation each."""
        return self._section.tensor * self._replicas

    def stop(self) -> None:
        """End the engine: with a stop message when it is idle, else by killing its process group.

        It is killed as well when the run was asked to stop.
        """
        patience_s = 0.0
        if self._episodes is not None:
            self._episodes.close()
        if self._host is not None and self._ready and self._host.alive and not self._cancelled():
            with suppress(EngineFailure):  # it has just died, which ends it too
                self._host.send(("stop", None), STOP_SECONDS, "stop")
                patience_s = STOP_SECONDS
        self._end(patience_s)

    def wait_ready(self) -> None:
        """Wait until the engine has loaded its model; UserError when SGLang refuses `[engine.extra]`."""
        if self._ready:
            return
        try:
            self._receive("ready", self._section.start_timeout_s, STARTING)
        except EngineRefused as refusal:
            if not self._section.extra:
                raise
            raise UserError(
                f"engine.extra: SGLang does not start with {', '.join(self._section.extra)} ({refusal.reason}); "
                "correct or remove what it names"
            ) from None
        self._ready = True

    def sleep(self) -> None:
        """Free the engine's memory until `wake`: release it or end the process, as `engine.between_stages` says.

        Does nothing to an engine that sleeps, was stopped or has failed.
        """
        if self._section.between_stages == "restart":
            self.stop()
        elif self._cuda and self._host is not None and (awake := [tag for tag in TAGS if tag not in self._asleep]):
            self._call("sleep", awake)
            self._asleep.update(awake)

    def wake(self, tag: Tag) -> None:
        """Allocate the memory of `tag` again. Wake `weights`, sync, wake `kv_cache`: a bucket may not fit next to both.

        An engine that was stopped or has failed is restarted, with all its memory awake.
        """
        if self._host is None:
            self.restart()
        elif tag in self._asleep:
            self._call("wake", [tag])
            self._asleep.remove(tag)

    def load_bucket(self, serialized: list[bytes]) -> None:
        """Load one bucket of weights (`weights.sync.serialize`): one serialisation per reader."""
        self._call("load_bucket", serialized)

    def set_version(self, version: int) -> None:
        """End a weight sync: flush the prefix cache, and tag every later response with `version`."""
        self._call("set_version", version)
        self.version = version

    def checksums(self) -> list[TensorChecksums]:
        """Per tensor parallel rank: SGLang's name of each weight (q, k, v and gate, up fused) -> type and SHA-256."""
        return self._call("checksums")

    def generate(
        self, prompts: Iterable[Prompt], n: int, sampling: Sampling
    ) -> Generator[tuple[Prompt, list[Response]]]:
        """Sample `n` responses to each prompt; yield groups in order of completion.

        Keeps twice as many prompts in flight as are decoded together, so the scheduler always has a next request.
        Closing the iterator early aborts the prompts in flight.
        """
        source = iter(prompts)

        def take(in_flight: int, slots: int) -> list[Prompt]:
            return list(islice(source, max(0, min(PROMPTS_PER_MESSAGE, 2 * slots - in_flight))))

        return self.generate_from(take, n, sampling)

    def generate_from(self, take: PromptSource, n: int, sampling: Sampling) -> Generator[tuple[Prompt, list[Response]]]:
        """`generate` from a source that several engines share: `take` is called whenever groups have finished.

        Ends when no prompt is in flight and `take` returns none. With `rollout.function` a response is an episode.
        """
        if self._recipe.rollout.function:
            if self._episodes is None:
                self._episodes = load_function("rollout.function", EPISODES)(self._recipe, self)
            yield from self._episodes.generate(take, n, sampling)
            return
        in_flight: dict[int, Prompt] = {}
        slots = self.slots(n)
        keys = count()
        with self.answering(sampling):
            while True:
                while prompts := take(len(in_flight), slots):
                    work = [
                        Request(
                            next(keys),
                            one.ids,
                            n,
                            one.index,
                            logprob_tokens=one.logprob_tokens,
                            support_ids=one.support_ids,
                        )
                        for one in prompts
                    ]
                    in_flight.update((one.key, prompt) for one, prompt in zip(work, prompts, strict=True))
                    self.ask(work)
                if not in_flight:
                    return
                for key, responses in self.answers():
                    yield in_flight.pop(key), responses

    def slots(self, n: int) -> int:
        """Groups of `n` responses that are decoded together."""
        return max(1, int(self._arguments["max_running_requests"]) // n)

    @contextmanager
    def answering(self, sampling: Sampling) -> Iterator[None]:
        """The block may `ask` and take `answers`; its end aborts what is in flight."""
        self.wait_ready()
        self._send(("generate", sampling), "generate")
        self.load_record = LoadRecord()
        try:
            yield
        finally:
            if self._host is not None:
                self._close_generation()

    def ask(self, work: list[Request]) -> None:
        """Have the engine answer prompts; returns at once."""
        self._send(("prompts", work), "generate")

    def answers(self) -> Iterator[tuple[int, list[Response]]]:
        """The next groups that are finished, by the keys that they were asked with; waits for them."""
        groups: Groups = self._receive("groups", self._section.request_timeout_s, "generate")
        return groups.unpack()

    def answers_among(self, others: Sequence[Any], timeout_s: float) -> list[tuple[int, list[Response]]] | None:
        """`answers`, but waits a moment only, and no longer than `timeout_s` or until one of `others` is readable.

        None where the engine has sent nothing; a message of it may hold no answer.
        """
        with self._used() as host:
            if not host.wait(others, timeout_s, "generate"):
                return None
            kind, value = host.receive(self._section.request_timeout_s, "generate")
        if kind == "progress":
            self.load_record.add(value)
            return []
        return list(value.unpack())

    def _close_generation(self) -> None:
        """Abort what is in flight, and drop the groups that the host has sent before it hears of it."""
        self._send(("close", None), "generate")
        while self._receive_any(self._section.request_timeout_s, "generate")[0] == "groups":
            pass

    def _call(self, name: str, *arguments: Any) -> Any:
        self.wait_ready()
        self._send(("call", (name, arguments)), name)
        return self._receive("result", self._section.request_timeout_s, name)

    def _send(self, message: Message, doing: str) -> None:
        with self._used() as host:
            host.send(message, self._section.request_timeout_s, doing)

    def _receive(self, kind: str, timeout_s: float, doing: str) -> Any:
        received, value = self._receive_any(timeout_s, doing)
        if received != kind:
            raise RuntimeError(f"the engine's host sent {received!r} where {kind!r} was due")
        return value

    def _receive_any(self, timeout_s: float, doing: str) -> Message:
        """The next message other than `progress`: the engine is silent when no token comes for `timeout_s`."""
        with self._used() as host:
            while (message := host.receive(timeout_s, doing))[0] == "progress":
                self.load_record.add(message[1])
            return message

    @contextmanager
    def _used(self) -> Iterator[HostProcess]:
        """The process; one that fails in the block is forgotten, and the engine's other nodes hear of it."""
        if self._host is None:
            raise EngineFailure("the engine is not running: it was stopped, or it failed before; restart it")
        try:
            yield self._host
        except EngineFailure as failure:
            self._host = None
            self._bond.ended(f"on the node that leads it: {str(failure).splitlines()[0]}")
            raise

    def _end(self, patience_s: float = 0.0) -> None:
        if self._host is not None:
            self._host.end(patience_s)
        self._host, self._ready = None, False
        self._asleep.clear()


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
