"""In a jail of its own: executes a row's test code. The program's names are stand-ins that ask the other jail.

So the program never sees the tests, and nothing that it replaces (`print`, `abs`, `__eq__`) has a part in judging.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import sys
import types
from collections.abc import Iterator
from typing import Any, TextIO

from mugrpo_megatron.extras.sandbox.packed import pack, unpack

TESTS = "tests.py"
MODULES = ("solution", "main")
"""What test code may import the program's names from."""
MODULE = object()
"""A module that the program has imported: the tests get their own of that name."""


class ProgramError(Exception):
    """The program raised an exception of its own."""


class Program:
    """The program in the other jail."""

    def __init__(self, answers: TextIO, requests: TextIO) -> None:
        self._answers, self._requests = answers, requests

    def ask(self, what: str, **details: Any) -> Any:
        """Send a request and return its answer; raises what the program raised, if it is a builtin exception."""
        self._requests.write(json.dumps({"do": what, **details}) + "\n")
        self._requests.flush()
        line = self._answers.readline()
        if not line:
            raise SystemExit("the program ended")
        answer = json.loads(line)
        if "error" in answer:
            kind: Any = getattr(builtins, str(answer["error"]), None)
            known = isinstance(kind, type) and issubclass(kind, Exception)
            raise (kind if known else ProgramError)(answer["text"])
        return unpack(answer["value"], self._stand_in)

    def _stand_in(self, packed: dict[str, Any]) -> Any:
        return MODULE if "module" in packed else StandIn(self, packed["handle"])


class StandIn:
    """A value that stays with the program. It equals only itself, whatever the program's own `__eq__` says."""

    def __init__(self, program: Program, number: int) -> None:
        self.__program, self.__number = program, number

    def __ask(self, what: str, **details: Any) -> Any:
        return self.__program.ask(what, on=self.__number, **details)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        packed = {name: pack(value, _handle) for name, value in options.items()}
        answer = self.__ask("call", arguments=pack(list(arguments), _handle), options=packed)
        for ours, theirs in zip(arguments, answer["arguments"], strict=True):
            _follow(ours, theirs)
        return answer["result"]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__ask("attribute", name=name)

    def __getitem__(self, key: Any) -> Any:
        return self.__ask("item", arguments=[pack(key, _handle)])

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__ask("list"))

    def __len__(self) -> int:
        return int(self.__ask("len"))

    def __bool__(self) -> bool:
        return bool(self.__ask("bool"))

    def __str__(self) -> str:
        return str(self.__ask("str"))

    def __repr__(self) -> str:
        return str(self.__ask("repr"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StandIn) and self.__number == other.__number

    def __hash__(self) -> int:
        return self.__number

    def handle(self) -> dict[str, int]:
        """What it is called in a request."""
        return {"handle": self.__number}


def _handle(value: Any) -> Any:
    """The other direction: only stand-ins are known there."""
    if isinstance(value, StandIn):
        return StandIn.handle(value)
    raise TypeError(f"a {type(value).__name__} cannot be handed to the program")


def _follow(ours: object, theirs: object) -> None:
    """What the program changed in an argument is changed here: tests look at lists that were sorted in place."""
    if isinstance(ours, list) and isinstance(theirs, list):
        ours[:] = theirs
    elif isinstance(ours, dict | set) and type(ours) is type(theirs):
        ours.clear()
        ours.update(theirs)


def main(root: str, answered: str, requested: str, verdict: str, entry: str) -> None:
    """Execute the tests; only their end without an exception is a pass.

    answered, requested: descriptors of the pipes to the program's jail. verdict: the one that gets "passed".
    """
    with open(f"{root}/{TESTS}", encoding="utf-8", errors="surrogatepass") as file:
        text = file.read()
    answers = os.fdopen(int(answered), encoding="utf-8")
    program = Program(answers, os.fdopen(int(requested), "w", encoding="utf-8"))
    own: dict[str, Any] = {}
    for name, value in program.ask("names").items():
        if name.startswith("__") or (hasattr(builtins, name) and name != entry):
            continue  # whatever the program calls `abs`, the tests have the real one
        if value is not MODULE:
            own[name] = value
        elif name in sys.stdlib_module_names:
            own[name] = importlib.import_module(name)
    space = {"__name__": "tests", **own}
    for name in MODULES:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(own)
    exec(compile(text, TESTS, "exec"), space)
    for name, value in list(space.items()):
        if name.startswith("test_") and isinstance(value, types.FunctionType):
            value()
    if entry and isinstance(space.get("check"), types.FunctionType):
        space["check"](program.ask("entry", name=entry))
    os.write(int(verdict), b"passed")
