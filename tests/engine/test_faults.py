"""Engines that die, freeze or fail to start: the cause is named, no process is left, generation continues."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import pytest

from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.process import HostProcess, _shared_memory
from mugrpo_megatron.engine.wire import Sampling
from mugrpo_megatron.errors import EngineFailure, EngineStopped
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.run.engine_spec import engine_spec
from mugrpo_megatron.samples import Prompt
from tests.engine.tiny import group_processes, prompts, save_checkpoint, spec
from tests.engine_server import forked_engines, hosts_of
from tests.forked import fork
from tests.patience import PATIENCE_S
from tests.refusals import refuses

pytestmark = pytest.mark.process

LONG = Sampling(temperature=1.0, top_p=1.0, max_tokens=64, stop_ids=())


@pytest.fixture
def forked() -> Iterator[None]:
    """An engine that starts in a second."""
    with forked_engines():
        yield


@pytest.mark.usefixtures("forked")
def test_an_engine_killed_and_frozen_in_mid_generation(checkpoint: Path, tmp_path: Path) -> None:
    """One engine, two starts: its scheduler is killed, it recovers, and then all its processes are stopped."""
    engine = Engine.start(spec(checkpoint), checkpoint, tmp_path / "engine.log")
    missing = {prompt.index: prompt for prompt in prompts(120)}
    hosts: list[int] = []
    shared: list[set[str]] = []

    def attacked(attack: Callable[[int], None]) -> Iterator[Prompt]:
        for place, prompt in enumerate(list(missing.values())):
            if place == 40:
                hosts.append(_host(engine))
                shared.append(_shared_memory(hosts[-1]))
                attack(hosts[-1])
                # From here on nothing is worth waiting for; before, a busy machine may be silent for long.
                engine._section = engine._section.model_copy(update={"request_timeout_s": 2.0})
            yield prompt

    def generate(attack: Callable[[int], None]) -> None:
        for prompt, responses in engine.generate(attacked(attack), 4, LONG):
            assert len(responses) == 4
            del missing[prompt.index]

    refuses(r"(host process is gone|silent for 2 s) .*during generate", generate, _kill_scheduler, error=EngineFailure)
    assert 40 < len(missing) < 120
    left = len(missing)
    engine._section = engine._section.model_copy(update={"request_timeout_s": PATIENCE_S})
    engine.sleep()
    engine.wake("weights")
    engine.wake("kv_cache")
    refuses(r"silent for 2 s during generate; .*stopped", generate, _freeze, error=EngineFailure)
    assert 0 < len(missing) < left, "it went on with what was missing"
    engine.stop()
    assert len(set(hosts)) == len(hosts)
    assert [group_processes(host) for host in hosts] == [[]] * len(hosts)
    assert all(shared), "SGLang maps files in /dev/shm"
    assert [name for names in shared for name in names if Path(name).exists()] == []


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_frozen_host_that_reads_nothing(cancelled: bool, tmp_path: Path) -> None:
    """More is sent than the socket holds. The host is frozen at its start and loads nothing."""
    host = HostProcess(dict(os.environ), cuda=False)
    os.kill(host._process.pid, signal.SIGSTOP)
    host.load([{}], tmp_path / "engine.log", lambda: cancelled)
    expected = EngineStopped if cancelled else EngineFailure
    with pytest.raises(expected, match=r"asked to stop during" if cancelled else r"read nothing for 1 s .*stopped"):
        host.send(("requests", [b"x" * (16 << 20)]), 600 if cancelled else 1, "generate")
    assert group_processes(host._process.pid) == []


def test_a_wait_ends_when_the_process_on_another_node_has(tmp_path: Path) -> None:
    host = HostProcess(dict(os.environ), cuda=False, single_node=False)
    os.kill(host._process.pid, signal.SIGSTOP)
    host.load([{}], tmp_path / "engine.log", lambda: False, lambda: "on its node 1, that of rank 8: killed")
    with pytest.raises(EngineFailure, match=r"ended during generate, on its node 1, that of rank 8: killed\n"):
        host.receive(PATIENCE_S, "generate")
    assert group_processes(host._process.pid) == []


@pytest.mark.usefixtures("forked")
def test_a_frozen_engine_is_named_with_the_state_of_its_processes(checkpoint: Path, tmp_path: Path) -> None:
    engine = Engine.start(spec(checkpoint, request_timeout_s=0.5), checkpoint, tmp_path / "engine.log")
    host = _host(engine)
    os.killpg(host, signal.SIGSTOP)
    refuses(rf"silent for 1.5 s during start.*\({host}\) stopped", engine.wait_ready, error=EngineFailure)
    assert group_processes(host) == []
    refuses("not running", engine.checksums, error=EngineFailure)


@pytest.mark.usefixtures("forked")
def test_an_engine_that_cannot_load_its_model(tmp_path: Path) -> None:
    broken = save_checkpoint(tmp_path / "broken", seed=0)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    engine = Engine.start(spec(broken), broken, tmp_path / "engine.log")
    host = _host(engine)
    refuses(r"(?s)engine.*end of .*engine\.log.*afetensor", engine.wait_ready, error=EngineFailure)
    assert group_processes(host) == []


def _start_and_wait(recipe: Recipe, folder: Path, real: bool) -> None:
    tempfile.tempdir = str(folder)
    with nullcontext() if real else forked_engines():
        engine = Engine.start(engine_spec(recipe), recipe.model.directory, folder / "engine.log")
    signal.pause()
    engine.stop()


@pytest.mark.parametrize("victim", ["client", "host"])
def test_nothing_outlives_the_client_or_the_host(victim: str, tiny_recipe: Recipe, tmp_path: Path) -> None:
    """The kill comes during the engine's start, when SGLang's children do not yet watch their parent."""
    client = fork(_start_and_wait, tiny_recipe, tmp_path, victim == "client")
    hosts: list[psutil.Process] = []
    while not hosts:  # a process that has just been started may not show its command line yet
        assert client.is_alive()
        hosts = hosts_of(client.pid)
    (host,) = hosts
    members = _members_with_scheduler(host.pid)
    os.kill(client.pid if victim == "client" else host.pid, signal.SIGKILL)
    if victim == "host":
        members.remove(host)  # dead, but in the process table until the client that started it ends
    _, alive = psutil.wait_procs(members, timeout=PATIENCE_S)
    assert alive == []
    client.kill()
    client.join()
    assert list(tmp_path.glob("mugrpo-engine-*")) == []


def _members_with_scheduler(host: int) -> list[psutil.Process]:
    """The group's processes as soon as SGLang has forked its first child, which takes SGLang's name a little later."""
    members: list[psutil.Process] = []
    while not any(_is_forked(process, host) for process in members):
        # Wait a moment for the host to end; it does not.
        psutil.wait_procs([psutil.Process(host)], timeout=0.1)
        members = group_processes(host)
    return members


def _is_forked(process: psutil.Process, host: int) -> bool:
    """Whether it is a child of the host, and not its compiler, which may have ended meanwhile."""
    with suppress(psutil.NoSuchProcess):
        return process.name().startswith(("python", "sglang")) and process.ppid() == host
    return False


def _host(engine: Engine) -> int:
    assert engine._host
    return engine._host._process.pid


def _kill_scheduler(host: int) -> None:
    """One of them: the engine fails with any of its replicas."""
    [*_, last] = [process for process in group_processes(host) if process.name().startswith("sglang::schedul")]
    last.kill()


def _freeze(host: int) -> None:
    os.killpg(host, signal.SIGSTOP)
