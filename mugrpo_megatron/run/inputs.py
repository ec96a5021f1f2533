"""Checksums of a run's problems and of the user's files, by which a resumed run notices that they have changed.

data.json        {"train": {set: SHA-256 of its problems}, "held-out": ...}, with a checksum; paths do not count
user_files.json  {recipe key: SHA-256 of the file that it names}, with a checksum
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mugrpo_megatron.data.prepare import Problems
from mugrpo_megatron.errors import RewardFailure, UserError
from mugrpo_megatron.files.durable import read_checksummed_json, write_checksummed_json
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.functions import source_sum
from mugrpo_megatron.samples import Problem

DATA, USER_FILES = "data.json", "user_files.json"
BODIES = {DATA: ("data", "the run's data"), USER_FILES: ("files", "your own files")}
"""File -> (key under which it has the checksums, what messages call its subject)."""


def problem_sums(problems: Problems) -> dict[str, dict[str, str]]:
    """The checksums of all problems: "train" or "held-out" -> name of a set -> SHA-256 (`sums_by_set`)."""
    return {"train": sums_by_set(problems.train), "held-out": sums_by_set(problems.held_out)}


def check_data(run_dir: Path, problems: Problems) -> None:
    """Raise UserError when the run in `run_dir`, if any, began with other problems."""
    path = run_dir / DATA
    before = _read(path)
    if before is None:
        return
    changed = [
        f"{name} ({split})"
        for split, sums in problem_sums(problems).items()
        for name in sorted(sums.keys() | before.get(split, {}).keys())
        if sums.get(name) != before.get(split, {}).get(name)
    ]
    if changed:
        raise UserError(
            f"{run_dir} began with other problems of {', '.join(changed)}: the file has changed, or the version of "
            f"mugrpo, which chooses problems from it; use what the run began with, or {_accept(path)}"
        )


def record_data(run_dir: Path, problems: Problems) -> None:
    """Write the checksums of a new run's problems; UserError when a run that exists began with other problems.

    The caller holds the directory's lock.
    """
    check_data(run_dir, problems)
    if not (run_dir / DATA).exists():
        _write(run_dir / DATA, problem_sums(problems))


def sums_by_set(problems: Sequence[Problem]) -> dict[str, str]:
    """The checksum of each set: SHA-256 of all that responses and rewards depend on in its problems, in their order."""
    sums: dict[str, hashlib._Hash] = {}
    for problem in problems:
        # The id is left out, because it has the path of the problem's file, and a run may go on after its data set has
        # moved. A message with only a role and a content is summed as their pair, so that runs of earlier versions,
        # which did so, keep their sums.
        messages = [list(m.values()) if m.keys() == {"role", "content"} else m for m in problem.messages]
        fields: list[object] = [problem.question, problem.answer, problem.source, messages]
        if problem.row:
            fields += [problem.gold, problem.data_source, problem.row]
        sums.setdefault(problem.source, hashlib.sha256()).update(f"{json.dumps(fields)}\n".encode())
    return {name: digest.hexdigest() for name, digest in sums.items()}


def user_files(recipe: Recipe) -> dict[str, str]:
    """The checksums of the user's files: recipe key -> SHA-256 of the file; files that cannot be read are left out."""
    objective, table = recipe.objective, bool(recipe.reward.functions)
    functions = {
        **{f"reward.functions.{k}" if table else "reward.function": f.function for k, f in recipe.reward.table.items()},
        "objective.advantage": objective.advantage,
        "objective.surrogate": objective.surrogate,
        "objective.diagnostics": objective.diagnostics or "",
        "rollout.function": recipe.rollout.function or "",
        "rollout.agent": recipe.rollout.agent or "",
    }
    sums = {key: source_sum(function) for key, function in functions.items()}
    sums["data.chat_template"] = file_sum(recipe.data.chat_template)
    for name, judge in recipe.reward.judges.items():
        sums[f"reward.functions.{name}.prompt"] = file_sum(judge.prompt)
        sums[f"reward.functions.{name}.parse"] = source_sum(judge.parse or "")
    return {key: digest for key, digest in sums.items() if digest}


def file_sum(path: Path | None) -> str:
    """The SHA-256 of a file; "" if `path` is None or the file cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path else ""
    except (OSError, ValueError):
        return ""


def check_user_files(recipe: Recipe) -> dict[str, str]:
    """Raise UserError when one of the user's files was edited since the run in `run.dir` began.

    Files that keys of `[reward]` name may be edited until something has been scored, and a reward function also after
    it has ended the run by an error (`editable_after_failure`). Returns the checksums that the run has recorded; empty
    if there is none.
    """
    run_dir, now = recipe.run.dir, user_files(recipe)
    before = _read(run_dir / USER_FILES) or {}  # runs of earlier versions have no such file
    edited = [key for key in sorted(before.keys() & now.keys()) if before[key] != now[key]]
    if not (any(run_dir.glob("stages/*/*.parquet")) or any(run_dir.glob("evaluations/*"))):
        edited = [key for key in edited if not key.startswith("reward.")]
    if edited:
        raise UserError(
            f"{' and '.join(edited)} names a file that was edited since {run_dir} began; restore it, "
            f"begin a new run or a branch with another run.dir, or {_accept(run_dir / USER_FILES)}"
        )
    return before


def record_user_files(recipe: Recipe) -> None:
    """Write the checksums of the user's files; UserError when one was edited although it must not be.

    `check_user_files` says which may be edited. The caller holds the directory's lock.
    """
    path, before = recipe.run.dir / USER_FILES, check_user_files(recipe)
    sums = {**before, **user_files(recipe)}
    if sums != before or not path.exists():
        _write(path, sums)


@contextmanager
def editable_after_failure(run_dir: Path) -> Iterator[None]:
    """Remove the recorded checksum of a reward function whose failure ends the block, since its author has to edit
    it."""
    path = run_dir / USER_FILES
    try:
        yield
    except RewardFailure as failure:
        if sums := _read(path):
            _write(path, {key: digest for key, digest in sums.items() if key != failure.key})
        raise


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    name, subject = BODIES[path.name]
    try:
        return dict(read_checksummed_json(path, name))
    except (OSError, ValueError, TypeError):
        raise UserError(f"{path}: damaged or unreadable, so {subject} cannot be checked; {_accept(path)}") from None


def _write(path: Path, sums: Mapping[str, Any]) -> None:
    write_checksummed_json(path, BODIES[path.name][0], sums)


def _accept(path: Path) -> str:
    kind = "problems" if path.name == DATA else "files"
    return f"remove {path} to continue with the {kind} as they are now"
