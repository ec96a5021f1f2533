"""Runs in the program's jail: executes the program as a module, then answers requests about its functions and values.

Requests and answers are lines of JSON on two descriptors. The program may write there too. It gains nothing by that,
since it chooses what its functions return anyway.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from mugrpo_megatron.extras.sandbox.value_codec import MOST, pack, unpack

PROGRAM = "program.py"
_ABOUT: dict[str, Callable[[Any], Any]] = {"len": len, "str": str, "repr": repr, "bool": bool}


def main(root: str, requested: str, answered: str) -> None:
    """Execute the program in directory `root`, then serve until the requests end.

    `requested` and `answered` are the descriptors of requests and answers.
    """
    with open(f"{root}/{PROGRAM}", encoding="utf-8", errors="surrogatepass") as file:
        text = file.read()
    requests = os.fdopen(int(requested), encoding="utf-8")
    answers = os.fdopen(int(answered), "w", encoding="utf-8")
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    exec(compile(text, PROGRAM, "exec"), module.__dict__)
    values: list[Any] = []

    def keep(value: Any) -> Any:
        values.append(value)
        return {"handle": len(values) - 1}

    def take(packed: dict[str, Any]) -> Any:
        return values[packed["handle"]]

    def do(request: dict[str, Any]) -> Any:
        what = request["do"]
        if what == "names":
            return {name: value for name, value in vars(module).items() if not name.startswith("__")}
        if what == "entry":
            return _entry(module, request["name"])
        on = values[request["on"]]
        arguments = unpack(request.get("arguments", []), take)
        if what == "call":
            options = {name: unpack(value, take) for name, value in request.get("options", {}).items()}
            result = on(*arguments, **options)
            return {"result": result, "arguments": arguments}
        if what == "attribute":
            return getattr(on, request["name"])
        if what == "item":
            return on[arguments[0]]
        if what == "list":
            return [item for item, _ in zip(on, range(MOST), strict=False)]
        return _ABOUT[what](on)

    for line in requests:
        try:
            answer = json.dumps({"value": pack(do(json.loads(line)), keep)})
        except Exception as error:
            known = [kind.__name__ for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind]
            answer = json.dumps({"error": known[0], "text": str(error)[:500]})
        answers.write(answer + "\n")
        answers.flush()


def _entry(module: types.ModuleType, name: str) -> Any:
    """The program's function of that name, or else the method of its class `Solution`, as LeetCode has it."""
    if hasattr(module, name):
        return getattr(module, name)
    return getattr(module.Solution(), name)
