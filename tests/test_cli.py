"""The command line as a careless user meets it: one clear sentence, exit code 2, nothing started, nothing written."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from mugrpo_megatron import __version__, cli
from mugrpo_megatron.cli import COMMANDS, EXAMPLES, Command, command_parser, main
from mugrpo_megatron.commands import training
from mugrpo_megatron.data import arithmetic
from mugrpo_megatron.data.prepare import Problems
from mugrpo_megatron.engine import launch
from mugrpo_megatron.extras.sweep import grid as sweep_grid
from mugrpo_megatron.recipe import Recipe, load_recipe
from tests.hostile.outcome import command, dry_run
from tests.tiny import write_recipe


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("engine.tensor=3", "engine.tensor = 3 does not divide the model's 4 attention heads"),
        ("rollout.max_response_tokens=100000", "exceeds the model's 1024 positions"),
        pytest.param(
            "data.max_prompt_tokens=2",
            "prompts of arithmetic are longer than data.max_prompt_tokens",
            marks=pytest.mark.process,  # the tokenizer counts them while the engine's process imports SGLang
        ),
        ("eval.sets.arithmetic.max_tokens=100000", "eval's max_tokens = 100032 exceeds the model's 1024 positions"),
    ],
)
def test_mistakes_in_the_recipe(
    override: str,
    said: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line, code 2, no new process, no run directory."""
    monkeypatch.setattr(arithmetic, "GENERATED", 500)
    recipe = write_recipe(tmp_path / "recipe.toml", model, tmp_path / "run")
    before = set(psutil.Process().children(recursive=True))
    ended = command("train", recipe, "--set", override)
    assert (ended.code, ended.err.count("\n"), ended.err[:8]) == (2, 1, "mugrpo: ")
    assert said in ended.err
    assert set(psutil.Process().children(recursive=True)) <= before
    assert not (tmp_path / "run").exists()


def test_dry_run_prints_the_resolved_recipe_and_starts_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path / "recipe.toml", model, tmp_path / "run")
    assert main(["train", str(recipe), "--set", "objective.name=grpo", "--dry-run"]) == 0
    differs = capsys.readouterr().out
    assert tomllib.loads(differs)["objective"] == {"name": "grpo"}
    (tmp_path / "differs.toml").write_text(differs, encoding="utf-8")
    assert main(["train", str(recipe), "--set", "objective.name=grpo", "--dry-run=full"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "resolved.toml").write_text(printed, encoding="utf-8")
    assert main(["train", str(tmp_path / "differs.toml"), "--dry-run=full"]) == 0
    assert capsys.readouterr().out == printed
    assert "clip_high = 1.2" in printed
    assert printed.count("\n") > 4 * differs.count("\n")
    assert not (tmp_path / "run").exists()
    assert main(["train", str(tmp_path / "resolved.toml"), "--set", "objective.name=mu_grpo", "--dry-run=full"]) == 0
    out, err = capsys.readouterr()
    assert "clip_high = 5.0" in out
    assert "no longer in force: " in err


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_the_overview_has_every_command_examples_and_the_pages(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {command.name for command in COMMANDS} <= {line.split()[0] for line in lines if line.startswith("  ")}
    assert {f"{command.group}:" for command in COMMANDS} <= set(lines)
    examples = lines[lines.index("Examples:") + 1 :][:3]
    assert all(line.startswith("  mugrpo ") for line in examples)
    assert Path(lines[-1].removeprefix("Pages: ")).is_file()
    assert max(map(len, lines[:-1])) <= 80


def test_the_examples_are_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for line in EXAMPLES.splitlines():
        words = shlex.split(line.partition("    ")[0])
        assert command_parser(words[1]).parse_args(words[1:]).command.name == words[1]
    assert main(["train", "quickstart.toml", "--dry-run"]) == 0


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_a_commands_help_says_what_it_does(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command.name, "--help"])
    assert ended.value.code == 0
    assert " ".join(capsys.readouterr().out.split()).find(f"{command.help[1:]}.") > 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["trian", "r.toml"], "there is no command `trian`; did you mean `mugrpo train`?"),
        (["r.toml"], "there is no command `r.toml`; did you mean `mugrpo train r.toml`?"),
        (["xyzzy"], "there is no command `xyzzy`; `mugrpo --help` lists all"),
        (["train", "quickstrat.toml"], "quickstrat.toml: no such recipe; did you mean quickstart.toml?"),
        (["train", "one_gpu/42gb.toml"], "one_gpu/42gb.toml: no such recipe; did you mean one_gpu/24gb.toml?"),
    ],
)
def test_a_misspelt_word_is_answered_with_the_right_one(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == f"mugrpo: {sentence}\n"


def test_a_key_without_its_set_is_recognised(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "r.toml", "--set", "a.b=1", "optimizer.lr=1e-4"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said == (
        "mugrpo: unrecognized arguments: optimizer.lr=1e-4; each key needs its own --set: `--set optimizer.lr=1e-4`\n"
    )


def test_a_bundled_recipe_has_a_short_name_and_one_of_the_user_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bundled = load_recipe(Path("one_gpu/24gb.toml"))
    assert bundled == load_recipe(Path("run_scripts/recipes/one_gpu/24gb.toml")) != Recipe()
    Path("mine.toml").write_text('base = "one_gpu/24gb.toml"\n')
    assert load_recipe(Path("mine.toml")) == bundled
    Path("quickstart.toml").write_text("[run]\nseed = 5\n")
    assert load_recipe(Path("quickstart.toml")).run.seed == 5


def test_convert_is_a_door_to_the_conversions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "hf_to_megatron", "--hf", str(tmp_path / "a"), "--out", str(tmp_path / "b")]) == 2
    assert capsys.readouterr().err.startswith(f"mugrpo convert hf_to_megatron: {tmp_path / 'a'}")


