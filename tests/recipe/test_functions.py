"""Functions that a recipe names: found without running their module; names, weights and sources of reward functions."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from mugrpo_megatron.call_guard import TookTooLong, clock
from mugrpo_megatron.checks.preflight import check_on_paper
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe import dump_recipe, load_recipe
from mugrpo_megatron.recipe.functions import ForeignFailure, call_foreign, check_function, load_function
from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.samples import UNSCORED

MODULE = """
raise SystemExit("this module was run")
from math import sqrt as root
def near(response, gold): ...
class Judge: ...
table = {"far": near}
if table:
    late = near
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_rewards.py").write_text(MODULE)
    package = tmp_path / "own_package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text(MODULE)
    (package / "inner" / "rewards.py").write_text(MODULE)
    return tmp_path


@pytest.mark.parametrize("name", ["near", "Judge", "root", "table", "late"])
@pytest.mark.parametrize("module", ["own_rewards", "own_package", "own_package.inner.rewards"])
def test_every_name_of_a_module_is_found_and_the_module_is_not_run(module: str, name: str) -> None:
    check_function("reward.function", f"{module}:{name}")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("own_rewards:nera", r"own_rewards has no nera; did you mean near\?"),
        ("own_rewards:response", r"own_rewards has no response"),
        ("own_rewards", r"it has no `:function`"),
        ("own_rewards.near", r"it has no `:function`"),
        ("own_rewards.py:near", r"No module named 'own_rewards.py'"),
        ("own_package.outer:near", r"No module named 'own_package.outer'"),
        ("elsewhere:near", r"No module named 'elsewhere'"),
        ("broken:near", r"SyntaxError"),
    ],
)
def test_a_wrong_name_is_refused_with_its_reason(name: str, why: str, here: Path) -> None:
    (here / "broken.py").write_text("def near(:")
    with pytest.raises(UserError, match=rf"reward.function '{name}' cannot be loaded \(.*{why}.*name a module"):
        check_function("reward.function", name)


def test_modules_without_source_are_taken_for_right() -> None:
    check_function("reward.function", "math:sqrt")
    check_function("reward.function", "sys:exit")


@pytest.mark.parametrize("line", ["from math import *", "def __getattr__(name): ..."])
def test_a_module_whose_names_are_not_all_written_there_is_taken_for_right(line: str, here: Path) -> None:
    (here / "own_rewards.py").write_text(line)
    check_function("reward.function", "own_rewards:sqrt")


def test_a_dry_run_names_a_reward_function_that_is_not_there(here: Path) -> None:
    recipe = load_recipe(None, ["reward.functions.near.function=own_rewards:nera", f"run.dir={here / 'run'}"])
    with pytest.raises(UserError, match=r"reward.functions.near 'own_rewards:nera' cannot be loaded"):
        check_on_paper(recipe, lambda line: None)
    assert not (here / "run").exists()


def hangs() -> None:
    while True:
        pass


def swallows() -> None:
    while True:
        try:
            time.sleep(3600)
        except Exception:
            continue


def matches() -> None:
    re.match("(a+)+$", "a" * 64 + "b")


def leaves() -> None:
    os._exit(0)


def leaves_in_a_thread() -> None:
    with ThreadPoolExecutor(1) as threads:
        threads.submit(os._exit, 0).result()


def becomes_another_program() -> None:
    os.execlp("true", "true")


def forks() -> None:
    """A fork ends as it does elsewhere."""
    if not (child := os.fork()):
        os._exit(7)
    raise KeyError(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def stops() -> None:
    raise GeneratorExit("mine")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (hangs, r"TookTooLong: it took longer than 0\.2 s \(test_functions\.py:\d+\)"),
        (swallows, "TookTooLong"),
        (matches, "TookTooLong"),
        (leaves, r"SystemExit: os\._exit\(0\) \(test_functions\.py:\d+\)"),
        (leaves_in_a_thread, r"SystemExit: os\._exit\(0\)"),
        (becomes_another_program, r"SystemExit: os\.execv\(.*true', \('true',\)\)"),
        (forks, "KeyError: 7"),
        (stops, r"GeneratorExit: mine \(test_functions\.py:\d+\)"),
    ],
)
def test_a_call_in_this_process_has_an_end_and_names_it(function: Callable[[], None], says: str) -> None:
    before = os._exit, signal.getsignal(signal.SIGALRM)
    with pytest.raises(ForeignFailure, match=f"^{says}"):
        call_foreign(function, seconds=0.2 if says.startswith("Took") else 600.0)
    assert (os._exit, signal.getsignal(signal.SIGALRM)) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert call_foreign(int, "3") == 3


def test_a_clock_does_not_ring_while_its_block_ends() -> None:
    """What it raised there would leave its limits in force."""
    leaving: Any = SimpleNamespace(f_code=contextlib._GeneratorContextManager.__exit__.__code__)
    with clock(0.0, cpu=True):
        ring: Any = signal.getsignal(signal.SIGALRM)
        ring(signal.SIGALRM, leaving)
        with pytest.raises(TookTooLong):
            ring(signal.SIGALRM, None)


