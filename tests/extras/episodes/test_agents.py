"""Programs at the endpoint: the processes, the HTTP and the records are the real ones, the engine has no model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from mugrpo_megatron.recipe import Recipe
from tests.extras.episodes.agents import HOSTILE
from tests.extras.episodes.fake import EOS, TOKENIZER
from tests.extras.episodes.test_episodes import TOOLS, calls_the_tool, played, recipe_of

pytestmark = pytest.mark.process
COMMAND = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
assert not os.listdir()
body = json.dumps({"messages": row["messages"]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print(json.dumps({"answer": row["place"] + ": " + said, "steps": 2}))
"""
HERE = "tests.extras.episodes.agents"


@pytest.fixture(scope="module")
def agent_recipe(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Recipe]:
    path = tmp_path_factory.mktemp("template") / "tools.jinja"
    path.write_text(TOOLS, encoding="utf-8")

    def make(agent: str, **episodes: Any) -> Recipe:
        recipe = recipe_of(model, "unused", **episodes)
        agent = agent if ":" in agent or " " in agent else f"{HERE}:{agent}"
        rollout = recipe.rollout.model_copy(update={"max_response_tokens": 256, "function": None, "agent": agent})
        data = recipe.data.model_copy(update={"chat_template": path, "prompt_style": "chat", "max_prompt_tokens": 128})
        return recipe.model_copy(update={"rollout": rollout, "data": data})

    return make


@pytest.mark.parametrize("agent", ["calculator", "with_client"])
def test_a_program_continues_what_was_sampled(agent_recipe: Callable[..., Recipe], agent: str) -> None:
    [response] = played(agent_recipe(agent), calls_the_tool, ["1+2+3"], n=1)["1+2+3"]
    assert not response.episode.failed, response.episode.why
    call = 'Let me see.\n<tool_call>\n{"name":  "add","arguments":{"terms": "1+2+3"} }\n</tool_call>'
    given = "\n<|im_start|>tool\n6<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(response.ids) == f"{call}<|im_end|>{given}6<|im_end|>"
    assert TOKENIZER.decode(response.ids[~response.episode.mask]) == given
    assert response.episode.reward == (1.0 if agent == "with_client" else None)
    assert response.episode.parts["calls"] == 1
    assert response.episode.parts["responses"] == 1


def test_hostile_programs_cost_their_own_episode_alone(
    agent_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind ends in one sentence, or in a reward of 1 for a program that was refused what it tried."""
    monkeypatch.setattr("mugrpo_megatron.extras.episodes.episodes.RETRIES", 0)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    recipe = agent_recipe("hostile", seconds=3600.0, programs=4)
    groups = played(recipe, lambda context: "a<|im_end|>", list(HOSTILE), 1)
    assert not {child.pid for child in psutil.Process().children(recursive=True)} - before
    for kind, (_, why) in HOSTILE.items():
        scored = groups[kind][0].episode
        if why == "cut":
            assert groups[kind][0].finish_reason == "length", kind
        elif why:
            assert (scored.failed, why in scored.why) == (True, True), (kind, scored.why)
        else:
            assert (scored.failed, scored.reward) == (False, 1.0), (kind, scored.why)
    prompt = groups["ends a turn"][0].episode.prompt_ids.tolist()
    assert prompt.count(EOS) == 1, "the end of a turn that a program spells out is text"
    assert len(groups["parallel"]) == 12, "a response for each request, of one session"


def test_a_program_that_hangs_is_killed(agent_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mugrpo_megatron.extras.episodes.episodes.RETRIES", 0)
    [response] = played(agent_recipe("hangs", seconds=1.0), lambda context: "a", ["1"], n=1)["1"]
    # On a busy machine the worker may be silent for that long, too: whichever is seen first.
    assert response.episode.why.startswith(
        ("the episode failed: it took longer than 1 s", "the episode failed: it blocked")
    )


def test_a_command_is_a_program_with_its_row_on_standard_input(
    agent_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file among its words is found from where the run began; its last line may score it and name its answer."""
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text(COMMAND, encoding="utf-8")
    row = {"question": "1", "place": "x"}
    [response] = played(agent_recipe(f"{sys.executable} agent.py"), lambda context: "hi", ["1"], n=1, row=row)["1"]
    assert (response.episode.failed, response.episode.answer) == (False, "x: hi"), response.episode.why
    assert response.episode.reward is None
    assert response.episode.parts["steps"] == 2
