"""The calculator's task as a program for `rollout.agent`: it uses OpenAI's client and knows nothing of training."""

from __future__ import annotations

import json
from typing import Any

import openai.resources.chat.completions  # noqa: F401  # or every program would import it at its first request
from openai import OpenAI

from mugrpo_megatron.extras.episodes.calculator import MOST_CALLS, value

TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"terms": {"type": "string"}}}},
}


def program(row: dict[str, Any]) -> None:
    """Ask the model, at most MOST_CALLS times, until an answer calls no tool; the verifier scores the last answer."""
    client, messages = OpenAI(), list[Any](row["messages"])
    for _ in range(MOST_CALLS):
        completion: Any = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            try:
                result = value(json.loads(call.function.arguments)["terms"])
            except (ValueError, TypeError, KeyError):
                result = "no sum"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