def test_version_names_the_commit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for commit, ending in (("0123456789ab+", " (commit 0123456789ab+)"), ("", "")):
        monkeypatch.setattr(cli, "commit", lambda commit=commit: commit)
        assert main(["--version"]) == 0
        assert capsys.readouterr().out == f"mugrpo {__version__}{ending}\n"


HEAVY = ("torch", "transformers", "megatron", "sglang", "sympy", "math_verify", "huggingface_hub")


@pytest.mark.process
def test_the_overview_imports_nothing_slow() -> None:
    code = "import sys; import mugrpo_megatron.cli as cli; cli.main([]); print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert not imported & {*HEAVY, "pydantic", "rich", "numpy"}


@pytest.mark.process
def test_mistakes_are_told_before_anything_slow_is_imported(model: Path, tmp_path: Path) -> None:
    """One process meets one mistake after another; what it has imported by then is all that they cost."""
    recipe = str(write_recipe(tmp_path / "good.toml", model, tmp_path / "run"))
    rows, bad, golds = (tmp_path / f"{name}.jsonl" for name in ("rows", "bad", "golds"))
    rows.write_text('{"problem": "1+1=", "answer": "2"}\n', encoding="utf-8")
    bad.write_text('{"problem": "1+1=", "answer": "2"}\n{"problem": "1+2="}\n', encoding="utf-8")
    golds.write_text('{"problem": "1+1=", "answer": "$ $"}\n', encoding="utf-8")
    strange, half = tmp_path / "strange", tmp_path / "half"
    shutil.copytree(model, strange)
    half.mkdir()
    shutil.copy(model / "config.json", half)
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps({**config, "attention_sinks": 4}))
    missing, out = str(tmp_path / "rowz.jsonl"), str(tmp_path / "out")
    alike = f"rowz.jsonl does not exist; did you mean {rows}?"
    extra = "engine.extra.tp_size: this is decided by engine.tensor"
    of_train = {
        "schedule.stagez=3": "not a recipe key",
        "model.path=/nowhere": "no config.json there",
        f"model.path={strange}": "the learner does not build this",
        f"model.path={half}": "holds no *.safetensors weights",
        "parallel.tensor=3": "needs a multiple of 3 ranks",
        "engine.tensor=2": "engine.tensor = 2 does not divide the 1 ranks",
        "data.prompt_style=strange": "data.prompt_style 'strange' is unknown",
        "data.train=gsm8kk": "'gsm8kk' is not a file, a hub name",
        f"data.train={missing}": alike,
        f"data.train={bad}": "bad.jsonl:2: field 'answer' is missing",
        f"data.eval={golds}": "does not verify against itself",
    }
    mistakes = [
        *((["train", recipe, "--set", override], sentence) for override, sentence in of_train.items()),
        (["generate", recipe, "--engine-only", "--set", "engine.extra.tp_size=2"], extra),
        (["generate", recipe, "--engine-only", "--set", f"data.eval={missing}"], alike),
        (["eval", str(model), "--data", str(rows), "--out", out, "--set", "engine.extra.tp_size=2"], extra),
        (["eval", str(model), "--data", missing, "--out", out], alike),
        (["eval", str(model), "--data", str(rows), "--out", out, "--set", "data.prompt_style=strange"], "is unknown"),
        (["sft", recipe, "--set", f"sft.train={missing}"], alike),
        (["import", missing, "--recipe", recipe, "--to", out], alike),
    ]
    code = (
        "import json, sys; from mugrpo_megatron.cli import main\n"
        "assert {main(mistake) for mistake in json.loads(sys.argv[1])} == {2}\n"
        f"print('heavy:', *sorted(set({HEAVY}) & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, json.dumps([words for words, _ in mistakes])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for line, (_, sentence) in zip(done.stderr.splitlines(), mistakes, strict=True):
        assert sentence in line
    assert done.stdout.splitlines()[-1] == "heavy:"
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "out").exists()


