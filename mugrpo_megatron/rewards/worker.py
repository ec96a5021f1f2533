"""A worker process of the verifier: reads batches of calls from a socket, confirms a batch, and replies to each call.

It limits its address space, gives up a call that has used up its processor time, and ends (retires) when it uses too
much memory. It may be killed at any time.
"""

from __future__ import annotations

import json
import resource
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from mugrpo_megatron.call_guard import address_space, refuse_exits
from mugrpo_megatron.rewards.items import Needs, ScoringInput, Verdict

ALARM_AGAIN_S = 0.25
"""CPU seconds between rings of the alarm. It is repeated, because the first may ring where an exception is swallowed,
as in a finalizer."""
RETIREMENT_SHARE = 0.75
"""Fraction of its memory limit at which a worker retires, so that memory which earlier calls took does not fail a later
one."""
ASYNC_SHARE = 0.875
"""Fraction of the limit by the clock after which an `async` function is cancelled for a response."""

RewardFunction = Callable[[Sequence[ScoringInput]], Sequence[Verdict | BaseException]]


class AlarmRang(BaseException):
    """Raised when a call has used up its CPU time.

    It is not an Exception, so that no `except Exception` in a library swallows it.
    """


def load(options: dict[str, Any]) -> tuple[RewardFunction, Needs, str]:
    """Load the function that the options name. Returns the function, the data that it needs, and a note for the user on
    the sandbox of `code` ("" for other functions, and if there is nothing to note).

    Raises UserError for a function that cannot be loaded.
    """
    if options["function"] == "math":
        from mugrpo_megatron.rewards.math.compare import compare_answer

        def math(items: Sequence[ScoringInput]) -> list[Verdict]:
            results = [compare_answer(item.response, item.gold, options["policy"]) for item in items]
            return [Verdict(reward, "", why) for reward, why in results]

        return math, Needs(), ""
    from mugrpo_megatron.errors import UserError
    from mugrpo_megatron.recipe.functions import load_function
    from mugrpo_megatron.recipe.scoring import CODE, GYM_REWARD, HAS_TESTS
    from mugrpo_megatron.rewards.callers import Caller, Unsupported

    name = options["function"]
    function: Callable[..., Any]
    if name == CODE:
        from mugrpo_megatron.extras.sandbox.code import grader

        function = grader({"timeout_s": options["timeout_s"], **options[name]})
    elif name == HAS_TESTS:
        from mugrpo_megatron.extras.sandbox.row_tests import has_tests as function
    elif name == GYM_REWARD:
        from mugrpo_megatron.extras.reasoning_gym.task_reward import task_reward as function
    else:
        function = load_function(options["key"], name)
    if options["of_judge"]:
        from mugrpo_megatron.extras.auxiliary.parse import parser_of

        return parser_of(options["key"], name, function), Needs(), ""
    try:
        caller = Caller(function, name, options["timeout_s"] * ASYNC_SHARE)
    except Unsupported as error:
        raise UserError(f"{options['key']} {name!r} {error}") from None
    return caller, caller.needs, getattr(function, "note", "") if name == CODE else ""


def call(function: RewardFunction, items: Sequence[ScoringInput], alarm_s: float) -> tuple[list[Verdict], bool]:
    """Call a function; returns a verdict on each item, and whether the alarm interrupted the call.

    The alarm rings after `alarm_s` seconds of processor time for each item. An item without a verdict, because the
    alarm rang or the function failed, scores 0; a MemoryError ends the process.
    """
    start = time.perf_counter()
    results: Sequence[Verdict | BaseException]
    try:
        signal.setitimer(signal.ITIMER_PROF, alarm_s * len(items), ALARM_AGAIN_S)
        results = function(items)
        signal.setitimer(signal.ITIMER_PROF, 0)
    except AlarmRang as error:
        signal.setitimer(signal.ITIMER_PROF, 0)
        results = [error] * len(items)
    except MemoryError:
        raise
    except BaseException as error:
        # An answer may break a function in any way; it scores 0 and the run goes on. Even a KeyboardInterrupt comes
        # from the function: the guard ignores Ctrl-C, and the worker inherits that.
        signal.setitimer(signal.ITIMER_PROF, 0)
        results = [error] * len(items)
    if any(isinstance(result, MemoryError) for result in results):
        raise MemoryError
    seconds = (time.perf_counter() - start) / len(items)
    late = f"gave up after {alarm_s * len(items):g} s of CPU time"
    verdicts = [
        result._replace(seconds=seconds)
        if isinstance(result, Verdict)
        else Verdict(0.0, "", late if isinstance(result, AlarmRang) else _failure(result), seconds, True)
        for result in results
    ]
    return verdicts, any(isinstance(result, AlarmRang) for result in results)


def serve(socket: int, text: str) -> None:
    """Limit this process, load the function and serve calls until the parent is gone. `text` is the options as JSON."""
    from mugrpo_megatron.errors import UserError

    options = json.loads(text)
    memory = options["memory_mb"] << 20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, _on_alarm)
    connection = Connection(socket)
    try:
        function, needs, note = load(options)
    except UserError as error:
        connection.send_bytes(json.dumps({"failed": str(error)}).encode())
        return
    # Each of these errors may mean that memory is too small; errors of a user's module were turned into UserError.
    except (MemoryError, ImportError, OSError, SystemError) as error:
        why = f"{error!r} in {options['memory_mb']} MiB of address space; raise reward.worker_memory_mb"
        connection.send_bytes(json.dumps({"failed": f"a verifier process could not start: {why}"}).encode())
        return
    connection.send_bytes(json.dumps({"needs": needs, "note": note}).encode())
    leave = refuse_exits()["_exit"]
    try:
        _serve(connection, function, options["alarm_s"], RETIREMENT_SHARE * memory)
    except (MemoryError, AlarmRang, OSError):  # needs no message: the parent sees the death, or is gone itself
        leave(1)


def _serve(connection: Connection, function: RewardFunction, alarm_s: float, max_bytes: float) -> None:
    """Serve one batch after another, until the parent is gone or this worker retires, for instance with more than
    `max_bytes` in use."""
    while True:
        try:
            batch = json.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(b'{"read": true}')  # tells the parent that a later crash is not due to the batch's size
        for rows in batch["calls"]:
            items = [_item(response, batch["subjects"][subject], ids) for response, subject, ids in rows]
            verdicts, alarm_rang = call(function, items, alarm_s)
            # A worker also retires if an alarm interrupted its event loop, since tasks of the loop may still run.
            retires = address_space() > max_bytes or (alarm_rang and getattr(function, "is_async", False))
            connection.send_bytes(json.dumps({"verdicts": verdicts, "retires": retires}).encode())
            if retires:
                return


def _item(response: str, subject: Sequence[Any], ids: Sequence[int]) -> ScoringInput:
    gold, row, prompt, source = subject
    return ScoringInput(response, gold, "", row, prompt, source, ids)


def _failure(error: BaseException) -> str:
    from mugrpo_megatron.recipe.functions import describe_exception
    from mugrpo_megatron.rewards import callers

    if isinstance(error, callers.GaveUp):
        return str(error)
    return f"failed: {describe_exception(error, __file__, callers.__file__)}"


def _on_alarm(_number: int, _frame: Any) -> None:
    raise AlarmRang
