"""Episodes of programs that know OpenAI's chat API alone (`rollout.agent`); runs in a worker of episodes.

Each episode is a session of the worker's endpoint and a process of its launcher. The program reads its row as JSON
from standard input; the last line of its output may be a JSON object with `answer`, which the verifier scores instead
of the model's last turn, and with `reward` and other numbers.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

import uvicorn

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.episodes.conventions import result_of
from mugrpo_megatron.extras.episodes.endpoint import Endpoint, Session
from mugrpo_megatron.extras.episodes.launcher import ERRORS, OUTPUT, ROW, SCRATCH, remove_tree
from mugrpo_megatron.extras.episodes.turns import PROGRAM, EpisodeModel, ProgramFailure
from mugrpo_megatron.files.json_text import as_text, parse_json
from mugrpo_megatron.rewards.calls import start_guarded
from mugrpo_megatron.samples import Problem

START_S = 100.0
"""Seconds in which the launcher loads the program."""
KEEP_ALIVE_S = 3600
"""Seconds after which an idle connection is closed; a client that sends a request meanwhile would read an error."""
TAIL_BYTES = 1 << 20
"""Bytes at the end of a program's output that are read."""
ERROR_CHARS = 200


class Agent:
    """The programs of one worker."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Load the program, and open the endpoint's socket. Raises UserError where it cannot be loaded."""
        self._args = options["args"]
        launcher = "mugrpo_megatron.extras.episodes.launcher"
        self._launcher = start_guarded(launcher, options, START_S)
        try:
            answer = self._launcher.receive()
        except (EOFError, OSError):
            answer = {"refused": f"rollout.agent {options['name']!r} cannot be loaded: its process died"}
        if "refused" in answer:
            raise UserError(answer["refused"])
        self._endpoint = Endpoint()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._server: asyncio.Task[None] | None = None
        self._directory = Path(options["directory"])

    async def episode(self, problem: Problem, model: EpisodeModel) -> dict[str, Any]:
        """Run the program on a problem; returns its result. Raises ProgramFailure if it fails."""
        if self._server is None:
            plain: dict[str, Any] = {"http": "h11", "ws": "none", "lifespan": "off", "log_config": None}
            config = uvicorn.Config(self._endpoint, access_log=False, timeout_keep_alive=KEEP_ALIVE_S, **plain)
            self._server = asyncio.ensure_future(_Server(config).serve([self._socket]))
        temperatures = tuple(dict.fromkeys((model.sampling["temperature"], self._args["rollout_temperature"])))
        tops = tuple(dict.fromkeys((model.sampling["top_p"], self._args["rollout_top_p"])))
        session = Session(partial(model.ask, PROGRAM), {"temperature": temperatures, "top_p": tops})
        directory = Path(tempfile.mkdtemp(dir=self._directory))
        self._endpoint.sessions[session.id] = session
        try:
            row = problem.row or {"id": problem.id, "question": problem.question, "answer": problem.gold}
            (directory / ROW).write_text(as_text({**row, "messages": model.messages}), encoding="utf-8")
            (directory / SCRATCH).mkdir()
            code = await self._run(directory, session)
            if code:
                died = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                error = _tail(directory / ERRORS).rpartition("\n")[2][-ERROR_CHARS:]
                raise ProgramFailure(f"the program {died}" + (f": {error}" if error else ""))
            return _result(directory / OUTPUT)
        finally:
            del self._endpoint.sessions[session.id]
            remove_tree(directory)

    async def _run(self, directory: Path, session: Session) -> int:
        """Run the program; returns its exit code. Kills it if this coroutine is cancelled."""
        address = f"http://127.0.0.1:{self._socket.getsockname()[1]}/s/{session.id}/v1"
        environment = {
            "OPENAI_BASE_URL": address,
            "OPENAI_API_BASE": address,  # the name of older clients
            "OPENAI_API_KEY": session.key,
            "TMPDIR": str(directory / SCRATCH),
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._launcher.send(json.dumps({"directory": str(directory), "environment": environment}).encode())
                send_handle(self._launcher.connection, theirs.fileno(), None)  # type: ignore[arg-type]
            ours.setblocking(False)
            answer = await asyncio.get_running_loop().sock_recv(ours, 16)
        return int(answer or -signal.SIGKILL)


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield  # the worker's guard decides when it ends


def _result(output: Path) -> dict[str, Any]:
    """The episode's result from its program's last line. Raises TypeError or ValueError unless a reward is finite."""
    said: Any = None
    lines = _tail(output).splitlines()
    with suppress(ValueError, IndexError):
        said = parse_json(lines[-1])
    said = said if isinstance(said, dict) else {}
    answer, reward = said.pop("answer", None), said.pop("reward", None)
    result = result_of({"score": 0.0 if reward is None else reward, **said}, "the program")
    result["answer"] = answer if isinstance(answer, str) else None
    return result if reward is not None else {**result, "reward": None}


def _tail(path: Path) -> str:
    # The program may have put a pipe or a link there.
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        return file.read().decode("utf-8", "replace").strip()
