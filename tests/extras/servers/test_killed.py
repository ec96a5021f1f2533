"""Server, generator or both killed at ten moments of a stage: it ends as the stage of a run that was not killed."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import pytest
import torch

from mugrpo_megatron.recipe import load_recipe
from mugrpo_megatron.run.initial_model import weights_fingerprint
from mugrpo_megatron.run.record import claim
from mugrpo_megatron.stages.schema import SHARD_RESPONSES
from tests.extras.servers.fake import Answer, Fake, Handler, Policy, serving
from tests.forked import fork, started
from tests.patience import PATIENCE_S
from tests.test_killed_anywhere import contents
from tests.tiny import COIN, mugrpo, write_recipe

pytestmark = [pytest.mark.process, pytest.mark.night]

UPDATES, PROMPTS, RESPONSES = 80, 8, 64
"""More groups than all servers answer before the last kill. A shard is full, and written, after 64 groups."""
assert SHARD_RESPONSES == 64 * RESPONSES
ROLLOUT = {
    "prompts_per_update": PROMPTS,
    "responses_per_prompt": RESPONSES,
    "max_response_tokens": 8,
    "temperature": 0.8,
}
FEW = {"max_running_requests": RESPONSES}
"""Two prompts at a time, so that ten servers do not fill the stage."""
Victim = Literal["server", "generator"]


class Moment(NamedTuple):
    """When a server ends processes."""

    answer: int
    """At this answer of the server, or the first later one at which there is a new file of groups."""
    late: bool
    """Whether there has to be a new file of groups."""
    part: Literal["before", "half", "after"]
    """Before anything of the answer is sent, after half of its body, after all of it."""
    victims: tuple[Victim, ...]


LAST = Moment(0, False, "before", ())
"""Never: the server lives until it is ended from outside."""


def moments(victims: tuple[Victim, ...]) -> list[Moment]:
    """Ten kills, the first and the sixth late in a server's life; drawn, and the same in every run."""
    draw = random.Random("-".join(victims))
    parts: list[Any] = ["before", "half", "after"]
    return [Moment(draw.randint(1, 8), number % 5 == 0, draw.choice(parts), victims) for number in range(10)]


def files(run: Path) -> list[str]:
    """The files of groups that the generator's manifest names."""
    manifest = run / "stages" / "00000" / "manifest-0001.json"
    if not manifest.exists():
        return []
    return [shard["file"] for shard in json.loads(manifest.read_text(encoding="utf-8"))["stage"]["shards"]]


@dataclass
class Known:
    """Responses that depend on the prompt alone, so that a prompt that is asked for twice gets the same ones again."""

    policy: Policy
    answers: dict[tuple[int, ...], list[Answer]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, prompt: list[int], settings: dict[str, Any]) -> list[Answer]:
        with self.lock:
            if tuple(prompt) not in self.answers:
                self.answers[tuple(prompt)] = self.drawn(prompt, settings)
            return self.answers[tuple(prompt)]

    @torch.no_grad()
    def drawn(self, prompt: list[int], settings: dict[str, Any]) -> list[Answer]:
        """Samples all responses at a time."""
        seed = int.from_bytes(sha256(repr(prompt).encode()).digest()[:8], "big") >> 1
        generator = torch.Generator().manual_seed(seed)
        ids, values = torch.tensor([prompt] * settings["n"]), []
        for _ in range(settings["max_tokens"]):
            logprobs = (self.policy.model(ids).logits[:, -1].float() / settings["temperature"]).log_softmax(-1)
            tokens = torch.multinomial(logprobs.exp(), 1, generator=generator)
            values.append(logprobs.gather(1, tokens))
            ids = torch.cat([ids, tokens], 1)
        rows = zip(ids[:, len(prompt) :].tolist(), torch.cat(values, 1).tolist(), strict=True)
        return [self.cut(*row) for row in rows]

    def cut(self, ids: list[int], logprobs: list[float]) -> Answer:
        if self.policy.ends not in ids:
            return ids, logprobs, "length"
        length = ids.index(int(self.policy.ends)) + 1
        return ids[:length], logprobs[:length], "stop"


