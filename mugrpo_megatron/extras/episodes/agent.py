"""Runs episodes of programs that know only OpenAI's chat API (`rollout.agent`), inside a worker process of episodes.

For each episode the worker's endpoint (`endpoint.py`) has a session, and its launcher (`launcher.py`) starts a process
of the program. The program reads its row as JSON from standard input. Its output may end with a JSON object, which
`_result` reads.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import resource
import signal
import socket
import stat
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
from mugrpo_megatron.extras.episodes.launcher import ERRORS, OUTPUT, ROW, SCRATCH
from mugrpo_megatron.extras.episodes.turns import PROGRAM, EpisodeModel, ProgramFailure
from mugrpo_megatron.files.json_text import as_text, parse_json
from mugrpo_megatron.files.scratch import remove_tree
from mugrpo_megatron.rewards.calls import WorkerProcess, start_guarded
from mugrpo_megatron.samples import Problem

START_S = 600.0
"""Seconds in which the launcher loads the program."""
KEEP_ALIVE_S = 3600
"""Seconds after which an idle connection is closed. Many, because a client that sends at that moment reads an error."""
TAIL_BYTES = 1 << 20
"""Bytes at the end of a program's output that are read."""
ANSWER_BYTES = 4096
"""Most bytes of an answer of the launcher."""
ERROR_CHARS = 200
ENDING_S = 10.0
"""Seconds that a program has to write its result once a limit has ended its session, before it is killed."""
MOST_STARTS = 64
"""Most lines beginning with `{`, from the output's end on, that are tried as the start of a result of several lines."""


class Agent:
    """Runs the programs of one worker."""

    def __init__(self, options: Mapping[str, Any], endpoint: Endpoint | None = None) -> None:
        """Load the program, and open the endpoint's socket. Raises UserError where it cannot be loaded."""
        self._options, self._args = options, options["args"]
        # Each connection takes a descriptor of this process. One program may open OPEN_FILES of them, and those of the
        # other programs must still find room.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with suppress(OSError, ValueError):  # the system may allow less than the hard limit that it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._launcher = self._launched()
        self._replacing = asyncio.Lock()
        self._endpoint = endpoint or Endpoint()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._server: asyncio.Task[None] | None = None
        self._directory = Path(options["directory"])

    async def close(self) -> None:
        """End the launcher, the programs that it has started, and the endpoint.

        A worker of episodes does not call it: the worker's guard kills what the worker has started.
        """
        self._launcher.kill()
        if self._server is not None:
            self._server.cancel()
            await asyncio.wait((self._server,))
        self._socket.close()

    def _launched(self) -> WorkerProcess:
        launcher = start_guarded("mugrpo_megatron.extras.episodes.launcher", self._options, START_S)
        try:
            answer = launcher.receive()
        except (EOFError, OSError):
            answer = {
                "refused": f"rollout.agent {self._options['name']!r} cannot be loaded: its process died, or "
                f"took more than {START_S:g} s; import the module by itself to see why"
            }
        if "refused" in answer:
            launcher.kill()
            raise UserError(answer["refused"])
        return launcher

    async def episode(self, problem: Problem, model: EpisodeModel) -> dict[str, Any]:
        """Run the program on a problem; returns its result. Raises ProgramFailure if the program fails, and TypeError,
        ValueError or OSError if its result cannot be read."""
        if self._server is None:
            plain: dict[str, Any] = {"http": "h11", "ws": "none", "lifespan": "off", "log_config": None}
            config = uvicorn.Config(self._endpoint, access_log=False, timeout_keep_alive=KEEP_ALIVE_S, **plain)
            self._server = asyncio.ensure_future(_Server(config).serve([self._socket]))
        temperatures = tuple(dict.fromkeys((model.sampling["temperature"], self._args["rollout_temperature"])))
        tops = tuple(dict.fromkeys((model.sampling["top_p"], self._args["rollout_top_p"])))
        accepted = {"temperature": temperatures, "top_p": tops}
        accepted |= {"top_k": (model.sampling["top_k"],)} if model.sampling["top_k"] > 0 else {}
        session = Session(partial(model.ask, PROGRAM), accepted)
        directory = Path(tempfile.mkdtemp(dir=self._directory))
        self._endpoint.sessions[session.id] = session
        try:
            row = problem.row or {"id": problem.id, "question": problem.question, "answer": problem.gold}
            try:
                (directory / ROW).write_text(as_text({**row, "messages": model.messages}), encoding="utf-8")
                (directory / SCRATCH).mkdir()
            except OSError as error:
                raise ProgramFailure(f"its row cannot be written to {self._directory} ({error.strerror})") from None
            code = await self._run(directory, session)
            if session.limit is not None:
                return _cut_result(directory / OUTPUT, code)
            if code:
                died = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                said = _tail(directory / ERRORS)[0].rpartition("\n")[2][-ERROR_CHARS:]
                raise ProgramFailure(f"the program {died}" + (f": {said}" if said else ""))
            return _result(directory / OUTPUT)
        finally:
            del self._endpoint.sessions[session.id]
            remove_tree(directory)

    async def _run(self, directory: Path, session: Session) -> int:
        """Run the program and return its exit code. Raises ProgramFailure if it cannot be started.

        The program is killed if this coroutine is cancelled. After a limit has ended the session, the program may run
        for ENDING_S further seconds, or until it has sent MOST_SINCE further requests; then it is killed.
        """
        address = f"http://127.0.0.1:{self._socket.getsockname()[1]}/s/{session.id}/v1"
        environment = {
            "OPENAI_BASE_URL": address,
            "OPENAI_API_BASE": address,  # older versions of OpenAI's client read this name
            "OPENAI_API_KEY": session.key,
            "TMPDIR": str(directory / SCRATCH),
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        message = json.dumps({"directory": str(directory), "environment": environment}).encode()
        # Packets keep two messages apart: the launcher may send why the program did not start, and after that the exit
        # code of the process that should have become it.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                await self._send(message, theirs)
            ours.setblocking(False)
            answered = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(ours, ANSWER_BYTES))
            over, deaf = (asyncio.ensure_future(event.wait()) for event in (session.over, session.deaf))
            try:
                await asyncio.wait((answered, over), return_when=asyncio.FIRST_COMPLETED)
                if not answered.done():
                    await asyncio.wait((answered, deaf), timeout=ENDING_S, return_when=asyncio.FIRST_COMPLETED)
                answer = answered.result().decode() if answered.done() else ""
            finally:
                for task in (answered, over, deaf):
                    task.cancel()
        if answer.lstrip("-").isdecimal() or not answer:
            return int(answer or -signal.SIGKILL)
        raise ProgramFailure(answer)

    async def _send(self, message: bytes, session: socket.socket) -> None:
        """Send the launcher a message and a socket; a launcher that has died is started again."""
        async with self._replacing:
            try:
                self._hand_over(message, session)
            except OSError:
                try:
                    # On a thread, so that requests of other programs are answered meanwhile.
                    self._launcher = await asyncio.to_thread(self._launched)
                    self._hand_over(message, session)
                except (UserError, OSError) as error:
                    raise ProgramFailure(f"the process that starts programs died: {error}") from None

    def _hand_over(self, message: bytes, session: socket.socket) -> None:
        self._launcher.send(message)
        send_handle(self._launcher.connection, session.fileno(), None)  # type: ignore[arg-type]


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield  # without uvicorn's signal handlers: the worker ends this server itself


