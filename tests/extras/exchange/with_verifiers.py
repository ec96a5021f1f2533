"""Runs in an environment that has verifiers: writes traces by its functions, and reads ours. `with_verifiers.py DIR`.

DIR/ours.json is a trace of ours; into DIR go `theirs.jsonl` (episodes as an evaluation saves them), `records.jsonl`
(bare traces), and `views.json`: what the library makes of each of them, and of ours.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import verifiers
from verifiers.v1.configs.agent import WireAgentConfig
from verifiers.v1.episode import EnvInfo, GroupInfo, WireEpisode
from verifiers.v1.graph import prepare_turn
from verifiers.v1.task import WireTaskData
from verifiers.v1.trace import AgentInfo, ModelCall, Reward, TraceTask, WireTrace
from verifiers.v1.types import AssistantMessage, Response, ToolMessage, TurnTokens, UserMessage
from verifiers.v1.utils.trace_store import TRACES_FILE, write_episode

GROUPS, EACH = 4, 2
OPEN = 96
"""A token that opens the assistant's turn: the template's, not the model's."""


def trace_of(group: int, draw: random.Random) -> WireTrace:
    """A question, and up to three turns with a tool's message between them."""
    task = TraceTask(type="Sums", data=WireTaskData(idx=group))
    trace = WireTrace(task=task, agent=AgentInfo(config=WireAgentConfig()))
    messages: list[Any] = [UserMessage(content=f"question {group}")]
    ids = [1, 2 + group]
    spans: list[tuple[int, int] | None] = [(0, 2)]
    turns = draw.randint(1, 3)
    for turn in range(turns):
        completion = [draw.randint(3, 95) for _ in range(draw.randint(1, 5))]
        logprobs = [-3 * draw.random() for _ in completion]
        finish = "tool_calls" if turn < turns - 1 else draw.choice(["stop", "length"])
        message = AssistantMessage(content=f"{turn}: {completion}")
        tokens = TurnTokens(
            prompt_ids=[*ids, OPEN], completion_ids=completion, completion_logprobs=logprobs, message_spans=spans
        )
        response = Response(
            id=str(turn), created=0, model="model", message=message, finish_reason=finish, tokens=tokens
        )
        node = prepare_turn(trace, messages).commit(response)
        trace.calls.append(ModelCall(node=node, finish_reason=finish))
        said = [draw.randint(3, 95) for _ in range(draw.randint(1, 4))]
        ids = [*ids, OPEN, *completion]
        messages += [message, ToolMessage(tool_call_id=str(turn), content=str(said))]
        spans = [*spans, None, (len(ids), len(ids) + len(said))]
        ids += said
    trace.rewards["right"] = Reward(score=draw.random(), weight=2.0)
    trace.rewards["short"] = Reward(score=0.5)
    return trace


def view(trace: WireTrace) -> dict[str, Any]:
    [branch] = trace.branches
    value = sum(reward.value for reward in trace.rewards.values() if reward is not None)
    cut = bool(trace.calls) and trace.calls[-1].finish_reason == "length"
    return {
        "ids": branch.token_ids,
        "mask": branch.sampled_mask,
        "logprobs": branch.logprobs,
        "reward": value,
        "cut": cut,
    }


def main(folder: Path) -> None:
    draw = random.Random(0)
    traces = [[trace_of(group, draw) for _ in range(EACH)] for group in range(GROUPS)]
    for group, group_traces in enumerate(traces):
        for trace in group_traces:
            env, name = EnvInfo(id="sums"), GroupInfo(id=f"g{group}")
            write_episode(folder, WireEpisode(env=env, task=trace.task, group=name, ok=True, traces=[trace]))
    (folder / TRACES_FILE).rename(folder / "theirs.jsonl")
    records = [trace.to_record(float_decimals=None) for group_traces in traces for trace in group_traces]
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    ours = WireTrace.model_validate_json((folder / "ours.json").read_text())
    views = {"theirs": [view(trace) for group_traces in traces for trace in group_traces], "ours": view(ours)}
    (folder / "views.json").write_text(json.dumps({"version": verifiers.__version__, **views}))


main(Path(sys.argv[1]))
