"""Memory that the learner shares with its engine by name, however long the path of TMPDIR is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mugrpo_megatron.files.scratch import SOCKET_PATH
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