def serve_until(moment: Moment, answers: Path, name: str, port: int, generator: Path, run: Path) -> None:
    """A server's process. `answers` has what it answers, `generator` the generator's process id."""
    known = pickle.loads(answers.read_bytes())
    lock, answered, before = threading.Lock(), 0, files(run)

    def end() -> None:
        if "generator" in moment.victims:
            os.kill(int(generator.read_text()), signal.SIGKILL)
        if "server" in moment.victims:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(handler: Handler, content: bytes) -> None:
        nonlocal answered
        with lock:
            answered += handler.command == "POST"
            due = 0 < moment.answer <= answered and (not moment.late or files(run) != before)
            if handler.command != "POST" or not due:
                handler.wfile.write(content)
                return
            sent = {"before": 0, "half": len(content) // 2, "after": len(content)}[moment.part]
            handler.wfile.write(content[:sent])
            handler.wfile.flush()
            end()
            threading.Event().wait()  # nobody is answered any more

    with serving(Fake("vllm", lambda prompt, settings: known[tuple(prompt)], name=name, write=write), port):
        signal.pause()


def new_run(folder: Path, model: Path) -> tuple[Path, Path, str]:
    """Recipe and directory of a run that has begun, and the name of its weights."""
    run = folder / "run"
    shape: dict[str, dict[str, Any]] = {"schedule": {"stages": 1, "updates_per_stage": UPDATES}, "rollout": ROLLOUT}
    recipe = write_recipe(folder / "recipe.toml", model, run, **shape, engine=FEW, reward=COIN)
    run.mkdir()
    return recipe, run, claim(run, weights=weights_fingerprint(load_recipe(recipe).model)).id + "-0"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[dict[tuple[str, int], str], Path]:
    """The groups of a run that is not killed, and a file with the answers of its server."""
    folder = tmp_path_factory.mktemp("unbroken")
    recipe, run, name = new_run(folder, model)
    known = Known(Policy(model))
    with serving(Fake("vllm", known, name=name)) as fake:
        mugrpo("generate", recipe, "--server", fake.url)
        assert len(fake.prompts) == UPDATES * PROMPTS, "each prompt is asked for once"
    (folder / "answers").write_bytes(pickle.dumps(known.answers))
    return contents(run), folder / "answers"


@pytest.mark.parametrize("victims", [("server",), ("generator",), ("server", "generator")], ids="+".join)
def test_ten_kills_leave_the_unbroken_runs_stage(
    tmp_path: Path,
    model: Path,
    unbroken: tuple[dict[tuple[str, int], str], Path],
    victims: tuple[Victim, ...],
) -> None:
    expected, answers = unbroken
    recipe, run, name = new_run(tmp_path, model)
    with serving(Fake()) as nobody:
        port = urlsplit(nobody.url).port or 0
    pid, on_disk, grown = tmp_path / "generator", contents(run), 0
    with ExitStack() as commands:
        command = None
        for moment in [*moments(victims), LAST]:
            if command is None:
                command = commands.enter_context(started("generate", recipe, "--server", f"http://127.0.0.1:{port}"))
                pid.write_text(str(command.pid))
            server = fork(serve_until, moment, answers, name, port, pid, run)
            if "generator" in moment.victims or moment is LAST:
                assert command.wait() == (-signal.SIGKILL if moment.victims else 0), command.said
                command = None
            if "server" not in moment.victims:
                server.kill()
            server.join(PATIENCE_S)
            assert server.exitcode == -signal.SIGKILL
            now = contents(run)
            assert on_disk.items() <= now.items(), "what was on disk is there, and is the same"
            grown += len(now) > len(on_disk)
            on_disk = now
    assert {group for _, group in on_disk} == set(range(UPDATES * PROMPTS))
    assert grown >= 3, "there were groups on disk to lose"
    assert on_disk == expected, "every row has the bytes of the run that was not killed"
