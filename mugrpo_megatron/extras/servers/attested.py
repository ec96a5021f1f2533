"""Takes groups from servers, after the learner has checked that each server samples from the learner's weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random, SystemRandom

import numpy as np

from mugrpo_megatron.engine.wire import SampledGroup
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.servers.attest import Evidence, Values, figures, refusal
from mugrpo_megatron.extras.servers.pool import LEAST_UNREAD, Answered, Crashed, Dropped, Pool, Server, Troubled
from mugrpo_megatron.files.durable import write_json
from mugrpo_megatron.samples import Prompt, Sample
from mugrpo_megatron.terminal import visible

FIRST_TOKENS = 512
"""Tokens of a server's first groups that the learner checks before any group of that server is taken."""
BATCH_GROUPS, BATCH_S = LEAST_UNREAD // 2, 10.0
"""A batch of a server's later groups is complete after so many groups or so many seconds; the learner checks one random
group of each batch."""
POLL_S = 0.5

Measure = Callable[[Sequence[Sample], float], Values]
"""(samples, temperature) -> the learner's values of all their tokens, in order."""


@dataclass
class HeldGroups:
    """Groups of one server that wait until the learner has checked some of them."""

    groups: list[SampledGroup] = field(default_factory=list)
    since: float = field(default_factory=time.monotonic)

    @property
    def tokens(self) -> int:
        return sum(len(response.ids) for group in self.groups for response in group.responses)

    def first(self) -> list[SampledGroup]:
        """The first groups that have FIRST_TOKENS tokens together; all groups if they have fewer."""
        chosen: list[SampledGroup] = []
        for group in self.groups:
            chosen.append(group)
            if HeldGroups(chosen).tokens >= FIRST_TOKENS:
                break
        return chosen


@dataclass
class Attestor:
    """Checks the servers of a stage. What is known about each server is written to `path` after every check."""

    measure: Measure
    temperature: float
    dtype: str
    path: Path
    evidence: dict[tuple[str, int], Evidence] = field(default_factory=dict)
    """(URL, `Server.epoch`) -> the sums over the server's tokens that were compared in that epoch."""
    servers: dict[str, dict[str, object]] = field(default_factory=dict)
    _random: Random = field(default_factory=SystemRandom)

    def due(self, server: Server, epoch: int, batch: HeldGroups) -> bool:
        """Whether the batch is to be checked now: the server adds no more groups to it, or it is large enough. A batch
        that is not the server's first in this epoch is also checked once it is old enough."""
        ended = not server.in_flight or server.epoch != epoch
        if (server.url, epoch) not in self.evidence:
            return ended or batch.tokens >= FIRST_TOKENS
        return ended or len(batch.groups) >= BATCH_GROUPS or time.monotonic() - batch.since >= BATCH_S

    def refusal_of_batch(self, server: Server, epoch: int, batch: HeldGroups) -> str:
        """Check some groups of a batch; returns the reason why the batch cannot be taken, or "" if it can."""
        # Drawn from the system's randomness: a server cannot foresee which groups are checked and behave for those
        # alone.
        known = (server.url, epoch) in self.evidence
        return self.refusal(server, epoch, [self._random.choice(batch.groups)] if known else batch.first())

    def refusal(self, server: Server, epoch: int, groups: Sequence[SampledGroup]) -> str:
        """Compare groups with the learner; returns the reason why they cannot be taken, or "" if they can.

        If they can, `evidence` includes them afterwards.
        """
        samples = [sample for group in groups for sample in samples_of(group)]
        logprobs = np.concatenate([sample.engine_logprobs for sample in samples])
        known: dict[float, Values] = {}

        def values_at(temperature: float) -> Values:
            if temperature not in known:
                known[temperature] = self.measure(samples, temperature)
            return known[temperature]

        before = self.evidence.get((server.url, epoch), Evidence())
        why = refusal(before, logprobs, values_at, self.temperature, self.dtype)
        evidence = before.with_tokens(logprobs, values_at(self.temperature))
        if not why:
            self.evidence[server.url, epoch] = evidence
        served = asdict(server.served) if server.served else {}
        self.servers[server.url] = served | figures(evidence) | ({"refused": why} if why else {})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.servers)
        return why


