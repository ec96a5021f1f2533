from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from mugrpo_megatron.cli import main
from mugrpo_megatron.commands import eval
from mugrpo_megatron.commands.eval import EvalRecord, Evaluation, markdown, on_screen, run, settings_of, table
from mugrpo_megatron.commands.reading import results_of, weights_of
from mugrpo_megatron.data.tokenizer import VOCAB_SIZE, build_arithmetic_tokenizer, load_tokenizer
from mugrpo_megatron.engine.client import MOST_FAILURES, Engine, PromptSource
from mugrpo_megatron.engine.process import HostProcess
from mugrpo_megatron.engine.wire import SampledGroup, Sampling
from mugrpo_megatron.errors import EngineFailure, UserError
from mugrpo_megatron.evaluation.scoring import ProblemResult, summarize
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.record import PROVENANCE
from mugrpo_megatron.samples import Problem, Response
from tests import models
from tests.engine_server import forked_engines
from tests.hostile.faults import disk
from tests.refusals import refuses

SUMS = {"arithmetic": "arithmetic"}


def graded(number: int, reward: float) -> ProblemResult:
    return ProblemResult(
        Problem(f"s:{number}", "q", "1", "s"), [reward, 1.0], ["1", "1"], ["", ""], [3, 4], 0, ["1", "1"]
    )


def test_a_record_gives_back_what_was_appended_and_a_row_that_a_kill_cut_short_is_made_again(tmp_path: Path) -> None:
    record = EvalRecord(tmp_path, {})
    assert record.read() == []
    record.append(graded(1, 0.0))
    assert EvalRecord(tmp_path, {}).read() == [graded(1, 0.0)]
    whole = (tmp_path / "problems.jsonl").read_bytes()
    for cut in (1, 10, len(whole) - 1):
        (tmp_path / "problems.jsonl").write_bytes(whole + whole[:cut])
        assert [row.problem.id for row in record.read()] == ["s:1"]
        record.append(graded(2, 1.0))
        assert [row.problem.id for row in record.read()] == ["s:1", "s:2"]


def test_a_full_disk_is_one_sentence_and_finished_problems_stay(tmp_path: Path) -> None:
    with disk(tmp_path / "small", 1 << 14) as small:
        record = EvalRecord(small, {})
        record.append(graded(1, 0.0))
        (small / "fill").write_bytes(bytes(shutil.disk_usage(small).free))
        with pytest.raises(UserError, match=r"no space left for problems\.jsonl"):  # noqa: PT012
            for number in range(2, 100):
                record.append(graded(number, 1.0))
        (small / "fill").unlink()
        assert record.read()[0] == graded(1, 0.0)


