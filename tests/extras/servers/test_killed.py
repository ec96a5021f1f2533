"""A server killed at ten moments of a stage: no group is lost, none is there twice."""

from __future__ import annotations

import os
import random
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import pytest

from mugrpo_megatron.recipe import load_recipe
from mugrpo_megatron.run.initial_model import weights_fingerprint
from mugrpo_megatron.run.record import claim
from tests.extras.servers.fake import Fake, Handler, Policy, serving
from tests.forked import fork, started
from tests.patience import PATIENCE_S
from tests.test_killed_anywhere import contents
from tests.tiny import write_recipe

pytestmark = [pytest.mark.process, pytest.mark.night]

UPDATES, PROMPTS = 17, 8
"""More groups than all servers answer before the last kill."""
ROLLOUT = {"prompts_per_update": PROMPTS, "responses_per_prompt": 4, "max_response_tokens": 12, "temperature": 0.8}
FEW = {"max_running_requests": 4}
"""Two prompts at a time, so that ten servers do not fill the stage."""
Victim = Literal["server", "generator"]


class Moment(NamedTuple):
    """When a server ends processes: at an answer, by its number in the server's life."""

    answer: int
    part: Literal["before", "half", "after"]
    """Before anything of the answer is sent, after half of its body, after all of it."""
    victims: tuple[Victim, ...]
    sign: signal.Signals = signal.SIGKILL


# A request to stop writes what was taken so far: without one, no kill in the first ten seconds would find a file.
STOP = Moment(1, "after", ("generator",), signal.SIGTERM)
"""Once the learner has looked at the server's first answers, so that there is something to write."""
LAST = Moment(0, "before", ())
"""Never: the server lives until it is ended from outside."""


def moments(victims: tuple[Victim, ...]) -> list[Moment]:
    """Ten kills in two halves, a stop before each; drawn, and the same in every run."""
    draw = random.Random("-".join(victims))
    parts: list[Any] = ["before", "half", "after"]
    kills = [Moment(draw.randint(1, 8), draw.choice(parts), victims) for _ in range(10)]
    return [STOP, *kills[:5], STOP, *kills[5:]]


def serve_until(moment: Moment, model: Path, name: str, port: int, generator: Path, evidence: Path) -> None:
    """A server's process. `generator` has the generator's process id, `evidence` what that knows of servers."""
    lock, answers = threading.Lock(), 0

    def end() -> None:
        if "generator" in moment.victims:
            os.kill(int(generator.read_text()), moment.sign)
        if "server" in moment.victims:
            os.kill(os.getpid(), moment.sign)

    def write(handler: Handler, content: bytes) -> None:
        nonlocal answers
        with lock:
            answers += handler.command == "POST"
            looked_at = moment.sign == signal.SIGKILL or evidence.exists()
            if handler.command != "POST" or not 0 < moment.answer <= answers or not looked_at:
                handler.wfile.write(content)
                return
            sent = {"before": 0, "half": len(content) // 2, "after": len(content)}[moment.part]
            handler.wfile.write(content[:sent])
            handler.wfile.flush()
            end()
            threading.Event().wait()  # nobody is answered any more

    with serving(Fake("vllm", Policy(model), name=name, write=write), port):
        signal.pause()


@pytest.mark.parametrize("victims", [("server",)], ids="+".join)
def test_ten_kills_lose_and_double_no_group(tmp_path: Path, model: Path, victims: tuple[Victim, ...]) -> None:
    run = tmp_path / "run"
    schedule = {"stages": 1, "updates_per_stage": UPDATES}
    recipe = write_recipe(tmp_path / "recipe.toml", model, run, schedule=schedule, rollout=ROLLOUT, engine=FEW)
    run.mkdir()
    name = claim(run, weights=weights_fingerprint(load_recipe(recipe).model)).id + "-0"
    with serving(Fake()) as nobody:
        port = urlsplit(nobody.url).port or 0
    pid, on_disk, grown = tmp_path / "generator", contents(run), 0
    with ExitStack() as commands:
        command = None
        for moment in [*moments(victims), LAST]:
            if command is None:
                command = commands.enter_context(started("generate", recipe, "--server", f"http://127.0.0.1:{port}"))
                pid.write_text(str(command.pid))
            evidence = run / "stages" / "00000" / "servers-0001.json"
            if moment is STOP:
                evidence.unlink(missing_ok=True)
            server = fork(serve_until, moment, model, name, port, pid, evidence)
            if "generator" in moment.victims or moment is LAST:
                killed = moment.victims and moment.sign == signal.SIGKILL
                assert command.wait() == (-signal.SIGKILL if killed else 0), command.said
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
    assert grown >= 3, "both stops and the end have written groups"