@pytest.mark.process
def test_a_call_that_reads_no_signals_ends_the_process_with_its_line() -> None:
    code = (
        "import signal\n"
        "from mugrpo_megatron import call_guard\n"
        "from mugrpo_megatron.recipe.functions import call_foreign\n"
        "call_guard.DEAF_S = 0.2\n"
        "def deaf():\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n"
        "    while True: pass\n"
        "call_foreign(deaf, seconds=0.2)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "line 7 in deaf" in ended.stderr


@pytest.mark.parametrize("body", ["import os; os._exit(0)", "import sys; sys.exit(0)", "raise GeneratorExit"])
def test_a_module_cannot_end_the_process_that_imports_it(body: str, here: Path) -> None:
    (here / "leaving_module.py").write_text(body)
    with pytest.raises(UserError, match=r"objective.surrogate 'leaving_module:loss' cannot be loaded"):
        load_function("objective.surrogate", "leaving_module:loss")


OVERRIDES = [
    "reward.functions.right.function=math",
    "reward.functions.brief.function=my:brief",
    "reward.functions.brief.weight=0.5",
    'reward.functions.brief.sources=["a", "b"]',
]


def made(**functions: object) -> RewardSection:
    return RewardSection.model_validate({"functions": functions})


def test_functions_are_set_key_by_key_and_survive_the_dump(tmp_path: Path) -> None:
    recipe = load_recipe(None, OVERRIDES)
    assert {name: (one.function, one.weight, one.sources) for name, one in recipe.reward.table.items()} == {
        "right": ("math", 1.0, ()),
        "brief": ("my:brief", 0.5, ("a", "b")),
    }
    (tmp_path / "r.toml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(tmp_path / "r.toml") == recipe


@pytest.mark.parametrize(
    ("function", "name"),
    [("math", "math"), ("my.module:exact_match", "exact_match"), ("my:mean", "mean_")],
)
def test_one_function_is_called_as_it_is(function: str, name: str) -> None:
    section = RewardSection(function=function)
    assert list(section.table) == [name]
    assert section.is_right_or_wrong is (function == "math")


def test_a_source_chooses_functions_and_what_a_gold_may_be() -> None:
    section = load_recipe(None, OVERRIDES).reward
    assert not section.is_right_or_wrong
    assert section.functions_of("a") == ("right", "brief")
    assert section.functions_of("c") == ("right",)
    assert not section.accepts_any_gold("a")
    own = made(code={"function": "my:code", "sources": ["code"]}, math={"function": "math", "sources": ["math"]})
    assert own.accepts_any_gold("code")
    assert not own.accepts_any_gold("math")
    own.check_sources(["code", "math"])
    with pytest.raises(UserError, match=r"scores the data source 'x', 'y': .*they name 'code', 'math'"):
        own.check_sources(["code", "x", "y", "x"])


def test_functions_replace_an_inherited_function_and_one_function_inherited_functions(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text('reward.function = "my:own"\nreward.timeout_s = 3.0\n')
    (tmp_path / "several.toml").write_text('base = "one.toml"\n[reward.functions.a]\nfunction = "math"\n')
    (tmp_path / "again.toml").write_text('base = "several.toml"\nreward.function = "my:other"\n')
    (tmp_path / "both.toml").write_text('reward.function = "my:own"\n[reward.functions.a]\nfunction = "math"\n')

    def functions(name: str, *overrides: str) -> dict[str, str]:
        reward = load_recipe(tmp_path / name, overrides).reward
        assert reward.timeout_s == 3.0
        return {name: one.function for name, one in reward.table.items()}

    assert functions("several.toml") == {"a": "math"}
    assert functions("several.toml", "reward.functions.b.function=code") == {"a": "math", "b": "code"}
    assert functions("again.toml") == {"other": "my:other"}
    assert functions("one.toml", "reward.functions.b.function=code", "reward.functions.b.weight=2") == {"b": "code"}
    assert functions("several.toml", "reward.function=math") == {"math": "math"}
    for name, overrides in (
        ("both.toml", []),
        ("one.toml", ["reward.function=my:x", "reward.functions.b.function=math"]),
    ):
        with pytest.raises(UserError, match="both set"):
            load_recipe(tmp_path / name, overrides)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"function": "my:own", "functions": {"a": {"function": "math"}}}, "both set"),
        ({"functions": {"a b": {"function": "math"}}}, "letters, digits"),
        ({"functions": {"overlong": {"function": "math"}}}, "not overlong, mean, group"),
        ({"functions": {UNSCORED.partition(".")[0]: {"function": "math"}}}, "not overlong, mean, group"),
        ({"functions": {"a": {"function": "math", "weight": 0}}}, "every weight is 0"),
        ({"functions": {"a": {"weight": 1}}}, "Field required"),
        ({"functions": {"a": {"function": ""}}}, "at least 1 character"),
        ({"functions": {"a": {"function": "math", "wieght": 1}}}, "Extra inputs"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RewardSection.model_validate(given)
