"""The run's record: its id, which its stages, checkpoints and hf/ carry, and what a run directory must not hold.

    run.json     {"id": ..., "branch": null, "model": null, "weights": ...}, with a checksum; written before all else

`model` is the hub's model that the run starts from, with its commit, or null for a directory, of whose weights
`weights` is the fingerprint. Only these rules decide what a run may replace.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mugrpo_megatron.errors import RewardFailure, UserError
from mugrpo_megatron.files.durable import read_checksummed_json, write_checksummed_json
from mugrpo_megatron.files.hub import download_model, model_name
from mugrpo_megatron.files.json_text import read_json
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.functions import source_sum
from mugrpo_megatron.weights.families import fingerprint

FILE_NAME = "run.json"
MARK = "mugrpo.json"
"""The file in hf/ that names the run that wrote it."""
ADAPTER = "adapter"
"""The directory in hf/ of an adapter that the run has trained."""
OF_A_RUN = (
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
"""What a directory without a record must not hold: a run would replace it or continue it."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Where a run began, if it is a branch: at the start of a stage of another run."""

    run: str
    """The other run's directory, for people to read."""
    stage: int
    id: str
    """The run that generated the stage's responses and saved the weights at its start."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the Hugging Face hub."""

    name: str
    """`owner/name`."""
    commit: str


@dataclass(frozen=True, slots=True)
class Record:
    """Which run a run directory holds."""

    id: str
    """Random, 16 hexadecimal digits."""
    branch: Branch | None = None
    model: HubModel | None = None
    """What the run starts from, unless it is a directory."""
    weights: str = ""
    """Fingerprint of the weights in the directory that the run starts from; empty for a hub's model and in old runs."""

    def run_of_stage(self, stage: int) -> str:
        """The id of the run that generated the stage: this one, but for the stage at which a branch began."""
        return self.branch.id if self.branch and self.branch.stage == stage else self.id


def read_record(run_dir: Path) -> Record | None:
    """The record of a run directory, None without one; UserError when it is damaged."""
    path = run_dir / FILE_NAME
    if not path.exists():
        return None
    try:
        body = read_checksummed_json(path, "run")
        branch, model = body["branch"], body.get("model")
        origin = Branch(**branch) if branch else None, HubModel(**model) if model else None
        return Record(body["id"], *origin, body.get("weights", ""))
    except (OSError, ValueError, TypeError, KeyError):
        raise UserError(f"{path}: damaged, so this run cannot be identified; restore the file from a copy") from None


def write_record(run_dir: Path, record: Record) -> None:
    """Write the record of a run directory, atomically."""
    write_checksummed_json(run_dir / FILE_NAME, "run", asdict(record))


def claim(run_dir: Path, model: HubModel | None = None, weights: str = "") -> Record:
    """The directory's record, written now for a new run; call it with the directory's lock. Errors of `check_own`.

    A new run starts from `model`, if it is one of the hub, else from a directory whose fingerprint is `weights`.
    """
    check_own(run_dir)
    record = read_record(run_dir)
    if record is None:
        record = Record(secrets.token_hex(8), model=model, weights=weights)
        write_record(run_dir, record)
    return record


def check_own(run_dir: Path) -> None:
    """Raise UserError when `run_dir` cannot be a run's: no directory of its own, or one with another's files."""
    whole = _real(run_dir)
    try:
        if not stat.S_ISDIR(run_dir.stat().st_mode):
            raise UserError(f"run.dir = {run_dir} is not a directory; choose another")
    except FileNotFoundError:
        if run_dir.is_symlink():
            raise UserError(f"run.dir = {run_dir} is a broken link; choose another") from None
    except OSError as error:
        raise UserError(f"run.dir = {run_dir} cannot be used ({error.strerror}); choose another") from None
    if read_record(run_dir) is not None:
        return
    if whole.parent == whole or whole in (Path.cwd(), Path.home()):
        raise UserError(f"run.dir = {run_dir} is {whole}; name a directory that only this run uses, as runs/first")
    for path in (run_dir / name for name in OF_A_RUN):
        if path.is_symlink() or path.is_file() or (path.is_dir() and any(path.iterdir())):
            raise UserError(
                f"{path} exists, but {run_dir} has no {FILE_NAME}, so this run did not write it; choose another "
                f"run.dir, or restore {FILE_NAME} from a copy"
            )


