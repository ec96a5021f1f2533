from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.calls import BATCH
from mugrpo_megatron.rewards.items import Score
from mugrpo_megatron.rewards.pool import Verifier, overlong, with_length_penalty
from tests.patience import PATIENCE_S
from tests.rewards.hostile import KINDS, hostile_answers
from tests.rewards.patience import patient as patient

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("patient")]

BEHAVE = "tests.rewards.functions:behave"


@pytest.fixture(scope="module")
def verifier(patient: None) -> Iterator[Verifier]:
    with Verifier(RewardSection(workers=2)) as pool:
        yield pool


def misbehaving(**settings: object) -> RewardSection:
    chosen = {"function": BEHAVE, "workers": 2, "timeout_s": 1.0, "max_failure_share": 1.0, **settings}
    return RewardSection.model_validate(chosen)


def test_scores_come_in_order(verifier: Verifier) -> None:
    responses = [f"\\boxed{{{i}x+{i % 3}}}" for i in range(120)]
    scores = verifier.score(responses, [f"x+{i % 3} + {i - 1}x" for i in range(120)])
    assert [score.reward for score in scores] == [1.0] * 120
    assert verifier.score([], []) == []
    assert [score.extracted for score in scores] == [f"{i}x+{i % 3}" for i in range(120)]


def test_literal_answers_need_no_worker() -> None:
    before = set(psutil.Process().children())
    with Verifier(RewardSection()) as pool:
        scores = pool.score(["933", "934", "\\boxed{\\frac{1}{2}}"], ["933", "933", "0.5"])
        assert [score.reward for score in scores] == [1.0, 0.0, 1.0]
        assert [score.seconds for score in scores] == [0.0, 0.0, 0.0]
        assert set(psutil.Process().children()) <= before


def test_hostile_answers_among_normal_ones_change_nothing(verifier: Verifier) -> None:
    normal = [(f"\\boxed{{{i}x + \\frac{{1}}{{2}}}}", f"{i}x + 0.5") for i in range(4 * len(KINDS))]
    hostile = [(f"\\boxed{{{answer}}}", gold) for answer, gold in hostile_answers(len(KINDS))]
    pairs = [pair for i in range(len(KINDS)) for pair in (*normal[4 * i : 4 * i + 4], hostile[i])]
    scores = verifier.score([response for response, _ in pairs], [gold for _, gold in pairs])
    assert [score.reward for score in scores] == [0.0 if i % 5 == 4 else 1.0 for i in range(len(pairs))]


