"""Two nodes on one machine: network namespaces with their own addresses, or plain processes without namespaces."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

TORCHRUN = str(Path(__file__).parents[2] / "run_scripts" / "torchrun.sh")


@dataclass(frozen=True)
class Cluster:
    """Two nodes."""

    inside: tuple[Sequence[str], Sequence[str]]
    """Prefix of a command for each node, so that it runs there."""
    master: str
    interface: str
    namespaces: tuple[str, str] | None

    def start(self, node: int, ranks: int, logs: Path, *command: str) -> subprocess.Popen[bytes]:
        """Run a mugrpo command on `ranks` ranks of a node in a new session, with a log for each rank in `logs`."""
        logs.mkdir(parents=True, exist_ok=True)
        where = ["--nodes", "2", "--node", str(node), "--master", self.master, "--interface", self.interface]
        launch = [TORCHRUN, *where, "--logs", str(logs / f"node-{node}"), str(ranks), *command]
        with (logs / f"node-{node}.log").open("wb") as output:
            return subprocess.Popen([*self.inside[node], *launch], stdout=output, stderr=output, start_new_session=True)

    def disconnect(self, node: int, torchrun: subprocess.Popen[bytes]) -> None:
        """Take a node's link down; without namespaces, kill everything that `torchrun` started on the node."""
        if self.namespaces:
            _ip("-n", self.namespaces[node], "link", "set", "eth0", "down")
            return
        kill(torchrun)

    def reconnect(self, node: int) -> None:
        """Take a node's link up."""
        if self.namespaces:
            _ip("-n", self.namespaces[node], "link", "set", "eth0", "up")


def kill(torchrun: subprocess.Popen[bytes]) -> None:
    """Kill a node's torchrun and everything that it started."""
    with suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(torchrun.pid)
        for process in [launcher, *launcher.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)


@contextmanager
def two_nodes() -> Iterator[Cluster]:
    """Two namespaces with a link between them; without the right to make them, two names for this machine."""
    names = (f"mugrpo-{os.getpid()}-0", f"mugrpo-{os.getpid()}-1")
    try:
        try:
            _join(names)
        except (OSError, subprocess.CalledProcessError):
            yield Cluster(((), ()), f"127.0.0.1:{_free_port()}", "lo", None)
            return
        inside = (("ip", "netns", "exec", names[0]), ("ip", "netns", "exec", names[1]))
        yield Cluster(inside, "10.77.0.1:29500", "eth0", names)
    finally:
        for name in names:
            with suppress(OSError):
                subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)


def _join(names: tuple[str, str]) -> None:
    for name in names:
        _ip("netns", "add", name)
    _ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
    for node, name in enumerate(names):
        _ip("-n", name, "addr", "add", f"10.77.0.{node + 1}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "link", "set", "lo", "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
