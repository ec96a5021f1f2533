"""A host process that was started before its run: what uses it, what it leaves, what it says when it ends early."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from mugrpo_megatron.engine import ahead
from mugrpo_megatron.engine.ahead import host_ahead
from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.process import HostProcess
from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.recipe import Recipe
from tests.engine.tiny import group_processes


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_there_is_none_where_the_learner_loads_first(tiny_recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "may_find_cuda", lambda: True)
    with host_ahead(tiny_recipe) as host:
        assert host is None


def test_there_is_none_on_a_rank_that_leads_no_engine(tiny_recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    pair = tiny_recipe.model_copy(update={"engine": tiny_recipe.engine.model_copy(update={"tensor": 2})})
    with host_ahead(pair) as host:
        assert host is None


def test_there_is_none_for_an_engine_of_several_nodes(tiny_recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts when all ranks have met."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    pair = tiny_recipe.model_copy(update={"engine": tiny_recipe.engine.model_copy(update={"tensor": 2, "nodes": 2})})
    with host_ahead(pair) as host:
        assert host is None


@pytest.mark.process
def test_the_first_start_of_an_engine_takes_it_and_later_ones_do_not(tiny_recipe: Recipe, tmp_path: Path) -> None:
    recipe = tiny_recipe
    with host_ahead(recipe) as host:
        assert host
        engine = Engine.start(recipe, recipe.model.directory, tmp_path / "engine.log", ahead=host)
        assert engine._host is host
        engine.restart()
        other = engine._host
        assert other
        assert other is not host
        assert group_processes(host.pid) == []
        engine.stop()
        assert group_processes(other.pid) == []


@pytest.mark.process
def test_one_that_nothing_used_is_gone_after_the_block(tiny_recipe: Recipe) -> None:
    with host_ahead(tiny_recipe) as host:
        assert host
        assert psutil.pid_exists(host.pid)
    assert group_processes(host.pid) == []
    assert not psutil.pid_exists(host.pid)
    host.end()


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