def test_other_weights_of_one_path_are_another_evaluation(tmp_path: Path) -> None:
    """A run writes its later weights where the earlier ones lay."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"first")
    recipe = Recipe.model_validate({"model": {"path": tmp_path / "hf"}})
    EvalRecord(tmp_path / "out", settings_of(recipe, SUMS, []))
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"later")
    refuses(r"other settings \(weights\); choose", EvalRecord, tmp_path / "out", settings_of(recipe, SUMS, []))


def test_other_problems_or_functions_behind_a_name_are_another_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = tmp_path / "rewards_of_an_evaluation.py"
    code.write_text("def right(response):\n    return 1.0\n")
    recipe = Recipe.model_validate({"reward": {"function": "rewards_of_an_evaluation:right"}})
    problems = [Problem("file:1", "1+1=", "2", "file")]
    EvalRecord(tmp_path / "out", settings_of(recipe, SUMS, problems))
    EvalRecord(tmp_path / "out", settings_of(recipe, SUMS, [replace(problems[0], id="moved:1")]))
    old = {
        key: value
        for key, value in settings_of(recipe, SUMS, problems).items()
        if key not in ("problems", "reward files")
    }
    EvalRecord(tmp_path / "older", old)
    EvalRecord(tmp_path / "older", settings_of(recipe, SUMS, problems))
    with pytest.raises(UserError, match=r"with other settings \(problems\); choose another"):
        EvalRecord(tmp_path / "out", settings_of(recipe, SUMS, [replace(problems[0], answer="3")]))
    code.write_text("def right(response):\n    return 0.0\n")
    with pytest.raises(UserError, match=r"with other settings \(reward files\); choose another"):
        EvalRecord(tmp_path / "out", settings_of(recipe, SUMS, problems))


def test_results_lie_outside_the_checkpoint_that_a_run_replaces(tmp_path: Path) -> None:
    (tmp_path / "run" / "hf").mkdir(parents=True)
    assert results_of(tmp_path / "run" / "hf") == tmp_path / "run" / "hf" / "eval"
    (tmp_path / "run" / "hf" / PROVENANCE).touch()
    assert results_of(tmp_path / "run" / "hf") == tmp_path / "run" / "eval"
    assert results_of(Path("owner/name")) == Path("runs/eval/name")


def test_a_run_stands_for_its_weights(tmp_path: Path) -> None:
    assert weights_of(tmp_path / "run") == tmp_path / "run"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    refuses("this run has no hf/ yet", weights_of, tmp_path / "run")
    (tmp_path / "run" / "hf").mkdir()
    (tmp_path / "run" / "hf" / "config.json").touch()
    assert weights_of(tmp_path / "run") == weights_of(tmp_path / "run" / "hf") == tmp_path / "run" / "hf"
    (tmp_path / "run" / "config.json").touch()
    assert weights_of(tmp_path / "run") == tmp_path / "run"


def test_the_table_fits_a_terminal_and_can_be_pasted() -> None:
    """Each set with its own number of responses; the mean is that of the sets."""
    four = [
        ProblemResult(Problem(f"s:{n}", "q", "1", "s"), [1.0] * 4, ["1"] * 4, [""] * 4, [3] * 4, 0, [])
        for n in range(8)
    ]
    two = [graded(n, float(n % 2)) for n in range(8)]
    sets = [summarize("one", two, "accuracy"), summarize("two", four, "accuracy")]
    evaluation = Evaluation(sets, {"one": 1.0, "two": 0.0})
    console = Console(width=120, record=True)
    console.print(on_screen(table(Evaluation(sets[:1], {"one": 1.0}))))
    head, *_, average = (line.split() for line in console.export_text().splitlines() if line.strip())
    assert (head[:3], average[:2]) == (["set", "problems", "K"], ["average", "75.0"])
    lines = markdown(table(evaluation)).splitlines()
    assert lines[0].startswith("| set | problems | K | mean@K | pass@2 | pass@4 | majority@K |")
    assert lines[2].startswith("| one | 8 | 2 | 75.0 [")
    assert lines[3].startswith("| two | 8 | 4 | 100.0 [")
    assert lines[-1].startswith("| average | | | 87.5 [")
    assert len({line.count("|") for line in lines}) == 1


def test_mean_rewards_are_no_percentages() -> None:
    sets = [summarize("one", [graded(n, 4.0) for n in range(8)], "reward")]
    said = markdown(table(Evaluation(sets, {"one": 1.0})))
    assert "| one | 8 | 2 | 2.5 |" in said
    assert "inf" not in said
    apart = [summarize("one", [graded(n, float(n)) for n in range(8)], "reward")]
    assert re.search(r"\| 2\.25 \[1\.\d+, 3\.\d+\] \|", markdown(table(Evaluation(apart, {"one": 1.0}))))


def test_a_majority_that_is_not_defined_is_a_dash() -> None:
    silent = [replace(graded(n, 4.0), answers=["", ""]) for n in range(8)]
    line = markdown(table(Evaluation([summarize("one", silent, "reward")], {"one": 1.0}))).splitlines()[2]
    assert line == "| one | 8 | 2 | 2.5 | 100.0 [67.6, 100.0] | – | 4 | 0.0% | 1 |"


class Parrot:
    """An engine that answers every sum with 4."""

    asked: ClassVar[list[str]] = []
    sampled: ClassVar[dict[str, tuple[int, float, float, int]]] = {}
    lives: ClassVar[list[int]] = []
    """Problems that it answers before it dies, one number for each of its lives; then it lives on."""

    def __init__(self) -> None:
        self.running = True

    @classmethod
    def start(cls, *_: object) -> Parrot:
        return cls()

    def restart(self) -> None:
        self.running = True

    def wait_ready(self) -> None: ...

    def stop(self) -> None: ...

    def generate_from(self, take: PromptSource, n: int, sampling: Sampling) -> Iterator[SampledGroup]:
        life = self.lives.pop(0) if self.lives else 10**9
        for count, prompt in enumerate(prompt for prompts in iter(lambda: take(0, 4), []) for prompt in prompts):
            if count == life:
                self.running = False
                raise EngineFailure("died")
            self.asked.append(prompt.problem.question)
            self.sampled[prompt.problem.source] = n, sampling.temperature, sampling.top_p, sampling.max_tokens
            four = np.array(build_arithmetic_tokenizer().encode("4"), dtype=np.int32)
            yield SampledGroup(prompt, [Response(four, np.zeros(1, dtype=np.float32), "length", 0)] * n)


def test_a_run_that_died_is_continued(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval, "Engine", Parrot)
    sums = tmp_path / "sums.jsonl"
    sums.write_text("".join(json.dumps({"problem": f"{n}+{n}=", "answer": 2 * n}) + "\n" for n in range(10)))
    recipe = Recipe.model_validate({"model": {"path": checkpoint}, "eval": {"samples": 2}})
    Parrot.asked.clear()
    Parrot.lives[:] = [6, *[0] * (MOST_FAILURES - 1)]
    with pytest.raises(EngineFailure, match="died"):
        run(recipe, [str(sums)], tmp_path / "out")
    before = list(Parrot.asked)
    Parrot.asked.clear()
    result = run(recipe, [str(sums)], tmp_path / "out")
    assert sorted({*before, *Parrot.asked}) == sorted(f"{n}+{n}=" for n in range(10))
    assert len(Parrot.asked) < 10
    assert (result.sets[0].problems, result.sets[0].mean.value, result.sets[0].truncated) == (10, 0.1, 20)
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["average"]["value"] == 0.1
    Parrot.asked.clear()
    assert run(recipe, [str(sums)], tmp_path / "out").sets == result.sets
    assert Parrot.asked == []


def test_an_engine_that_dies_is_started_again_for_the_problems_that_are_left(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(eval, "Engine", Parrot)
    sums = tmp_path / "sums.jsonl"
    sums.write_text("".join(json.dumps({"problem": f"{n}+{n}=", "answer": 2 * n}) + "\n" for n in range(10)))
    recipe = Recipe.model_validate({"model": {"path": checkpoint}})
    Parrot.asked.clear()
    Parrot.lives[:] = [0, 0, 3, 0, 1, 0]  # never MOST_FAILURES in a row without an answer between them
    result = run(recipe, [str(sums)], tmp_path / "out")
    assert sorted(Parrot.asked) == sorted(f"{n}+{n}=" for n in range(10))
    assert result.sets[0].problems == 10
    assert capsys.readouterr().out.count("The engine is restarted for what is missing.") == 6


@pytest.mark.process
def test_an_engine_that_is_killed_is_started_again(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its process is killed once it has answered some problems; the others are answered as by an engine that lives."""
    sums = tmp_path / "sums.jsonl"
    sums.write_text("".join(json.dumps({"problem": f"{n}+{n}=", "answer": 2 * n}) + "\n" for n in range(24)))
    recipe = Recipe.model_validate(
        {
            "model": {"path": checkpoint, "dtype": "float32"},
            "data": {"max_prompt_tokens": 32},
            "rollout": {"max_response_tokens": 6},
            "engine": {"max_running_requests": 2},
        }
    )
    hosts, killed = list[int](), list[int]()
    load, receive = HostProcess.load, Engine.receive_groups

    def note(self: HostProcess, *arguments: Any) -> None:
        hosts.append(self.pid)
        load(self, *arguments)

    def kill(self: Engine) -> Iterator[tuple[int, list[Response]]]:
        groups = receive(self)
        if not killed:
            os.kill(hosts[-1], signal.SIGKILL)
            killed.append(hosts[-1])
        return groups

    monkeypatch.setattr(HostProcess, "load", note)
    with forked_engines():
        expected = run(recipe, [str(sums)], tmp_path / "unbroken")
        monkeypatch.setattr(Engine, "receive_groups", kill)
        assert run(recipe, [str(sums)], tmp_path / "out").sets == expected.sets
    assert len(hosts) == 3
    assert "The engine is restarted for what is missing." in capsys.readouterr().out
    ids = [json.loads(line)["problem"]["id"] for line in (tmp_path / "out/problems.jsonl").read_text().splitlines()]
    assert sorted(ids) == sorted(f"{sums}:{n + 1}" for n in range(24)), "each problem once"