def _cut_result(output: Path, code: int) -> dict[str, Any]:
    """The result of a program whose session a limit has ended: the one that it has still written, or one without a
    reward if it has failed or written no result that can be read."""
    nothing: dict[str, Any] = {"reward": None, "why": "", "parts": {}, "answer": None}
    try:
        return {**(nothing if code else _result(output)), "cut": True}
    except (OSError, TypeError, ValueError, ArithmeticError):
        return {**nothing, "cut": True}


def _result(output: Path) -> dict[str, Any]:
    """The episode's result, read from the end of its program's output.

    Raises TypeError or ValueError if it is invalid, and OSError if the output is no regular file.

    The reward is `reward`, or `score` if there is no `reward`, or None if there is neither. If both are there, `score`
    is a component. `answer` is what the verifier scores: a text as it is, another value as JSON.
    """
    said = _said(*_tail(output))
    answer, reward, score = (said.pop(name, None) for name in ("answer", "reward", "score"))
    if reward is None:
        reward, score = score, None
    result = result_of({**said, "score": 0.0 if reward is None else reward}, "the program")
    if isinstance(score, int | float) and math.isfinite(score):
        result["parts"]["score"] = float(score)
    result["answer"] = answer if answer is None or isinstance(answer, str) else as_text(answer)
    return result if reward is not None else {**result, "reward": None}


def _said(text: str, is_whole: bool) -> dict[str, Any]:
    """The JSON object that an output ends with, on one line or several; an empty object if there is none.

    Raises ValueError for an end that looks like an object and cannot be read. `is_whole` says whether the text is the
    whole output.
    """
    if not text.endswith("}"):
        return {}
    last, start, refusal = text.rpartition("\n")[2].lstrip(), len(text), ""
    if last.startswith("{"):
        try:
            return dict(parse_json(last))
        except ValueError as error:
            refusal = str(error)
    for _ in range(MOST_STARTS):
        start = text.rfind("\n{", 0, start)
        is_first = start < 0 and is_whole and text.startswith("{")
        if start < 0 and not is_first:
            break
        try:
            # An object inside the outermost one does not parse here: the outermost one's end follows it in the text.
            said = parse_json(text[start + 1 :])
        except ValueError as error:
            refusal = refusal or str(error)
        else:
            return dict(said)
        if is_first:
            break
    if refusal:
        raise ValueError(
            f"the program's output ends with what looks like a JSON object and cannot be read ({refusal}); write the "
            "result as one JSON object in the last line"
        )
    if not is_whole and "\n" not in text:
        raise ValueError(f"the last line of the program's output has more than {TAIL_BYTES:,} bytes; write a short one")
    return {}


def _tail(path: Path) -> tuple[str, bool]:
    """The end of the program's output or errors as text, and whether it is all; OSError if it is no regular file."""
    # The program may have put something else there: O_NOFOLLOW refuses a link, O_NONBLOCK does not wait for a pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(
                f"the program has replaced its file `{path.name}` by something that is no regular file; leave that "
                "file in place"
            )
        content = os.pread(descriptor, TAIL_BYTES, max(0, status.st_size - TAIL_BYTES))
        return content.decode("utf-8", "replace").strip(), status.st_size <= TAIL_BYTES
    finally:
        os.close(descriptor)
