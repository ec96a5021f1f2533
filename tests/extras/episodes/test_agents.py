"""Programs at the endpoint: the processes, the HTTP and the records are the real ones, the engine has no model."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from mugrpo_megatron.engine.wire import Sampling
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.episodes import launcher
from mugrpo_megatron.extras.episodes.episodes import Episodes
from mugrpo_megatron.extras.episodes.trial import try_agent
from mugrpo_megatron.recipe import Recipe
from tests.extras.episodes.agents import HOSTILE, LEFT
from tests.extras.episodes.fake import EOS, TOKENIZER, FakeEngine
from tests.extras.episodes.test_episodes import TOOLS, calls_the_tool, played, prompts_of, recipe_of, takes

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


def test_a_program_is_told_of_its_limit_and_may_still_score_itself(agent_recipe: Callable[..., Recipe]) -> None:
    recipe = agent_recipe("told_of_its_limit", turns=3)
    [response] = played(recipe, lambda context: "a", ["1"], n=1)["1"][:1]
    assert (response.episode.failed, response.episode.reward) == (False, 0.25), response.episode.why
    assert response.finish_reason == "length"
    assert response.episode.parts["turns"] == 3


class Holding(FakeEngine):
    """Never answers a request that a program leaves behind."""

    def poll_groups(self, others: Any, timeout_s: float) -> Any:
        left = [request for request in self._waiting if LEFT in request.stop]
        self._waiting = [request for request in self._waiting if LEFT not in request.stop]
        answers = super().poll_groups(others, timeout_s)
        self._waiting += left
        return answers


@pytest.mark.parametrize("sessions", [40, pytest.param(2000, marks=pytest.mark.night)])
def test_nothing_waits_for_a_program_that_has_gone(agent_recipe: Callable[..., Recipe], sessions: int) -> None:
    """Its requests are aborted: descriptors and memory stay, and all episodes are of one round.

    Four requests of the engine at a time: with those of programs that have gone the round would end after a few groups.
    """
    recipe = agent_recipe("abandons", programs=4)
    engine = Holding(lambda context: "a", slots=4)
    how = Sampling(1.0, 1.0, 256, (EOS,))
    readings = []
    with closing(Episodes(recipe, engine)) as episodes:  # type: ignore[arg-type]
        for _, responses in episodes.generate(takes(prompts_of(list(map(str, range(sessions))))), 1, how):
            assert not responses[0].episode.failed, responses[0].episode.why
            worker = max(workers(), key=descriptors)
            readings.append((descriptors(worker), resident(worker)))
    assert len(readings) == sessions, "one round"
    assert not engine._waiting
    asked = {request.key for request in engine.asked if LEFT in request.stop}
    assert asked == set(engine.aborted)
    quarter = sessions // 4
    early, late = readings[quarter : 2 * quarter], readings[-quarter:]
    print(f"{sessions} sessions, {len(asked)} requests aborted: descriptors and MB", early[0], late[-1])
    assert max(late)[0] <= max(early)[0] + 16
    assert sessions < 100 or late[-1][1] < 1.1 * early[0][1]


def workers() -> list[psutil.Process]:
    """The processes below this one that play episodes, and their guards: pytest has others below it, of any size."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # a program that has ended meanwhile
            if any("episode_worker" in word for word in process.cmdline()):
                found.append(process)
    return found


def descriptors(process: psutil.Process) -> int:
    try:
        return int(process.num_fds())
    except psutil.Error:  # a program that has ended meanwhile
        return 0


def resident(process: psutil.Process) -> float:
    return float(process.memory_info().rss / 1e6)


def test_connections_that_a_program_holds_leave_the_endpoint_open(agent_recipe: Callable[..., Recipe]) -> None:
    """Of 256 descriptors, which this process may raise, it would take all."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        [response] = played(agent_recipe("holds_connections"), lambda context: "a", ["1"], n=1)["1"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (response.episode.failed, response.episode.reward) == (False, 1.0), response.episode.why


def test_a_launcher_that_dies_is_started_again(agent_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """The programs that die with it are begun again, and those after it find a new one."""
    recipe = agent_recipe("kills_the_launcher", programs=2)
    questions = ["0", "kill", *map(str, range(1, 6))]
    found = played(recipe, lambda context: "a", questions, n=1, row={"once": str(tmp_path / "once")})
    for question in questions:
        assert not found[question][0].episode.failed, found[question][0].episode.why


CLEAN = """
set -- $(grep -E 'Sig(Ign|Blk)' /proc/self/status)
echo "$2 $4 $HF_TOKEN $NAMED_TOKEN $(dirname $(command -v python))" > "$PLACE"
yes 2>> "$PLACE" | head -1 > /dev/null
exec python agent.py
"""


def test_a_command_starts_clean(
    agent_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No signal is ignored or blocked, no secret is in its environment, and `python` is this one."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"HF_TOKEN": "secret", "NAMED_TOKEN": "given", "PLACE": str(tmp_path / "said")}.items():
        monkeypatch.setenv(name, value)
    Path("agent.py").write_text(COMMAND, encoding="utf-8")
    Path("agent.sh").write_text(CLEAN.replace("agent.py", str(tmp_path / "agent.py")), encoding="utf-8")
    recipe = agent_recipe("sh agent.sh", secrets=["NAMED_TOKEN"])
    [response] = played(recipe, lambda context: "hi", ["1"], n=1, row={"question": "1", "place": "x"})["1"]
    assert not response.episode.failed, response.episode.why
    said = Path("said").read_text(encoding="utf-8")
    assert said == f"{'0' * 16} {'0' * 16}  given {Path(sys.executable).parent}\n", "and no word of a broken pipe"


def test_a_program_starts_below_a_hard_limit_of_descriptors(tmp_path: Path) -> None:
    (tmp_path / launcher.SCRATCH).mkdir()
    if (child := os.fork()) == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        launcher._enter(tmp_path, {}, resource.RLIM_INFINITY, is_command=False)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_program_that_cannot_be_started_is_named(agent_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    (tmp_path / "no program").write_text("#!/nosuch/interpreter\n", encoding="utf-8")
    (tmp_path / "no program").chmod(0o755)
    recipe = agent_recipe(f"'{tmp_path}/no program' x")
    [response] = played(recipe, lambda context: "a", ["1"], n=1)["1"]
    assert "cannot be started (No such file or directory)" in response.episode.why


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


@pytest.mark.parametrize(
    ("agent", "sentence"),
    [
        (f"{HERE}:asks_twice", "starts and asks the model"),
        (f"{HERE}:forks", "starts and asks the model"),
        ('sh -c "exit 0"', "it ends on test:0, before it has asked the model"),
        (f"{HERE}:asks_otherwise", "its first request is refused: top_k = 5"),
    ],
)
def test_the_dry_run_starts_one_program(agent_recipe: Callable[..., Recipe], agent: str, sentence: str) -> None:
    before = set(psutil.Process().children(recursive=True))
    problems = [prompt.problem for prompt in prompts_of(["1+2", "3"])]
    assert sentence in try_agent(agent_recipe(agent), problems)
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.parametrize(
    ("agent", "sentence"),
    [
        ("python nosuch.py", "can't open file"),
        ("sh -c 'exit 3'", "ended with exit code 3"),
        (f"{HERE}:no_such_name", "no_such_name"),
        (f"{HERE}:fills_the_disk", "File too large"),
    ],
)
def test_the_dry_run_refuses_a_program_that_cannot_start(
    agent_recipe: Callable[..., Recipe], agent: str, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        try_agent(agent_recipe(agent), [prompts_of(["1"])[0].problem])