def samples_of(group: SampledGroup) -> list[Sample]:
    """The group's responses as samples without scores."""
    prompt = np.asarray(group.prompt.ids, dtype=np.int32)
    return [
        Sample(
            group=group.prompt.index,
            problem=group.prompt.problem.id,
            prompt_ids=prompt,
            response_ids=response.ids,
            engine_logprobs=response.logprobs,
            reward=0.0,
            weight_version=response.weight_version,
            finish_reason=response.finish_reason,
        )
        for response in group.responses
    ]


@dataclass
class Patience:
    """Counts the seconds without an answer from any server, and ends the run when there are too many."""

    seconds: float
    since: float = field(default_factory=time.monotonic)
    sentences: dict[str, str] = field(default_factory=dict)
    """URL -> the trouble of that server since its last answer, or why it was refused."""

    def answered(self, server: Server) -> None:
        self.since = time.monotonic()
        self.sentences.pop(server.url, None)

    def check(self, servers: Sequence[Server], refused: Collection[Server]) -> None:
        """Raise UserError once every server is refused, or if each is refused or in trouble and none has answered for
        `seconds`."""
        waited = time.monotonic() - self.since
        if servers and len(refused) == len(servers):
            raise UserError(f"no server can be used: {self._all()}")
        if waited > self.seconds and all(server.trouble or server in refused for server in servers):
            raise UserError(f"no server has answered for {waited:.0f} s (--patience): {self._all()}")

    def _all(self) -> str:
        return visible("; ".join(self.sentences.values()) or "check that --server names the servers that are running")


def attested_groups(
    pool: Pool,
    prompts: Sequence[Prompt],
    attestor: Attestor | None,
    patience: Patience,
    stopping: Callable[[], bool],
    say: Callable[[str], None],
) -> Iterator[SampledGroup]:
    """Yield the group of each of `prompts` as soon as it may be taken; end early when `stopping()` is true.

    The learner checks a server's first tokens before it takes any group of that server, does so again each time that
    the server was away, and checks one group of each later batch. A server whose tokens do not fit is dropped: `say`
    gets the reason, and the prompts of the batch go to other servers. Without an `attestor` nothing is checked. Raises
    UserError when no server is left, or when `patience` ends.
    """
    missing = {prompt.index: prompt for prompt in prompts}
    held: dict[tuple[Server, int], HeldGroups] = {}
    refused: set[Server] = set()
    pool.put(prompts)

    def drop(server: Server, sentence: str) -> None:
        refused.add(server)
        patience.sentences[server.url] = sentence
        say(visible(f"{sentence}\nThis server is asked no more."))
        pool.drop(server)

    while missing and not stopping():
        for event in pool.events(POLL_S):
            match event:
                case Crashed(error):
                    raise error
                case Troubled(server, sentence):
                    patience.sentences[server.url] = sentence
                    say(visible(f"{sentence}\nIt is asked again; others take its prompts meanwhile."))
                case Dropped(server, sentence):
                    drop(server, sentence)
                case Answered(server, epoch, group) if server in refused:
                    pool.accept(server)
                    pool.put([group.prompt])
                case Answered(server, epoch, group):
                    patience.answered(server)
                    held.setdefault((server, epoch), HeldGroups()).groups.append(group)
        for (server, epoch), batch in list(held.items()):
            if attestor and not attestor.due(server, epoch, batch):
                continue
            del held[server, epoch]
            why = attestor.refusal_of_batch(server, epoch, batch) if attestor else ""
            if why:
                drop(server, f"{server.url} is refused: {why}")
                pool.put(group.prompt for group in batch.groups)
            for group in batch.groups:
                pool.accept(server)
                if not why and group.prompt.index in missing:
                    del missing[group.prompt.index]
                    yield group
        patience.check(pool.servers, refused)