def test_sets_are_told_apart_and_sampled_as_each_of_them_asks(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files of one name, one of them asked 3 times, the other as the section says."""
    monkeypatch.setattr(eval, "Engine", Parrot)
    Parrot.sampled.clear()
    files = [tmp_path / folder / "sums.jsonl" for folder in ("easy", "hard")]
    for problems, file in zip((4, 8), files, strict=True):
        file.parent.mkdir()
        file.write_text("".join(json.dumps({"problem": f"{n}+{n}=", "answer": 2 * n}) + "\n" for n in range(problems)))
    own = {"samples": 3, "temperature": 0.6, "max_tokens": 5}
    recipe = Recipe.model_validate(
        {"model": {"path": checkpoint}, "eval": {"samples": 2, "top_p": 0.9, "sets": {"easy-sums": own}}}
    )
    result = run(recipe, [",".join(map(str, files))], tmp_path / "out")
    assert [(one.name, one.problems, one.samples, one.mean.value) for one in result.sets] == [
        ("easy-sums", 4, 3, 0.25),
        ("hard-sums", 8, 2, 0.125),
    ]
    assert result.average.value == (0.25 + 0.125) / 2
    assert Parrot.sampled == {"easy-sums": (3, 0.6, 0.9, 5), "hard-sums": (2, 0.0, 0.9, 1024)}
    with pytest.raises(UserError, match=r"\[eval.sets.easy-sums\] names no held-out set: .* arithmetic, sums$"):
        run(recipe, [str(files[1])], tmp_path / "other")
    refuses(r"--data names .*sums.jsonl 2 times", run, recipe, [str(files[1])] * 2, tmp_path / "other")


def test_the_command_takes_the_recipes_sampling_its_own_options_before_it_and_says_where_the_results_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[tuple[Recipe, Path]] = []
    monkeypatch.setattr(eval, "run", lambda recipe, sources, output: found.append((recipe, output)))
    Path("r.toml").write_text("[eval]\nsamples = 8\ntemperature = 0.6\n[eval.sets.aime24]\nsamples = 32\n")
    command = ["eval", "model", "--data", "aime24,amc23"]
    for options in ([], ["--recipe", "r.toml"], ["--recipe", "r.toml", "--samples", "2", "--out", "elsewhere"]):
        assert main([*command, *options]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"results: {found[-1][1]}"
    sampled = [[(one.eval.of(n).samples, one.eval.of(n).temperature) for n in ("aime24", "amc23")] for one, _ in found]
    assert sampled == [[(1, 0.0)] * 2, [(32, 0.6), (8, 0.6)], [(32, 0.6), (2, 0.6)]]
    assert [str(out) for _, out in found] == ["model/eval", "model/eval", "elsewhere"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen2 of random weights, sharpened so that greedy decoding has no near ties."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = build_arithmetic_tokenizer()
    tokenizer.save_pretrained(directory)
    models.save_model(
        directory,
        scale=9.0,
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return directory


@pytest.mark.process
def test_greedy_evaluation_says_what_transformers_generates(checkpoint: Path, tmp_path: Path) -> None:
    sums = tmp_path / "sums.jsonl"
    tokenizer = load_tokenizer(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    expected = {}
    for n in range(24):
        prompt = torch.tensor([tokenizer.encode(f"{n}+{n}=")])
        made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False)
        text = tokenizer.decode(made[0, prompt.shape[1] :], skip_special_tokens=True)
        expected[f"{sums}:{n + 1}"] = text
    rows = [{"problem": f"{n}+{n}=", "answer": str(2 * n)} for n in range(24)]
    sums.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = Recipe.model_validate(
        {
            "model": {"path": checkpoint, "dtype": "float32"},
            "data": {"max_prompt_tokens": 32},
            "rollout": {"max_response_tokens": 6},
            "engine": {"max_running_requests": 64},
        }
    )
    out = tmp_path / "out"
    with forked_engines():
        result = run(recipe, [str(sums)], out)
    first = [json.loads(line) for line in (out / "problems.jsonl").read_text().splitlines()]
    assert {row["problem"]["id"]: row["texts"] for row in first} == {place: [text] for place, text in expected.items()}
    assert result.sets[0].problems == len(first) == 24
    assert result.sets[0].tokens == sum(row["tokens"][0] for row in first)

    assert run(recipe, [str(sums)], out).sets == result.sets  # nothing is left to do: no engine starts