def check_model(run_dir: Path, model: Path) -> None:
    """Raise UserError when the checkpoint that a run starts from lies where the run writes its own."""
    hf = run_dir / "hf"
    if _real(model).is_relative_to(_real(hf)):
        raise UserError(
            f"model.path = {model} is where this run would write its own checkpoint ({hf}); choose another run.dir"
        )


def check_hf(run_dir: Path) -> None:
    """Raise UserError unless the run may replace its `hf`: nothing, or a directory that bears the run's mark.

    Besides files it holds a trained adapter's directory; another one is someone else's.
    """
    hf = run_dir / "hf"
    if not os.path.lexists(hf):
        return
    if hf.is_symlink() or not hf.is_dir():
        kind = "a symbolic link" if hf.is_symlink() else "not a directory"
        raise UserError(f"{hf} is {kind}, and the run writes a directory there; move it away")
    record = read_record(run_dir)
    if record is None or _marked(hf) != record.id:
        raise UserError(f"{hf} was not written by this run; move it away, or choose another run.dir")
    if foreign := sorted(path.name for path in hf.iterdir() if path.is_dir() and path.name != ADAPTER):
        raise UserError(f"{hf / foreign[0]} was not written by this run, which replaces {hf}; move it elsewhere")


def mark(record: Record, cursor: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The content of `MARK`: the run, the model of the hub that it started from, and the cursor of these weights."""
    from_hub = {"model": asdict(record.model)} if record.model else {}
    return {"run": record.id, **from_hub} | ({"cursor": dict(cursor)} if cursor else {})


def _real(path: Path) -> Path:
    """The path without links; unlike `Path.resolve` also where they form a loop."""
    return Path(os.path.realpath(path))


def _marked(hf: Path) -> object:
    """The id of the run that wrote an `hf`; None where none is named."""
    try:
        return read_json(hf / MARK).get("run")
    except UserError:
        return None


def with_model(recipe: Recipe, say: Callable[[str], None] = lambda line: None, run_dir: Path | None = None) -> Recipe:
    """The recipe with its model on this machine; one that names a directory is returned as it is.

    A run in `run_dir` gets the commit that it began with, also when its revision, a branch, has moved since. Raises
    UserError when the model cannot be downloaded.
    """
    name = model_name(recipe.model.path)
    if name is None or recipe.model.commit:
        return recipe
    say(f"model: {name} of the Hugging Face hub, downloaded unless it is in the cache")
    return _placed(recipe, name, run_dir, cached=False)


def with_cached_model(recipe: Recipe, run_dir: Path | None = None) -> Recipe:
    """The recipe with its model, when it is in the hub's cache; nothing is downloaded."""
    name = model_name(recipe.model.path)
    if name is None or recipe.model.commit:
        return recipe
    try:
        return _placed(recipe, name, run_dir, cached=True)
    except UserError:
        return recipe


def hub_model(recipe: Recipe) -> HubModel | None:
    """The name and the commit of a recipe's model of the hub, once it is on this machine."""
    commit = recipe.model.commit
    return HubModel(str(recipe.model.path), commit) if commit else None


def begun_weights(recipe: Recipe) -> str:
    """The fingerprint of the recipe's weights, if they are in a directory; empty for a model of the hub."""
    return "" if recipe.model.commit else fingerprint(recipe.model.directory)


def check_begun(record: Record, recipe: Recipe, what: str) -> None:
    """Raise UserError when `model.path` holds other weights than when the run began, from which `what` is."""
    if record.weights and record.weights != begun_weights(recipe):
        raise UserError(
            f"{what} used other weights than {recipe.model.path} holds now; restore the original weights, or choose "
            "another run.dir"
        )


def _placed(recipe: Recipe, name: str, run_dir: Path | None, cached: bool) -> Recipe:
    record = read_record(run_dir) if run_dir else None
    first = record.model if record else None
    revision = first.commit if first and first.name == name else recipe.model.revision
    snapshot = download_model(name, revision, cached)
    return recipe.model_copy(update={"model": recipe.model.at(snapshot)})


USER_FILES = "user_files.json"


def user_files(recipe: Recipe) -> dict[str, str]:
    """The recipe's keys that name a file of the user's -> SHA-256; without those that are not on this machine."""
    rewards = {
        f"reward.functions.{name}" if recipe.reward.functions else "reward.function": one.function
        for name, one in recipe.reward.table.items()
    }
    objective = recipe.objective
    named = {
        **rewards,
        "objective.surrogate": objective.surrogate,
        "objective.diagnostics": objective.diagnostics or "",
        "rollout.function": recipe.rollout.function or "",
    }
    sums = {key: source_sum(name) for key, name in named.items()}
    sums["data.chat_template"] = file_sum(recipe.data.chat_template)
    for name, judge in recipe.reward.judges.items():
        sums[f"reward.functions.{name}.prompt"] = file_sum(judge.prompt)
        sums[f"reward.functions.{name}.parse"] = source_sum(judge.parse or "")
    return {key: digest for key, digest in sums.items() if digest}


def file_sum(path: Path | None) -> str:
    """SHA-256 of a file; empty without one, and for one that cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path else ""
    except (OSError, ValueError):
        return ""


def check_user_files(recipe: Recipe) -> None:
    """Raise UserError when a file of the run in `run.dir`, if there is one, was edited since the run began.

    A reward function's file may be edited as long as it has scored nothing, and after it ended the run
    (`editable_after_failure`).
    """
    path = recipe.run.dir / USER_FILES
    if not path.exists():  # also of a run that began before there was such a record
        return
    accept = f"remove {path} to continue with the files as they are now"
    try:
        before: dict[str, str] = read_checksummed_json(path, "files")
        now = user_files(recipe)
        edited = [key for key in sorted(before.keys() & now.keys()) if before[key] != now[key]]
        if not _has_scores(recipe.run.dir):
            edited = [key for key in edited if not key.startswith("reward.")]
    except (OSError, ValueError, AttributeError, TypeError):
        raise UserError(f"{path}: damaged, so your own files cannot be checked; {accept}") from None
    if edited:
        raise UserError(
            f"{' and '.join(edited)} names a file that was edited since {recipe.run.dir} began; restore it, "
            f"begin a new run or a branch with another run.dir, or {accept}"
        )


def record_user_files(recipe: Recipe) -> None:
    """`check_user_files`, and write the checksums of files without one; call it with the directory's lock."""
    check_user_files(recipe)
    path = recipe.run.dir / USER_FILES
    before: dict[str, str] = read_checksummed_json(path, "files") if path.exists() else {}
    now = user_files(recipe)
    if not path.exists() or any(before.get(key) != digest for key, digest in now.items()):
        write_checksummed_json(path, "files", {**before, **now})


@contextmanager
def editable_after_failure(run_dir: Path) -> Iterator[None]:
    """When a reward function ends the block, forget the checksum of its file: its author has to edit it."""
    path = run_dir / USER_FILES
    try:
        yield
    except RewardFailure as failure:
        if path.exists():
            before: dict[str, str] = read_checksummed_json(path, "files")
            write_checksummed_json(path, "files", {key: digest for key, digest in before.items() if key != failure.key})
        raise


def _has_scores(run_dir: Path) -> bool:
    """Whether the run has scored responses: groups of a stage, or an evaluation."""
    return any(run_dir.glob("stages/*/*.parquet")) or any(run_dir.glob("evaluations/*"))
