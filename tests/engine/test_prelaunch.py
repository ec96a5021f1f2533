"""A host process that was started before its run: what uses it, what it leaves, what it says when it ends early."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from mugrpo_megatron.engine import launch
from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.launch import prelaunch_host
from mugrpo_megatron.engine.process import HostProcess
from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.engine_spec import engine_spec
from tests.engine.tiny import group_processes


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize(
    ("cuda", "rank", "local_world", "section"),
    [(True, 0, 1, {}), (False, 1, 2, {"tensor": 2}), (False, 0, 1, {"tensor": 2, "nodes": 2})],
    ids=["the learner loads first", "the rank leads no engine", "the engine waits for other nodes"],
)
def test_there_is_none(
    cuda: bool,
    rank: int,
    local_world: int,
    section: dict[str, int],
    tiny_recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "may_find_cuda", lambda: cuda)
    world = {"RANK": rank, "LOCAL_RANK": rank % local_world, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": local_world}
    for name, value in world.items():
        monkeypatch.setenv(name, str(value))
    recipe = tiny_recipe.model_copy(update={"engine": tiny_recipe.engine.model_copy(update=section)})
    with prelaunch_host(recipe.engine, recipe.model.directory) as host:
        assert host is None


@pytest.mark.process
def test_the_first_start_of_an_engine_takes_it_and_later_ones_do_not(tiny_recipe: Recipe, tmp_path: Path) -> None:
    recipe = tiny_recipe
    with prelaunch_host(recipe.engine, recipe.model.directory) as host:
        assert host
        engine = Engine.start(engine_spec(recipe), recipe.model.directory, tmp_path / "engine.log", prelaunched=host)
        assert engine._host is host
        engine.restart()
        other = engine._host
        assert other
        assert other is not host
        assert group_processes(host.pid) == []
        engine.stop()
        assert group_processes(other.pid) == []
    with prelaunch_host(recipe.engine, recipe.model.directory) as unused:
        assert unused
        assert psutil.pid_exists(unused.pid)
    assert group_processes(unused.pid) == []
    assert not psutil.pid_exists(unused.pid)
    unused.end()


@pytest.mark.process
def test_what_it_said_before_it_had_a_log_is_in_the_log(tmp_path: Path) -> None:
    """SGLang cannot be imported, and the process ends before it is told what to load."""
    broken = tmp_path / "broken" / "sglang"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("print('half way'); raise OSError('libnuma is missing')\n", encoding="utf-8")
    host = HostProcess({**os.environ, "PYTHONPATH": str(broken.parent)}, cuda=False)
    host._process.wait()
    log = tmp_path / "logs" / "engine.log"
    host.load([{}], log, lambda: False)
    with pytest.raises(EngineFailure, match=r"OSError: libnuma is missing"):
        host.receive(60, "start")
    assert "half way" in log.read_text(encoding="utf-8")
    assert "Traceback" in log.read_text(encoding="utf-8")
