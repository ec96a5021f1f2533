"""The bundled task of episodes: the sums of the data set `chain`, and a calculator that the model may call.

    python -m mugrpo_megatron.extras.episodes.calculator ROWS.jsonl [TEMPLATE.jinja]

writes rows for `mugrpo sft`. Most of them give the right answer at once, which a small model cannot learn to compute.
The others write the sum, a question mark, and the calculator's answer. Reinforcement learning then has to find out that
calls are rewarded. If TEMPLATE.jinja is given, a chat template is written to it, and the rows are chats that call a
tool, as the program in `calculator_client.py` does.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mugrpo_megatron.data.arithmetic import problems
from mugrpo_megatron.extras.episodes.turns import EpisodeModel
from mugrpo_megatron.files.durable import check_output, write_text
from mugrpo_megatron.samples import Problem

CALL = "?"
"""The text that ends a turn which asks the calculator."""
MOST_CALLS = 4
ROWS = 6000
CALLING = 0.2
"""Share of the rows in which the calculator is called."""
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}{% for c in m['tool_calls'] or [] %}<tool_call>
{"name": "{{ c['function']['name'] }}", "arguments": {{ c['function']['arguments'] | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SUM = re.compile(r"\d{1,9}(?:\+\d{1,9})*")


async def episode(problem: Problem, model: EpisodeModel) -> None:
    """Let the model take turns, at most MOST_CALLS, until one does not end with a call; the verifier scores the last
    turn."""
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
    """The value of a sum, as text. Raises ValueError for any other expression."""
    if not SUM.fullmatch(expression):
        raise ValueError("no sum")
    return str(sum(map(int, expression.split("+"))))


def demonstrations(count: int = ROWS) -> list[dict[str, str]]:
    """Rows with a prompt and a response; in every fifth row the response calls the calculator."""
    every = round(1 / CALLING)
    rows = []
    for index, problem in enumerate(problems(1, "train", count, "chain")):
        answer = f"\\boxed{{{problem.answer}}}"
        call = f"{problem.question.rstrip('=')}{CALL} {problem.answer} "
        rows.append({"prompt": problem.question, "response": answer if index % every else call + answer})
    return rows


def chats(count: int = ROWS) -> Iterator[dict[str, Any]]:
    """Yield rows with a chat and its answer. Every fifth answer calls the calculator, and a further row continues that
    chat with the result."""
    for row in demonstrations(count):
        question = {"role": "user", "content": row["prompt"]}
        said, called, rest = row["response"].partition(CALL)
        if not called:
            yield {"prompt": [question], "response": said}
            continue
        call = f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': {'terms': said}})}\n</tool_call>"
        result, boxed = rest.split()
        answered = [{"role": "assistant", "content": call}, {"role": "tool", "content": result}]
        yield {"prompt": [question], "response": call}
        yield {"prompt": [question, *answered], "response": boxed}


def main() -> None:
    paths = [Path(argument) for argument in sys.argv[1:3]]
    rows = demonstrations() if len(paths) == 1 else chats()
    for path, text in zip(paths, ("".join(json.dumps(row) + "\n" for row in rows), TEMPLATE), strict=False):
        check_output(path, str(path), remedy="remove it, or name another file")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)


if __name__ == "__main__":
    main()
