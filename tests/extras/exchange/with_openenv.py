"""Runs in an environment that has OpenEnv: writes traces by its functions, and reads ours. `with_openenv.py DIR`.

DIR/ours.json is a trace of ours; into DIR go `theirs.jsonl`, each row a trace with its group and reward, and
`views.json`: the sequences that the library makes of its captures, and of ours.
"""

from __future__ import annotations

import json
import random
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from openenv.core.harness.capture.contract import to_training_trace
from openenv.core.harness.capture.export import export_session
from openenv.core.harness.capture.graph import RolloutGraph, TurnNode
from openenv.core.harness.capture.sessions import Session
from openenv.core.harness.training import TrainingTrace

GROUPS, EACH = 4, 2


def captured(group: int, draw: random.Random) -> Session:
    """An agent's two or three calls, and one of a title generator, which has no tools."""
    session = Session(session_id=f"{group}-{draw.random()}")
    ids = [1, 2 + group]
    title = TurnNode("title", [90, 91], [92], [-0.5])
    session.graph.add_turn(title)
    for turn in range(draw.randint(2, 3)):
        sampled = [draw.randint(3, 80) for _ in range(draw.randint(1, 5))]
        logprobs = [-3 * draw.random() for _ in sampled]
        session.graph.add_turn(TurnNode(f"turn{turn}", list(ids), sampled, logprobs, finish_reason="stop", n_tools=1))
        ids += [*sampled, *(draw.randint(3, 80) for _ in range(draw.randint(1, 4)))]
    return session


def view(graph: RolloutGraph) -> dict[str, Any]:
    [sequence] = [candidate for candidate in graph.sequences() if candidate.node_ids != ["title"]]
    return {"ids": sequence.input_ids, "mask": sequence.loss_mask, "logprobs": sequence.logprobs}


def main(folder: Path) -> None:
    draw = random.Random(0)
    sessions = [(group, captured(group, draw)) for group in range(GROUPS) for _ in range(EACH)]
    rows, views = [], []
    for group, session in sessions:
        trace = to_training_trace(session.graph, export_session(session))
        reward = draw.random()
        rows.append({"group": group, "reward": reward, "trace": trace.model_dump(mode="json")})
        views.append({**view(session.graph), "reward": reward, "cut": False})
    (folder / "theirs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    graph = RolloutGraph()
    for turn in TrainingTrace.model_validate_json((folder / "ours.json").read_text()).turns:
        node = TurnNode(turn.node_id, turn.prompt_token_ids, turn.completion_token_ids, turn.per_token_logps)
        graph.add_turn(node)
    found = {"version": version("openenv"), "theirs": views, "ours": view(graph)}
    (folder / "views.json").write_text(json.dumps(found))


main(Path(sys.argv[1]))