def test_any_thread_may_score(verifier: Verifier) -> None:
    found: dict[int, list[float]] = {}

    def work(name: int) -> None:
        responses = [f"\\boxed{{{name}y+{i}}}" for i in range(20)]
        scores = verifier.score(responses, [f"{i}+{name}y" if i % 2 else f"{i}" for i in range(20)])
        found[name] = [score.reward for score in scores]

    threads = [threading.Thread(target=work, args=(name,)) for name in range(2, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: [float(i % 2) for i in range(20)] for name in range(2, 8)}


def test_the_same_comparison_is_made_once(verifier: Verifier) -> None:
    first = verifier.score(["\\boxed{17z+z}"] * 50, ["18z"] * 50)
    again = verifier.score(["text \\boxed{17z+z}"], ["18z"])
    assert {score.seconds for score in first} == {again[0].seconds}
    assert again[0].seconds > 0.0


BAD = {
    "hang in C": "killed after 1 s",
    "swallow the alarm": "killed after 1 s",
    "hang in Python": "gave up after 0.125 s",
    "die": "the worker died (exit code 3): out of memory, or the function ended it or closed its files",
    "leave": "failed: SystemExit: os._exit(0) (functions.py:",
    "eat memory": "the worker died",
    "raise": "failed: RuntimeError: no (functions.py:",
    "nan": "failed: ValueError",
    "text": "failed: TypeError",
    "nothing": "failed: TypeError",
    "exit": "failed: SystemExit: no more",
    "interrupt": "failed: KeyboardInterrupt: mine (functions.py:",
    "cancel": "failed: CancelledError: mine (functions.py:",
    "end": "failed: GeneratorExit: mine (functions.py:",
}


def test_a_bad_response_scores_0_and_costs_no_other() -> None:
    responses = [one for place, order in enumerate(BAD) for one in (str(2 * place), order, str(2 * place + 1))]
    with Verifier(misbehaving(worker_memory_mb=512)) as pool:
        scores = dict(zip(responses, pool.score(responses, ["0.5"] * len(responses)), strict=True))
    whys = {order: scores.pop(order) for order in BAD}
    assert {order: one.reward for order, one in whys.items()} == dict.fromkeys(BAD, 0.0)
    assert {order: one.why[: len(BAD[order])] for order, one in whys.items()} == BAD
    assert [one.reward for one in scores.values()] == [place + 0.5 for place in range(2 * len(BAD))]


def test_a_worker_without_room_for_its_function_says_so() -> None:
    """math needs about 80 MiB of address space. How Python fails without them depends on the caches on disk."""
    with Verifier(RewardSection(workers=1, worker_memory_mb=64)) as pool, pytest.raises(UserError) as error:
        pool.score(["\\boxed{\\frac{1}{2}+x}"], ["x+\\frac{2}{4}"])
    assert "in 64 MiB of address space; raise reward.worker_memory_mb" in str(error.value)


def test_a_worker_that_died_is_replaced() -> None:
    with Verifier(misbehaving(workers=1)) as pool:
        pids = [pool.score([order], [""])[0].reward for order in ("pid", "die", "pid", "pid")]
    assert pids[0] != pids[2] == pids[3]


def test_a_worker_that_has_grown_retires() -> None:
    section = RewardSection(function="tests.rewards.functions:grow", workers=1, worker_memory_mb=512)
    with Verifier(section) as pool:
        pids = [score.reward for score in pool.score(["x"] * 20, [""] * 20)]
    assert len(set(pids)) > 2
    assert 0.0 not in pids


def test_workers_end_with_the_verifier() -> None:
    with Verifier(misbehaving()) as pool:
        worker = int(pool.score(["pid"], [""])[0].reward)
        assert psutil.pid_exists(worker)
        pending = pool.submit(["wait"] * 4, [""] * 4)
    assert not psutil.pid_exists(worker)
    with pytest.raises(RuntimeError, match="closed"):
        pending.result()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(["1"], ["1"])


@pytest.mark.parametrize("name", ["tests.rewards.broken:reward", "tests.rewards.leaves:reward"])
def test_an_unusable_function_is_the_users_mistake(name: str) -> None:
    with pytest.raises(UserError, match=r"reward.function .* cannot be loaded"), Verifier(RewardSection(function=name)):
        pass


STARTS = ("child", "detached", "fork")


def test_what_a_worker_started_ends_with_it() -> None:
    with Verifier(misbehaving(workers=1)) as pool:
        pids = [int(score.reward) for score in pool.score([f"start {how}" for how in STARTS], [""] * 3)]
        assert all(psutil.pid_exists(pid) for pid in pids)
        pool.score(["hang in C"], [""])
        assert not any(psutil.pid_exists(pid) for pid in pids)
        pids = [int(score.reward) for score in pool.score([f"start {how}" for how in STARTS], [""] * 3)]
    assert len(set(pids)) == 3
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_nothing_outlives_a_killed_parent() -> None:
    script = (
        "from mugrpo_megatron.recipe.sections import RewardSection\n"
        "from mugrpo_megatron.rewards.pool import Verifier\n"
        f"with Verifier(RewardSection(function={BEHAVE!r}, workers=1, timeout_s=1000.0)) as pool:\n"
        f"    print(*[int(s.reward) for s in pool.score(['pid', *{[f'start {how}' for how in STARTS]}], [''] * 4)])\n"
        "    print(flush=True)\n"
        "    pool.score(['hang in C'], [''])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    left = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(left) == 4
    parent.kill()
    parent.wait()
    psutil.wait_procs(left, timeout=PATIENCE_S)
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in left)


def test_a_stopped_worker_costs_one_response() -> None:
    """It neither reads nor ends when it is asked to; its batch is larger than the socket holds."""
    with Verifier(misbehaving(workers=1, timeout_s=3.0)) as pool:
        worker = psutil.Process(int(pool.score(["pid"], [""])[0].reward))
        worker.suspend()
        scores = pool.score([f"{i}." + "0" * 100_000 for i in range(BATCH)], [""] * BATCH)
    assert not worker.is_running()
    assert [score.reward for score in scores] == [float(i) for i in range(BATCH)]


def test_a_row_that_its_worker_cannot_hold_scores_0_and_costs_no_other() -> None:
    """Its worker dies while it is sent."""
    section = misbehaving(function="tests.rewards.functions:gold_is_in_row", workers=1, worker_memory_mb=128)
    rows = [{"gold": n, "other": [1, {"a": None}]} for n in range(3)]
    rows[1] |= {"blob": "x" * (100 << 20)}
    with Verifier(section) as pool:
        scores = pool.score(["a", "b", "c"], [0, 1, 2], rows)
    assert [score.reward for score in scores] == [1.0, 0.0, 1.0]
    assert scores[1].why == "no room for its 100.0 MiB in a worker (raise worker_memory_mb, now 128)"


@pytest.mark.parametrize("order", ["raise", "die", "hang in C"])
def test_a_function_that_fails_ends_the_run_with_its_own_words(order: str) -> None:
    with Verifier(misbehaving(max_failure_share=0.01)) as pool:
        pattern = f"functions:behave' failed on 1 of .*'{order}' and the gold '7': fix"
        with pytest.raises(UserError, match=pattern) as told:
            pool.score(["1", order, "2"], ["0", "7", "0"])
        with pytest.raises(UserError, match="failed on 1 of"):
            pool.submit(["1"], ["1"])
    assert order != "raise" or "RuntimeError: no (functions.py:" in str(told.value)


def test_nothing_in_the_current_directory_is_imported_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("random", "sympy", "json", "math_verify", "mugrpo_megatron"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write(__name__)\n")
    (tmp_path / "mine.py").write_text("import random\ndef reward(response, answer):\n    return random.random()\n")
    (tmp_path / "in.jsonl").write_text('{"response": "\\\\boxed{x+1}", "answer": "1+x"}\n')
    monkeypatch.chdir(tmp_path)
    with Verifier(RewardSection(workers=1)) as pool:
        assert pool.score(["\\boxed{x+1}"], ["1+x"])[0].reward == 1.0
    with Verifier(RewardSection(workers=1, function="mine:reward")) as pool:
        assert 0.0 < pool.score(["x"], [""])[0].reward < 1.0
    (tmp_path / "mugrpo_megatron.py").unlink()  # the interpreter itself looks for the package here
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "mugrpo_megatron", "score", "in.jsonl", "--out", "out.jsonl"]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert '"reward": 1.0' in (tmp_path / "out.jsonl").read_text()
    assert not (tmp_path / "ran").exists()


def test_an_answer_that_is_too_long_is_not_parsed(verifier: Verifier) -> None:
    score = verifier.score([f"\\boxed{{{'x+' * 2000}1}}"], ["x"])[0]
    assert (score.reward, score.seconds) == (0.0, 0.0)
    assert score.why.startswith("answer longer than")


def test_nothing_is_added_by_default() -> None:
    score = Score(1.0, "", "", 0.0, components={"math": 1.0})
    assert with_length_penalty(score, 100, 100, RewardSection()) == score


def test_length_takes_away_and_is_a_component() -> None:
    section = RewardSection(overlong_buffer_tokens=40)
    score = with_length_penalty(Score(1.0, "", "", 0.0, {"math": 1.0}), 80, 100, section)
    assert score.reward == 0.5
    assert score.components == {"math": 1.0, "overlong": 0.5}


@given(st.integers(0, 200), st.integers(1, 100))
def test_overlong_rises_from_the_buffer_to_the_limit(tokens: int, buffer: int) -> None:
    penalty = overlong(tokens, 100, buffer)
    assert 0.0 <= penalty <= overlong(tokens + 1, 100, buffer) <= 1.0
    assert (penalty == 0.0) == (tokens <= 100 - buffer)
    assert (penalty == 1.0) == (tokens >= 100)


@pytest.mark.parametrize("seconds", [math.inf, 1e30, math.nan, 0.0, -1.0])
def test_a_time_limit_is_a_number_of_seconds(seconds: float) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        RewardSection(timeout_s=seconds)
