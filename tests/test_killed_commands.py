"""Commands killed at random moments and run again: their end is the unbroken one's, bit for bit, and nothing is twice.

`test_killed_anywhere` does this to `train`, whose generation no seed repeats on a CPU.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from mugrpo_megatron.extras.lora import convert
from mugrpo_megatron.files.scratch import remove_abandoned
from mugrpo_megatron.observe.log import read_rows
from mugrpo_megatron.stages.store import StageStore
from tests.extras.episodes.test_episodes import TOOLS
from tests.extras.exchange.test_import_rollouts import recipe_file, trl_log
from tests.extras.lora.adapted import write_adapter
from tests.forked import fork, started
from tests.hostile.outcome import listing
from tests.patience import PATIENCE_S
from tests.tiny import COIN, FINISHED, mugrpo, rows, save_model, take_stages, weights, write_recipe, write_run

pytestmark = [pytest.mark.process, pytest.mark.night]

KILLS = 6
"""Of each command."""


def seconds(*command: object) -> float:
    """How long the command takes unbroken, in a process that has imported everything."""
    mugrpo("doctor")
    start = time.monotonic()
    mugrpo(*command)
    return time.monotonic() - start


def killed(command: tuple[object, ...], delay_s: float) -> bool:
    """Start the command and kill all of its processes after `delay_s`; whether it was still alive then."""
    with started(*command) as running:
        if running.wait(delay_s) is not None:
            return False
        family = running.family
    assert psutil.wait_procs(family, timeout=PATIENCE_S)[1] == []
    return True


def killed_in_row(command: tuple[object, ...], log: Path, more: int) -> bool:
    """Start the command and kill it once its log has `more` rows more; whether it was still alive then."""

    def length() -> int:
        return len(read_rows(log)) if log.exists() else 0

    before = length()
    with started(*command) as running:
        while length() < before + more:
            if running.wait(0.02) is not None:
                return False
        family = running.family
    assert psutil.wait_procs(family, timeout=PATIENCE_S)[1] == []
    return True


def killed_often(command: tuple[object, ...], whole_s: float, seed: int) -> None:
    """Kill one run of a command KILLS times, each at a random moment of half its length, so that it goes on a while."""
    draw = random.Random(seed)
    hits = sum(killed(command, draw.uniform(0.0, whole_s / 2)) for _ in range(KILLS))
    print(f"{hits} of {KILLS} kills hit {command[0]}")
    assert hits >= KILLS // 2
    mugrpo(*command)


def updates(run: Path) -> list[int]:
    return [int(row["update"]) for row in rows(run, "update")]


def test_optimize(finished_run: Path, tmp_path: Path) -> None:
    def command(run: Path) -> tuple[object, ...]:
        sets = ["--set", f"run.dir={run}", "--set", "schedule.stages=1"]
        return "optimize", finished_run.parent / "recipe.toml", "--from", finished_run, "--stage", 0, *sets

    whole_s = seconds(*command(tmp_path / "whole"))
    killed_often(command(tmp_path / "run"), whole_s, seed=1)
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    assert sorted(set(updates(tmp_path / "run"))) == list(range(FINISHED["updates_per_stage"]))
    assert not list(tmp_path.rglob("*.partial"))


def test_sweep(finished_run: Path, tmp_path: Path) -> None:
    def command(out: Path) -> tuple[object, ...]:
        return "sweep", finished_run, "--out", out, "--set", "optimizer.lr=1e-3,2e-3"

    whole_s = seconds(*command(tmp_path / "whole"))
    killed_often(command(tmp_path / "sweep"), whole_s, seed=2)
    cells = sorted(path.name for path in (tmp_path / "whole").glob("lr=*"))
    assert sorted(path.name for path in (tmp_path / "sweep").glob("lr=*")) == cells
    for cell in cells:
        assert weights(tmp_path / "sweep" / cell) == weights(tmp_path / "whole" / cell)
        assert sorted(set(updates(tmp_path / "sweep" / cell))) == list(range(FINISHED["updates_per_stage"]))


def test_publish(finished_run: Path, tmp_path: Path) -> None:
    def command(to: Path) -> tuple[object, ...]:
        return "publish", finished_run, "--stage", 1, "--weights", "--to", to

    whole_s = seconds(*command(tmp_path / "whole"))
    whole = listing(tmp_path / "whole")

    def check() -> None:
        if (tmp_path / "set").exists():
            assert listing(tmp_path / "set") == whole
            shutil.rmtree(tmp_path / "set")

    draw = random.Random(3)
    hits = 0
    for _ in range(KILLS):
        hits += killed(command(tmp_path / "set"), draw.uniform(0.0, whole_s))
        check()
    print(f"{hits} of {KILLS} kills hit publish")
    mugrpo(*command(tmp_path / "set"))
    assert listing(tmp_path / "set") == whole


def test_seal(tmp_path: Path) -> None:
    """Two shares of a stage; each kill is of a sealing of its own copy, which is then sealed again."""
    recipe = write_recipe(
        tmp_path / "recipe.toml",
        save_model(tmp_path / "model"),
        tmp_path / "run",
        rollout={"prompts_per_update": 400, "responses_per_prompt": 4, "max_response_tokens": 6},
        reward=COIN,
    )
    for share in range(2):
        mugrpo("generate", recipe, "--engine-only", "--shard", f"{share}/2")
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    whole_s = seconds("seal", tmp_path / "whole")
    content = StageStore(tmp_path / "whole" / "stages" / "00000").content
    draw = random.Random(4)
    hits = 0
    for number in range(KILLS):
        run = Path(shutil.copytree(tmp_path / "run", tmp_path / f"run-{number}"))
        hits += killed(("seal", run), draw.uniform(0.0, whole_s))
        mugrpo("seal", run)
        store = StageStore(run / "stages" / "00000")
        assert store.content == content
        store.verify()
        groups = [sample.group for update in range(store.updates) for sample in store.read_update(update)]
        assert groups == [group for group in range(800) for _ in range(4)]
        assert not list((run / "stages").rglob("shard-*.parquet"))
    print(f"{hits} of {KILLS} kills hit seal")


SECTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "episodes": {
        "rollout": {"function": "tests.extras.episodes.functions:calculator", "max_response_tokens": 24},
        "episodes": {"seconds": 600.0, "max_failure_share": 1.0},
    },
    "teacher": {"objective": {"teacher": "wise", "teacher_coef": 0.1}, "eval": {"every_stages": 0}},
    "lora": {"lora": {"rank": 4}},
    "max_kl": {"schedule": {"max_kl": 1e-4}},
}


@pytest.mark.parametrize("kind", SECTIONS)
def test_train(kind: str, tmp_path: Path) -> None:
    """The end is that of an unbroken run on the same stages, and on the same columns of a teacher."""
    model = save_model(tmp_path / "model")
    teacher = {"auxiliary": {"wise": {"model": str(model)}}} if kind == "teacher" else {}

    def recipe(name: str) -> Path:
        return write_run(tmp_path / name, model, **SECTIONS[kind], **teacher)

    command, draw = ("train", recipe("killed")), random.Random(5)
    log = tmp_path / "killed" / "run" / "metrics.jsonl"
    hits = sum(killed_in_row(command, log, draw.randrange(1, 8)) for _ in range(KILLS))
    print(f"{hits} of {KILLS} kills hit train with {kind}")
    assert hits
    mugrpo(*command)
    run, unbroken = tmp_path / "killed" / "run", tmp_path / "unbroken" / "run"
    command = "train", recipe("unbroken")
    take_stages(run, unbroken)
    if kind == "teacher":
        shutil.copytree(run / "auxiliary", unbroken / "auxiliary")
    mugrpo(*command)
    assert weights(run) == weights(unbroken) != (model / "model.safetensors").read_bytes()
    assert sorted(set(updates(run))) == sorted(set(updates(unbroken)))
    assert not list(run.rglob("*.partial"))


def test_merge(tmp_path: Path) -> None:
    """Of adapters; after a kill the output is absent, and the next merge writes what an unbroken one does."""
    model = save_model(tmp_path / "model")
    write_adapter(tmp_path / "adapter", model)

    def arguments(out: str) -> list[str]:
        return ["merge", "--adapter", *map(str, (tmp_path / "adapter", "--hf", model, "--out", tmp_path / out))]

    start = time.monotonic()
    assert convert.main(arguments("whole")) == 0
    whole_s, draw = time.monotonic() - start, random.Random(6)
    for _ in range(KILLS):
        process = fork(convert.main, arguments("merged"))
        process.join(draw.uniform(0.0, whole_s))
        process.kill()
        process.join()
        if (tmp_path / "merged").exists():
            assert listing(tmp_path / "merged") == listing(tmp_path / "whole")
            shutil.rmtree(tmp_path / "merged")
    assert convert.main(arguments("merged")) == 0
    assert listing(tmp_path / "merged") == listing(tmp_path / "whole")


def test_sft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On rows, and of a new model; what a killed one leaves in the temporary directory, the next start removes."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1?", "response": "yes"}\n' * 64, encoding="utf-8")
    model = save_model(tmp_path / "model")
    kinds: dict[str, dict[str, Any]] = {
        "rows": {"train": str(tmp_path / "rows.jsonl"), "epochs": 4},
        "new": {"target_accuracy": 0.01},
    }
    for kind, sft in kinds.items():

        def command(name: str, kind: str = kind, sft: dict[str, Any] = sft) -> tuple[object, ...]:
            out = tmp_path / f"{kind}-{name}"
            section = {"batch": 8, **sft, "output": str(out)}
            return "sft", write_recipe(tmp_path / f"{kind}-{name}.toml", model, tmp_path / "run", sft=section)

        killed_often(command("killed"), seconds(*command("whole")), seed=7)
        files = [(tmp_path / f"{kind}-{name}" / "hf" / "model.safetensors") for name in ("killed", "whole")]
        assert files[0].read_bytes() == files[1].read_bytes()
        assert not list(tmp_path.rglob("*.partial"))
        assert not list((tmp_path / "tmp").glob("mugrpo-*"))


def test_import(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    log = trl_log(tmp_path / "completions.parquet")

    def command(name: str) -> tuple[object, ...]:
        return "import", log, "--recipe", recipe_file(tmp_path, model), "--to", tmp_path / name, "--reward", "parity"

    whole_s, draw, hits = seconds(*command("whole")), random.Random(8), 0
    for _ in range(KILLS):
        hits += killed(command("stage"), draw.uniform(0.0, whole_s))
        if (tmp_path / "stage").exists():
            shutil.rmtree(tmp_path / "stage")
    print(f"{hits} of {KILLS} kills hit import")
    mugrpo(*command("stage"))
    contents = [StageStore(tmp_path / name / "stages" / "00000").content for name in ("stage", "whole")]
    assert contents[0] == contents[1]


def test_train_with_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No group is lost or twice, no process stays, and no file with rows and golds once another has started."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tools.jinja").write_text(TOOLS, encoding="utf-8")
    data = {"chat_template": str(tmp_path / "tools.jinja"), "prompt_style": "chat", "max_prompt_tokens": 64}
    rollout = {"agent": "tests.extras.episodes.agents:asks_twice", "max_response_tokens": 24}
    sections: dict[str, dict[str, Any]] = {
        "rollout": rollout,
        "data": data,
        "episodes": {"seconds": 600.0, "max_failure_share": 1.0},
    }
    recipe = write_run(tmp_path, save_model(tmp_path / "model"), **sections)
    log, draw = tmp_path / "run" / "metrics.jsonl", random.Random(9)
    hits = sum(killed_in_row(("train", recipe), log, draw.randrange(1, 6)) for _ in range(KILLS))
    print(f"{hits} of {KILLS} kills hit train with programs")
    assert hits
    mugrpo("train", recipe)
    assert sorted(set(updates(tmp_path / "run"))) == list(range(len(set(updates(tmp_path / "run")))))
    remove_abandoned(tmp_path / "tmp")
    assert not list((tmp_path / "tmp").glob("mugrpo-*"))
