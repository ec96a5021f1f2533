"""Memory that the learner shares with its engine by name, however long the path of TMPDIR is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mugrpo_megatron.files.scratch import SHARED_MEMORY, SOCKET_PATH, remove_abandoned
from mugrpo_megatron.weights.sync import MANAGER_SOCKET

SHARE = """
import os
import torch
from mugrpo_megatron.weights.sync import share_memory_by_name
before = os.environ["TMPDIR"]
share_memory_by_name()
assert os.environ["TMPDIR"] == before
names = [torch.full((size,), 1.0).share_memory_().untyped_storage()._share_filename_cpu_()[:2] for size in (3, 5000)]
print(names[0][0].decode())
assert names[0][0] == names[1][0] and names[0][1] != names[1][1]
"""


@pytest.mark.process
@pytest.mark.parametrize("length", [0, SOCKET_PATH - len(MANAGER_SOCKET), SOCKET_PATH - len(MANAGER_SOCKET) + 1, 250])
def test_memory_is_shared_by_name_whatever_the_length_of_tmpdir(length: int, tmp_path: Path) -> None:
    """Where the path allows a socket, torch's manager of shared memory has it in the user's directory."""
    directory = str(tmp_path)
    while len(directory) < length:
        directory += "/" + "d" * max(1, min(50, length - len(directory) - 1))
    os.makedirs(directory, exist_ok=True)
    fits = len(directory) + len(MANAGER_SOCKET) <= SOCKET_PATH
    environment = {**os.environ, "TMPDIR": directory}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SHARE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(directory) == fits
    # The manager has the same standard error, so the pipe ends with it: seconds after the process.
    assert done.stderr == ""
    assert not os.listdir(directory), "it is removed at the end"


BUCKET = """
import signal, torch
from types import SimpleNamespace
from mugrpo_megatron.weights.sync import serialize, share_memory_by_name
share_memory_by_name()
bucket = SimpleNamespace(slots=[SimpleNamespace(name="w", view=lambda flat: flat)])
flats = [torch.zeros(size, dtype=torch.uint8) for size in (1000, 2000)]
for flat in flats * 2:
    serialize(bucket, flat)
print("shared", flush=True)
signal.pause()
"""


@pytest.mark.process
def test_a_start_removes_what_a_process_shared_that_was_killed_with_its_manager(short: Path) -> None:
    """A job scheduler kills all processes at once, so torch's manager removes nothing."""
    environment = {**os.environ, "TMPDIR": str(short)}
    words = [sys.executable, "-W", "ignore", "-c", BUCKET]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == b"shared\n"
            [folder] = short.glob("mugrpo-weights-*")
            assert [path.name for path in short.glob("torch-shm-dir-*/*")] == ["manager.sock"]
            shared = [Path(name) for name in (folder / SHARED_MEMORY).read_text(encoding="utf-8").splitlines()]
            remove_abandoned(short)
            assert [path.stat().st_size > 0 for path in shared] == [True, True], "its owner is alive"
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert all(path.exists() for path in shared)
    remove_abandoned(short)
    assert not any(path.exists() for path in shared)
    assert not list(short.iterdir())
