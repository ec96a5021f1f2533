"""The bundled task of episodes: sums of `chain`, too long for a small model's head, and a calculator for them.

    python -m mugrpo_megatron.extras.episodes.calculator ROWS.jsonl

writes the rows that a model is warm-started on: most answer at once and are right (which it cannot learn), some write
the sum, a question mark, and the answer that the calculator gave. Training then finds out which of the two is worth it.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from mugrpo_megatron.data.arithmetic import problems
from mugrpo_megatron.extras.episodes.turns import EpisodeModel
from mugrpo_megatron.files.durable import write_text
from mugrpo_megatron.files.outputs import check_output
from mugrpo_megatron.samples import Problem

CALL = "?"
"""Ends a turn that asks the calculator."""
MOST_CALLS = 4
ROWS = 6000
CALLING = 0.2
"""Share of the rows that call."""
SUM = re.compile(r"\d{1,9}(?:\+\d{1,9})*")


async def episode(problem: Problem, model: EpisodeModel) -> None:
    """Turns until one does not end with a call; the verifier scores the last."""
    ids = model.prompt_ids
    for _ in range(MOST_CALLS):
        turn = await model.generate(ids, stop=[CALL])
        if not turn.text.endswith(CALL):
            return
        try:
            result = await model.call(value, expression=turn.text.removesuffix(CALL).split(" ")[-1])
        except ValueError as error:
            result = str(error)
        ids = [*model.ids, *await model.encode(f" {result} ")]


def value(expression: str) -> str:
    """A sum's value. Raises ValueError for anything else."""
    if not SUM.fullmatch(expression):
        raise ValueError("no sum")
    return str(sum(map(int, expression.split("+"))))


def demonstrations(count: int = ROWS) -> list[dict[str, str]]:
    """Rows of a prompt and a response; every fifth calls."""
    every = round(1 / CALLING)
    rows = []
    for index, problem in enumerate(problems(1, "train", count, "chain")):
        answer = f"\\boxed{{{problem.answer}}}"
        call = f"{problem.question.rstrip('=')}{CALL} {problem.answer} "
        rows.append({"prompt": problem.question, "response": answer if index % every else call + answer})
    return rows


def main() -> None:
    path = Path(sys.argv[1])
    check_output(path, str(path), remedy="remove it, or name another file")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(json.dumps(row) + "\n" for row in demonstrations()))


if __name__ == "__main__":
    main()
