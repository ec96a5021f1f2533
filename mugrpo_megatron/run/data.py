"""The fingerprint of a run's problems, by which a resume refuses a data set that has changed.

data.json     for training and held-out sets: name -> SHA-256 of its problems, with a checksum; files may move
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from mugrpo_megatron.data.prepare import Problems
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import read_checksummed_json, write_checksummed_json
from mugrpo_megatron.samples import Problem

FILE_NAME = "data.json"
Fingerprint = dict[str, dict[str, str]]


def fingerprint(problems: Problems) -> Fingerprint:
    """{"train", "held-out"} -> a set's name -> SHA-256 of its problems, with their rows and their order."""
    return {"train": sums_by_set(problems.train), "held-out": sums_by_set(problems.held_out)}


def check_data(run_dir: Path, problems: Problems) -> None:
    """Raise UserError when the run in `run_dir`, if there is one, began with other problems."""
    path = run_dir / FILE_NAME
    if not path.exists():
        return
    accept = f"remove {path} to continue with the problems as they are now"
    try:
        before: Fingerprint = read_checksummed_json(path, "data")
    except (OSError, ValueError):
        raise UserError(f"{path}: damaged, so the run's data cannot be checked; {accept}") from None
    now = fingerprint(problems)
    changed = [
        f"{name} ({part})"
        for part in now
        for name in sorted(now[part].keys() | before[part].keys())
        if now[part].get(name) != before[part].get(name)
    ]
    if changed:
        raise UserError(
            f"{run_dir} began with other problems of {', '.join(changed)}: the file has changed, or the version of "
            f"mugrpo, which chooses problems from it; use what the run began with, or {accept}"
        )


def record_data(run_dir: Path, problems: Problems) -> None:
    """`check_data`, and write the fingerprint of a run that has none; call it with the directory's lock."""
    check_data(run_dir, problems)
    if not (run_dir / FILE_NAME).exists():
        write_checksummed_json(run_dir / FILE_NAME, "data", fingerprint(problems))


def sums_by_set(problems: Sequence[Problem]) -> dict[str, str]:
    """A set's name -> SHA-256 of its problems, with their rows and their order.

    Of all that responses and rewards depend on; not of a problem's id, which has the place of its file in it.
    """
    sums: dict[str, hashlib._Hash] = {}
    for problem in problems:
        own: list[object] = [problem.question, problem.answer, problem.source, problem.messages]
        if problem.row:
            own += [problem.gold, problem.data_source, problem.row]
        sums.setdefault(problem.source, hashlib.sha256()).update(f"{json.dumps(own)}\n".encode())
    return {name: whole.hexdigest() for name, whole in sums.items()}
