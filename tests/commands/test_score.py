from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from mugrpo_megatron.cli import main
from mugrpo_megatron.commands import score
from mugrpo_megatron.commands.score import MAX_REASONS, ScoreSummary, run
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.scoring import RewardSection

REWARD = RewardSection(workers=1)


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_come_back_in_order_with_their_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more blocks than are scored ahead."""
    monkeypatch.setattr(score, "BLOCK", 32)
    rows: list[object] = [{"response": f"so \\boxed{{{i % 7}}}", "answer": i % 5, "i": i} for i in range(500)]
    summary = run(write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", REWARD)
    scored = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["i"] for row in scored] == list(range(500))
    assert [row["reward"] for row in scored] == [float(i % 7 == i % 5) for i in range(500)]
    assert set(scored[0]) == {"response", "answer", "i", "reward", "extracted", "why", "seconds", "components"}
    assert summary.rows == 500 == sum(summary.whys.values())
    assert summary.reward == pytest.approx(sum(row["reward"] for row in scored) / 500)
    assert "500 rows, mean reward" in str(summary)


@pytest.mark.parametrize("gold", ["so 6 x 7\n#### 42", [42]])
def test_a_gold_is_read_as_training_reads_it(gold: object, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [{"response": r"\boxed{42}", "answer": gold}])
    assert run(path, tmp_path / "out.jsonl", REWARD).reward == 1.0
    assert json.loads((tmp_path / "out.jsonl").read_text())["answer"] == gold


def test_the_summary_is_safe_short_and_says_what_is_replaced() -> None:
    whys = {f"error\n{k} \x1b]0;title\x07 {'long ' * 100}": 1 for k in range(100)}
    lines = str(ScoreSummary(100, 0, 0.5, 0, whys, ("reward", "why"), 1.0)).splitlines()
    assert len(lines) == 2 + MAX_REASONS + 1
    assert lines[1] == "columns of the input that the scores replace: reward, why"
    assert lines[-1].split() == f"{100 - MAX_REASONS} for {100 - MAX_REASONS} other reasons (column why)".split()
    assert all(line.isprintable() and len(line) < 200 for line in lines)


def test_columns_that_a_score_replaces_are_counted(tmp_path: Path) -> None:
    row = {"response": "1", "answer": "1", "reward": 0.5, "mine": 2}
    summary = run(write(tmp_path / "in.jsonl", [row]), tmp_path / "out.jsonl", REWARD)
    assert summary.replaced == ("reward",)
    scored = json.loads((tmp_path / "out.jsonl").read_text())
    assert (scored["reward"], scored["mine"]) == (1.0, 2)


@pytest.mark.process
def test_own_functions_see_the_row_and_are_chosen_by_its_source(tmp_path: Path) -> None:
    functions = {
        "verl": {"function": "tests.rewards.foreign.verl_reward:compute_score", "weight": 10, "sources": ["sums"]},
        "trl": {"function": "tests.rewards.foreign.trl_rewards:correctness", "sources": ["chats"]},
        "seen": {"function": "tests.rewards.functions:gold_is_in_row", "sources": ["nothing"]},
    }
    section = RewardSection.model_validate({"workers": 1, "functions": functions})
    chat = [{"role": "user", "content": "1+1?"}]
    rows: list[object] = [
        {"response": "2", "answer": 2, "data_source": "sums"},
        {"response": "3", "answer": "2", "data_source": "sums", "extra_info": {"level": "easy"}},
        {"response": "2", "answer": "2", "data_source": "chats", "prompt": chat},
        {"response": "2", "answer": ["2"], "data_source": "chats", "prompt": chat},
        {"response": "2", "data_source": "nothing"},
    ]
    summary = run(write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", section)
    scored = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in scored] == [30.0, 0.0, 2.0, 0.0, 0.0]
    assert [row["components"] for row in scored] == [
        {"verl": 3.0, "verl.acc": 1.0},
        {"verl": 0.0, "verl.acc": 0.0},
        {"trl": 2.0},
        {},
        {"seen": 0.0},
    ]
    assert summary.reward == pytest.approx(6.4)
    with pytest.raises(UserError, match="no reward function scores the data source ''"):
        run(write(tmp_path / "in.jsonl", [{"response": "2"}]), tmp_path / "out2.jsonl", section)
    assert not (tmp_path / "out2.jsonl").exists()


def test_a_score_that_is_terminated_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It left its temporary file for ever, and said nothing."""
    path = write(tmp_path / "in.jsonl", [{"response": "1", "answer": "1"}])

    def scored(*arguments: object) -> None:
        assert len(list(tmp_path.iterdir())) == 2, "the temporary is there"
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(score, "_scored", scored)
    assert main(["score", str(path), "--out", str(tmp_path / "out.jsonl")]) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "mugrpo: terminated; nothing was written, the same command starts over\n"
    assert list(tmp_path.iterdir()) == [path]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.process
def test_a_reward_that_fails_leaves_its_row_with_the_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fails_once.py").write_text("def reward(response, answer):\n    return 1 / (int(response) - 3)\n")
    rows: list[object] = [{"response": str(n), "answer": "1"} for n in range(5)]
    write(tmp_path / "in.jsonl", rows)
    words = ["score", "in.jsonl", "--out", "out.jsonl", "--set", "reward.function=fails_once:reward"]
    assert main(words) == 2
    assert "failed on 1 of 5 rows, which count 0; the column why of out.jsonl" in capsys.readouterr().err
    scored = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in scored] == [1 / -3, 1 / -2, -1.0, 0.0, 1.0]
    assert "ZeroDivisionError" in scored[3]["why"]
    assert "failed" not in scored[3]
    assert main([*words, "--overwrite", "--set", "reward.max_failure_share=0.5"]) == 0


@pytest.mark.process
def test_none_of_a_function_of_one_response_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gives_none.py").write_text("def reward(response):\n    return None\n")
    write(tmp_path / "in.jsonl", [{"response": "1", "answer": "1"}])
    summary = run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", RewardSection(function="gives_none:reward", workers=1))
    [why] = summary.whys
    assert "only a function that takes lists may return None, for a response that it does not score" in why