def test_a_run_says_what_it_does_before_it_imports_what_trains(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[Any] = []

    def train(recipe: Recipe, problems: Problems | None, host: object) -> None:
        received.append((capsys.readouterr().out, problems))

    training = ModuleType("mugrpo_megatron.train")
    training.train = train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, training.__name__, training)
    monkeypatch.setattr(launch, "prelaunch_host", lambda *_: nullcontext())  # no engine
    monkeypatch.setattr(arithmetic, "GENERATED", 70)
    recipe = write_recipe(tmp_path / "recipe.toml", model, tmp_path / "run")
    assert main(["train", str(recipe)]) == 0
    ((printed, found),) = received
    start, read, layout, data, waits = printed.splitlines()
    assert start == f"mugrpo {__version__}: {recipe} -> {tmp_path / 'run'}"
    assert read == f"model: qwen2, 4 layers, hidden size 32 ({model})"
    assert layout == "layout: every size 1, on 1 rank"
    assert data == "data: 70 training and 16 held-out problems"
    assert waits.startswith("importing torch")
    assert (len(found.train), len(found.held_out), found.notes) == (70, 16, [])
    monkeypatch.setenv("RANK", "1")
    assert main(["train", str(recipe)]) == 0
    assert received[1] == ("", None)  # one rank talks, and one reads


