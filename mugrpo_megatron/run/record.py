"""The record of a run, by which files are recognised as its own: it decides which files a run may replace.

    run.json        {"id": ..., "branch": null, "model": null, "weights": ...}, with a checksum; the first file of a run
    hf/mugrpo.json  {"run": ..., "cursor": ...}: the run that wrote hf/, and the update that its weights are from

The run's stages, checkpoints and hf/ all have its id.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import read_checksummed_json, write_checksummed_json
from mugrpo_megatron.files.json_text import read_json

FILE_NAME = "run.json"
PROVENANCE = "mugrpo.json"
"""The file in hf/ that names the run that wrote it."""
ADAPTER = "adapter"
"""The directory in hf/ that holds the adapter, if the run trains one."""
RUN_FILES = (
    "recipe.toml",
    "branch.json",
    "metrics.jsonl",
    "summary.json",
    "hf",
    "stages",
    "checkpoints",
    "proximal",
    "probe",
    "ref",
    "auxiliary",
)
"""Files that a run replaces or continues. A directory that has one of them but no record is refused as `run.dir`."""


@dataclass(frozen=True, slots=True)
class Branch:
    """The stage of another run at whose start a branch begins."""

    run: str
    """Directory of the other run, resolved; the command that made the branch must name the same one when it is
    repeated."""
    stage: int
    id: str
    """Id of the run that generated the stage's responses and saved the weights at its start."""


@dataclass(frozen=True, slots=True)
class HubModel:
    name: str
    """Name of the model on the hub, `owner/name`."""
    commit: str


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The identity of the run in a run directory."""

    id: str
    """Id of the run: 16 random hexadecimal digits."""
    branch: Branch | None = None
    model: HubModel | None = None
    """The hub's model that the run starts from; None for a directory."""
    weights: str = ""
    """The `weights_fingerprint` of the model directory that the run starts from; empty for a model of the hub, and in
    old runs."""

    def run_of_stage(self, stage: int) -> str:
        """The id of the run that generated the stage: another run's for the stage at which a branch begins."""
        return self.branch.id if self.branch and self.branch.stage == stage else self.id


def read_record(run_dir: Path) -> RunRecord | None:
    """Read the record of a run directory; None if the directory has none, UserError when it is damaged."""
    path = run_dir / FILE_NAME
    if not path.exists():
        return None
    try:
        body = read_checksummed_json(path, "run")
        branch, model = body["branch"], body.get("model")
        origin = Branch(**branch) if branch else None, HubModel(**model) if model else None
        return RunRecord(body["id"], *origin, body.get("weights", ""))
    except (OSError, ValueError, TypeError, KeyError):
        raise UserError(
            f"{path}: damaged or unreadable, so this run cannot be identified; restore it from a copy"
        ) from None


def write_record(run_dir: Path, record: RunRecord) -> None:
    """Write the record of a run directory; readers see the old record or the new one, never a part."""
    write_checksummed_json(run_dir / FILE_NAME, "run", asdict(record))


def claim(run_dir: Path, model: HubModel | None = None, weights: str = "") -> RunRecord:
    """Return the directory's record, or write one for a new run. The caller holds the directory's lock.

    A new run starts from `model` of the hub, or from a directory whose `weights_fingerprint` is `weights`. Raises
    UserError when a run may not use `run_dir` (`check_run_dir`).
    """
    record = check_run_dir(run_dir)
    if record is None:
        record = RunRecord(secrets.token_hex(8), model=model, weights=weights)
        write_record(run_dir, record)
    return record


def check_run_dir(run_dir: Path) -> RunRecord | None:
    """Check that a run may use `run_dir`; returns the record of the run in it, or None if there is no run yet.

    Raises UserError when `run_dir` is no directory or cannot be used, and when its record is damaged. Without a record
    it is also raised when the directory has a run's files, or is the current, home or root directory.
    """
    try:
        if not stat.S_ISDIR(run_dir.stat().st_mode):
            raise UserError(f"run.dir = {run_dir} is not a directory; choose another")
    except FileNotFoundError:
        if run_dir.is_symlink():
            raise UserError(f"run.dir = {run_dir} is a broken link; choose another directory") from None
    except OSError as error:
        raise UserError(f"run.dir = {run_dir} cannot be used ({error.strerror}); choose another") from None
    if record := read_record(run_dir):
        return record
    path = _real(run_dir)
    if path.parent == path or path in (Path.cwd(), Path.home()):
        raise UserError(
            f"run.dir = {run_dir} is {path}, which holds more than a run; name a directory that only this run uses, "
            "such as runs/first"
        )
    for path in (run_dir / name for name in RUN_FILES):
        if path.is_symlink() or path.is_file() or (path.is_dir() and any(path.iterdir())):
            raise UserError(
                f"{path} exists, but {run_dir} has no {FILE_NAME}, so this run did not write it; choose another "
                f"run.dir, or restore {FILE_NAME} from a copy"
            )
    return None


def check_model_path(model: Path, hf: Path) -> None:
    """Raise UserError when the model that a run starts from is in `hf`, where the run writes its own."""
    if _real(model).is_relative_to(_real(hf)):
        raise UserError(
            f"model.path = {model} is where this run would write its own checkpoint ({hf}); choose another run.dir"
        )


def check_hf(hf: Path, record: RunRecord | None) -> None:
    """Raise UserError unless the run may write `hf`: nothing is there, or a directory that this run wrote and that has
    no other folder than ADAPTER."""
    if not os.path.lexists(hf):
        return
    if hf.is_symlink() or not hf.is_dir():
        kind = "a symbolic link" if hf.is_symlink() else "not a directory"
        raise UserError(f"{hf} is {kind}, and the run writes a directory there; move it away")
    try:
        run = read_json(hf / PROVENANCE).get("run")
    except UserError:
        run = None
    if record is None or run != record.id:
        raise UserError(f"{hf} was not written by this run; move it away, or choose another run.dir")
    # People keep results in hf/, such as hf/eval. They would be lost, because the whole directory is replaced.
    if foreign := sorted(path.name for path in hf.iterdir() if path.is_dir() and path.name != ADAPTER):
        raise UserError(f"{hf / foreign[0]} was not written by this run, which replaces {hf}; move it elsewhere")


def provenance(record: RunRecord, cursor: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The content of hf/mugrpo.json: the run, the hub's model if it started from one, and, if given, the weights'
    `cursor`."""
    from_hub = {"model": asdict(record.model)} if record.model else {}
    return {"run": record.id, **from_hub} | ({"cursor": dict(cursor)} if cursor else {})


def _real(path: Path) -> Path:
    # `Path.resolve` raises where links form a loop.
    return Path(os.path.realpath(path))
