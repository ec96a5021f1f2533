"""A stage of a real run that servers fill: what the learner agrees to is on disk, what it does not is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mugrpo_megatron.cli import main
from mugrpo_megatron.recipe import load_recipe
from mugrpo_megatron.run.initial_model import weights_fingerprint
from mugrpo_megatron.run.record import claim, read_record
from mugrpo_megatron.stages.store import StageStore
from tests.extras.servers.fake import Fake, Handler, Policy, serving
from tests.forked import started
from tests.ranks import run_ranks
from tests.tiny import mugrpo, rows, write_recipe

ROLLOUT = {"prompts_per_update": 8, "responses_per_prompt": 4, "max_response_tokens": 12, "temperature": 0.8}


@pytest.fixture
def recipe(tmp_path: Path, model: Path) -> Path:
    """A run of one stage of two updates, whose id is known before it begins."""
    schedule = {"stages": 1, "updates_per_stage": 2}
    path = write_recipe(tmp_path / "recipe.toml", model, tmp_path / "run", schedule=schedule, rollout=ROLLOUT)
    (tmp_path / "run").mkdir()
    claim(tmp_path / "run", weights=weights_fingerprint(load_recipe(path).model))
    return path


def served(stack: ExitStack, recipe: Path, dialect: Any = "vllm", updates: int = 0, **how: Any) -> Fake:
    record = read_record(load_recipe(recipe).run.dir)
    assert record
    policy = Policy(how.pop("directory", load_recipe(recipe).model.directory), **how)
    return stack.enter_context(serving(Fake(dialect, policy, name=f"{record.id}-{updates}")))


def generate(recipe: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    return mugrpo("generate", recipe, "--patience", "60", *arguments, code=code)


def groups_on_disk(recipe: Path) -> set[int]:
    return StageStore(load_recipe(recipe).run.dir / "stages" / "00000").verified_groups()


@pytest.mark.process
def test_two_servers_fill_two_shards_and_the_stage_trains(recipe: Path) -> None:
    with ExitStack() as stack:
        fakes = [served(stack, recipe), served(stack, recipe, "sglang")]
        urls = [word for fake in fakes for word in ("--server", fake.url)]
        for shard in ("1/2", "0/2"):
            done = generate(recipe, *urls, "--shard", shard)
            assert f"shard {shard} has all of its 8 groups" in done.stdout
            assert done.stdout.count("--dtype float32") == 2, "servers would load a float32 checkpoint in 16 bits"
        assert min(len(fake.prompts) for fake in fakes) > 0
        generate(recipe, *urls, "--shard", "0/2")
        assert sum(len(fake.prompts) for fake in fakes) == 16, "nothing is asked for twice"
    run = load_recipe(recipe).run.dir
    said = json.loads((run / "stages" / "00000" / "servers-0001.json").read_text())
    assert {figures["dialect"] for figures in said.values()} <= {"vllm", "sglang"}
    assert all(figures["distance_mean"] < 1e-4 for figures in said.values())
    mugrpo("seal", run)
    mugrpo("optimize", recipe)
    [row] = rows(run, "stage")
    assert row["mismatch_max"] < 1e-4
    assert len(StageStore(run / "stages" / "00000").read_update(1)) == 32


def halved(model: torch.nn.Module) -> None:
    """As a checkpoint of another run."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def quantised(model: torch.nn.Module) -> None:
    """Matrices in fp8, as a server with `--quantization fp8` has them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                scale = parameter.abs().amax() / 448
                parameter.copy_((parameter / scale).to(torch.float8_e4m3fn).float() * scale)


def shuffled(model: torch.nn.Module) -> None:
    """As a model with another tokenizer: the ids mean other tokens."""
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight  # type: ignore[operator]
        embedding.copy_(embedding.roll(3, 0))


@pytest.mark.process
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"temperature": 0.5}, "temperature 0.5 and not 0.8 fits them"),
        ({"raw": True}, "--logprobs-mode processed_logprobs"),
        ({"top_k": 3}, "draws from a part of the vocabulary"),
        ({"changed": halved}, "weights"),
        ({"changed": quantised}, "quantised weights"),
        ({"changed": shuffled}, "weights"),
    ],
)
def test_a_shard_of_another_policy_is_refused_and_the_run_goes_on(recipe: Path, how: dict[str, Any], why: str) -> None:
    with ExitStack() as stack:
        wrong = served(stack, recipe, **how)
        refused = generate(recipe, "--server", wrong.url, code=2)
        assert why in refused.stderr
        assert not groups_on_disk(recipe)
        right = served(stack, recipe, "sglang")
        generate(recipe, "--server", wrong.url, "--server", right.url)
    assert groups_on_disk(recipe) == set(range(16))


@contextmanager
def following(folder: Path, model: Path, **sections: Any) -> Iterator[tuple[Path, Fake]]:
    """Recipe and server of a run of two stages of two updates; the server loads hf/ when it has changed."""
    run = folder / "run"
    recipe = write_recipe(folder / "recipe.toml", model, run, rollout=ROLLOUT | {"behaviour": "learner"}, **sections)
    run.mkdir()
    name = claim(run, weights=weights_fingerprint(load_recipe(recipe).model)).id
    fake, stop = Fake(answers=Policy(model), name=f"{name}-0"), threading.Event()

    def follow() -> None:
        while not stop.wait(0.05):
            if fake.name.endswith("-0") and (run / "hf" / "mugrpo.json").exists():
                fake.answers, fake.name = Policy(run / "hf"), f"{name}-2"

    follower = threading.Thread(target=follow)
    with serving(fake):
        follower.start()
        try:
            yield recipe, fake
        finally:
            stop.set()
            follower.join()


def check_trained(run: Path) -> None:
    """Server and learner agree in both stages, and the ratios of each begin at exactly 1."""
    assert [row["mismatch_max"] < 1e-4 for row in rows(run, "stage")] == [True, True]
    firsts = [row for row in rows(run, "update") if row["age"] == 0]
    assert {row[name] for row in firsts for name in ("ratio_pos_max", "ratio_neg_min") if name in row} <= {1.0}
    assert [row["staleness"] for row in firsts] == [0, 0]
    assert not list(run.glob("logs/engine*"))


@pytest.mark.process
def test_train_waits_for_each_stages_weights(tmp_path: Path, model: Path) -> None:
    """The learner is the only process."""
    with following(tmp_path, model) as (recipe, fake):
        mugrpo("train", recipe, "--server", fake.url, "--patience", "120")
    check_trained(tmp_path / "run")


def train(recipe: Path, url: str) -> int:
    return main(["train", str(recipe), "--server", url])


@pytest.mark.process
@pytest.mark.night
@pytest.mark.parametrize("parallel", [{}, {"tensor": 2}], ids=["data", "tensor"])
def test_two_ranks_train_with_a_server(tmp_path: Path, model: Path, parallel: dict[str, int]) -> None:
    """The main rank alone asks, and both compute the log-probabilities that it compares."""
    with following(tmp_path, model, parallel=parallel) as (recipe, fake):
        assert run_ranks(2, train, recipe, fake.url) == [0, 0]
    check_trained(tmp_path / "run")
    assert len(fake.prompts) == 2 * 2 * ROLLOUT["prompts_per_update"], "each prompt is asked for once"


@pytest.mark.process
@pytest.mark.parametrize("answered", [1, 5, 9, 13])
def test_a_killed_generator_continues(recipe: Path, answered: int) -> None:
    """Killed by its own server, after some answers: a group is on disk whole, or is asked for again."""
    with ExitStack() as stack:
        fake = served(stack, recipe)
        answers, lock, command = fake.answers, threading.Lock(), stack.enter_context(ExitStack())

        def killing(prompt: list[int], settings: dict[str, Any]) -> Any:
            with lock:
                if len(fake.prompts) == answered:
                    os.kill(running.pid, signal.SIGKILL)
            return answers(prompt, settings)

        fake.answers = killing
        running = command.enter_context(started("generate", recipe, "--server", fake.url))
        assert running.wait() == -signal.SIGKILL
        fake.answers = answers
        generate(recipe, "--server", fake.url)
    assert groups_on_disk(recipe) == set(range(16))


@pytest.mark.process
def test_a_server_that_is_killed_and_started_is_looked_at_again(recipe: Path) -> None:
    """It comes back with other weights under the same name, and nothing of them is taken."""
    with ExitStack() as stack:
        fake = served(stack, recipe)
        honest, other = fake.answers, Policy(load_recipe(recipe).model.directory, changed=halved)

        def answers(prompt: list[int], settings: dict[str, Any]) -> Any:
            return (honest if len(fake.prompts) <= 8 else other)(prompt, settings)

        def instead(handler: Handler) -> bool:
            if len(fake.prompts) != 8 or died.is_set():
                return False
            died.set()
            return handler.die()

        died = threading.Event()
        fake.answers, fake.instead = answers, instead
        refused = generate(recipe, "--server", fake.url, code=2)
        assert "differ from the learner's" in refused.stderr
    assert len(groups_on_disk(recipe)) <= 8