@pytest.mark.parametrize("command", ["generate", "optimize", "sft"])
def test_every_phase_is_checked_first(
    command: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("run.opening", "phases.saves", "commands.sft"):
        name = f"mugrpo_megatron.{part}"
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # importing from it fails
    monkeypatch.setattr(launch, "prelaunch_host", lambda *_: nullcontext())  # no engine
    recipe = write_recipe(tmp_path / "recipe.toml", model, tmp_path / "run")
    wrong = "data.train=/nowhere.jsonl" if command == "sft" else "parallel.tensor=3"
    assert main([command, str(recipe), "--set", wrong]) == 2
    with pytest.raises(ImportError):
        main([command, str(recipe), "--set", f"sft.output={tmp_path / 'warm-start'}"])


def test_a_dry_run_says_what_it_checked_and_what_it_could_not(model: Path, tmp_path: Path) -> None:
    told = partial(dry_run, write_recipe(tmp_path / "recipe.toml", model, tmp_path / "run"))
    *before, prompt, reward = told()
    assert before == [
        f"model: qwen2, 4 layers, hidden size 32 ({model / 'config.json'})",
        "layout: every size 1, on 1 rank",
        "data: 50,000 training and 16 held-out problems",
    ]
    assert re.fullmatch(r"prompt: plain, before it is tokenized: '[-+*0-9]+='", prompt)
    assert re.fullmatch(r"reward: math gives 1 to the gold of \S+ as the response, '.*boxed{-?\d+}' \(equal\)", reward)
    assert told("parallel.tensor=2", "parallel.pipeline=2")[1] == "layout: tensor = 2, pipeline = 2, on 4 ranks"
    model_line, data_line = told("model.path=/nowhere", "data.train=gsm8k, owner/name")
    assert model_line == "model: not on this machine, so neither it nor the layout is checked: /nowhere"
    assert data_line == "data: not on this machine, so not checked: gsm8k, owner/name"
    shape, layout, *_ = told("model.path=models/Qwen3-30B-A3B", "parallel.expert=8", "parallel.context=2")
    assert "48 layers, hidden size 2048, 128 experts (the bundled shape of Qwen3-30B-A3B)" in shape
    assert layout == "layout: context = 2, expert = 8, on 8 ranks"
    assert "does not divide the model's 4 attention heads" in told("parallel.tensor=3", code=2)[-1]
    (tmp_path / "bad.jsonl").write_text("{}\n")
    assert told("data.train=/nowhere.jsonl", code=2)[-1].startswith("/nowhere.jsonl does not exist")
    misspelt = f"data.train={tmp_path / 'bda.jsonl'}"
    assert f"bda.jsonl does not exist; did you mean {tmp_path / 'bad.jsonl'}?" in told(misspelt, code=2)[-1]
    assert "bad.jsonl:1" in told(f"data.train={tmp_path / 'bad.jsonl'}", code=2)[-1]
    assert not (tmp_path / "run").exists()


def test_a_dry_run_renders_the_first_prompt(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"problem": "1+1=", "answer": "2"}\n', encoding="utf-8")
    data = {"train": str(rows), "chat_template": str(template), "question_template": "Box: {question}"}
    recipe = str(write_recipe(tmp_path / "recipe.toml", model, tmp_path / "run", data=data))

    def told(text: str, *overrides: str, code: int = 0) -> str:
        template.write_text(text, encoding="utf-8")
        return [line for line in dry_run(recipe, *overrides, code=code) if not line.startswith("reward: ")][-1]

    asks = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ eos_token if end else 'A' }}"
    assert told(asks) == "prompt: chat, before it is tokenized: '[user]Box: 1+1=A'"
    assert told(asks, "data.template_arguments.end=true").endswith("1+1=<|im_end|>'")
    assert told("a\n{% if %}", code=2).startswith(f"data.chat_template = {template}, line 2: Expected an expression")
    refused = "{{ raise_exception('no such roles') }}"
    assert told(refused, code=2).startswith(f"{rows}:1: the chat template refuses the messages (no such roles)")
    elsewhere = told(refused, "model.path=/nowhere", "data.train=gsm8k", code=2)
    assert elsewhere.startswith("a question: the chat template refuses the messages (no such roles)")
    assert "not on this machine" in told(asks, "model.path=/nowhere", "data.train=gsm8k")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", [["train", "r"], ["generate", "r"], ["optimize", "r"], ["sweep", "runs/r"]])
def test_a_command_that_is_stopped_while_it_starts_ends_with_0(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job script queues a pre-empted job again by that: torch alone takes a minute to import on some file systems."""

    def start(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("the signal was not heard")

    monkeypatch.setattr(training, "with_recipe", start)
    monkeypatch.setattr(sweep_grid, "read_grid", start)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
