"""`mugrpo publish`: writes a sealed stage of a run as a data set, which `mugrpo optimize` can train on."""

from __future__ import annotations

import glob
import os
import shlex
import shutil
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow.parquet as pq

from mugrpo_megatron import __version__
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.exchange.local_paths import hub_name, without_local_paths
from mugrpo_megatron.files.checkpoint_state import STATE, read_state
from mugrpo_megatron.files.durable import RANDOM_SUFFIX, check_output, durable_directory, write_text
from mugrpo_megatron.files.json_text import file_inside
from mugrpo_megatron.recipe import dump_recipe, load_recipe
from mugrpo_megatron.run.cursor import Cursor, checkpoint_name
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.run.initial_model import check_initial_weights, with_cached_model
from mugrpo_megatron.run.published import (
    FILE_NAME,
    Published,
    have_logprobs,
    read_published,
    weight_sums,
    write_published,
)
from mugrpo_megatron.run.record import read_record
from mugrpo_megatron.stages.manifest import check_stage, manifest_name, read_manifest
from mugrpo_megatron.stages.routes import route_column
from mugrpo_megatron.stages.store import StageStore

CARD = "README.md"


def publish(
    run_dir: Path,
    stage: int,
    to: Path,
    weights: bool = False,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Write stage `stage` of the run in `run_dir` as a data set to the directory `to`, which is complete or absent.

    Complete columns of auxiliary models are added. With `weights` the checkpoint at the stage's start is added too;
    stage 0 has none, because it starts from the model. Of the stage and the checkpoint, only files that their own lists
    name are copied. Raises UserError when the stage is not sealed or is damaged, when the checkpoint is missing, when
    one of the files is a link, and when `to` is inside the run. If `to` exists, this is an error too, unless it is a
    published stage without other files and `overwrite` is given.
    """
    run = RunDirectory(run_dir)
    run.check_exists()
    published_before = to.is_dir() and not to.is_symlink() and read_published(to) is not None
    remedy = "--overwrite replaces it" if published_before else "it is not a published stage; choose another path"
    check_output(
        to, f"--to {to}", kind="directory", own=published_before and overwrite, inputs=[run_dir], remedy=remedy
    )
    if run_dir.resolve() in to.resolve().parents:
        raise UserError(f"--to {to} is inside the run {run_dir}; choose another path")
    if published_before:
        _check_replaceable(to)
    source = run.stage(stage)
    check_stage(source)
    store = StageStore(source)
    if not store.sealed:
        raise UserError(f"{run_dir} has no sealed stage {stage}; give --stage a complete stage (they count from 0)")
    origin = read_manifest(source).origin
    if origin is None or origin.stage != stage:
        raise UserError(f"{source}: its manifest does not say that it is stage {stage}; restore the run's own folder")
    start = run.checkpoints / checkpoint_name(Cursor(stage))
    if weights and stage and not start.exists():
        raise UserError(f"{start} is missing, and with it the weights at the start of stage {stage}; omit --weights")
    portable_recipe, hidden = without_local_paths(load_recipe(run.recipe))
    recipe_text = dump_recipe(portable_recipe)
    cached = with_cached_model(load_recipe(run.recipe), run_dir)
    model = cached.model.directory
    published = Published(origin.run, stage, *hub_name(model), weight_sums(model), hidden, have_logprobs(store))
    if record := read_record(run_dir):
        check_initial_weights(record, cached.model, f"{run_dir}: the run")
    say_leftovers(to, say)
    with durable_directory(to, replace=published_before) as partial:
        target = RunDirectory(partial)
        _copy(source, target.stage(stage), _of_stage(source))
        copied = StageStore(target.stage(stage))
        _verify(copied, store)
        if columns := run.auxiliary_files(stage):
            _copy(columns[0].parent, target.path / columns[0].parent.name, [path.name for path in columns])
        if weights and stage:
            _copy(start, target.checkpoints / start.name, _of_checkpoint(start))
        write_text(target.recipe, recipe_text)
        write_published(partial, published)
        write_text(partial / CARD, card(published, recipe_text, copied, weights=weights or not stage))
    say(f"{to}: stage {stage} of run {origin.run}, {int(store.statistics()['responses']):,} responses, see {CARD}")
    if hidden:
        say(f"left out, as places of this machine: {', '.join(hidden)}")
    # The published stage has no tokenizer, so the command names the model.
    look = shlex.join(["mugrpo", "rollouts", str(to), "--set", f"model.path={model}"])
    say(f"the data set holds the sources, rows and responses unchanged; look at it before others do: {look}")


def _verify(copied: StageStore, source: StageStore) -> None:
    """Raise UserError unless the copy is intact; if the source is damaged, the error names the source's file."""
    try:
        copied.verify()
    except UserError:
        source.verify()
        raise


def say_leftovers(to: Path, say: Callable[[str], None]) -> None:
    """Say which unfinished directories are beside `to`: killed commands left them, or a command still writes there."""
    for left in sorted(to.parent.glob(f".{glob.escape(to.name)}.{RANDOM_SUFFIX}.partial")):
        say(f"{left} is of another command that writes {to}, or wrote it and was killed; remove it if none runs")


def _of_stage(directory: Path) -> list[str]:
    """Names of a sealed stage's files: its manifest, its responses, and the experts that the engine chose, if it has
    them."""
    routes = route_column(directory, "rollout", {})
    beside = [path.name for path in (routes.path, routes.index) if os.path.lexists(path)]
    return [manifest_name(0), StageStore(directory).file, *beside]


def _of_checkpoint(directory: Path) -> list[str]:
    return [STATE, *read_state(directory)["files"]]


def _copy(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copy files of a directory into a new directory; UserError for a link and for anything else but a regular file."""
    target.mkdir(parents=True)
    for name in names:
        path = file_inside(source / "its list of files", name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise UserError(
                f"{path} cannot be published ({error.strerror}); it has to be a readable regular file, not a link"
            ) from None
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise UserError(
                    f"{path} cannot be published: it is a directory, a pipe or a device; restore the run's own file"
                )
            with open(target / name, "xb") as copy:
                shutil.copyfileobj(file, copy)


def _check_replaceable(directory: Path) -> None:
    """Raise UserError when a published stage contains a file that `publish` did not write."""
    run = RunDirectory(directory)
    names = {run.recipe.name, FILE_NAME, CARD}
    for parent, listed in ((directory / "stages", _of_stage), (run.checkpoints, _of_checkpoint)):
        for child in parent.iterdir() if parent.is_dir() else ():
            names |= {(child / name).relative_to(directory).as_posix() for name in listed(child)}
    for stage in run.stages():
        names |= {path.relative_to(directory).as_posix() for path in run.auxiliary_files(stage)}
    for folder, folders, files in os.walk(directory):
        links = [name for name in folders if Path(folder, name).is_symlink()]
        empty = [] if folders or files or Path(folder) == directory else ["."]
        for name in [*files, *links, *empty]:
            path = Path(folder, name).relative_to(directory).as_posix()
            if path not in names:
                raise UserError(
                    f"--to {directory}: `mugrpo publish` did not write {path}; move it, or choose another path"
                )


def card(published: Published, recipe: str, store: StageStore, weights: bool) -> str:
    """The data set's README.md, with the hub's header; `recipe` is the recipe's TOML. `weights`: whether the weights
    that sampled the stage are in the data set, or are those of the model that the run began with."""
    path = store.directory / store.file
    name = f"stages/{published.stage:05d}/{store.file}"
    schema = pq.read_schema(path)
    meanings = [
        (f"`{field.name}`", str(field.type), (field.metadata or {}).get(b"meaning", b"").decode()) for field in schema
    ]
    model = f"`{published.model}`" + (f" at revision `{published.revision}`" if published.revision else "")
    facts = [
        ("run, stage", f"`{published.run}`, {published.stage} (from 0)"),
        ("model that the run began with", model),
        *((f"SHA-256 of its `{file}`", f"`{sha}`") for file, sha in published.weights.items()),
        ("SHA-256 of the stage's responses", f"`{store.content}`"),
        ("written by", f"mugrpo_megatron {__version__}"),
    ]
    again = (
        f"mugrpo optimize RECIPE --from THIS_DIRECTORY --stage {published.stage} --set run.dir=runs/again\n"
        if weights
        else ""
    )
    trains = (
        "`RECIPE` is `recipe.toml` with `model.path` set to that model; its objective and optimizer may be others. "
        "The rest has to stay: it is what the responses were made with."
        if weights
        else "The weights that sampled this stage are not in this data set, so it cannot be trained on from its start."
    )
    return f"""---
configs:
- config_name: default
  data_files: {name}
tags:
- mu-grpo
- reinforcement-learning
- rollouts
---

# Rollouts of stage {published.stage}, run {published.run}

All responses of one stage of mu-GRPO (arXiv 2605.17570), with the log-probabilities under the policy that sampled them
and their rewards. A row is a response; the rows of a group share their prompt; row group k of the file is update k.

{_table(("", ""), facts)}
{_table(("statistic", "value"), [(key, f"{value:,.6g}") for key, value in store.statistics().items()])}
## Columns

{_table(("column", "type", "meaning"), meanings)}
## Training on it

{again and f"    {again}"}
{trains}

## Recipe

Paths are cut to their last part, and settings that do not concern the stage are left out.

```toml
{recipe.rstrip()}
```
"""


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table with the header cells `head`. In a cell, `|` is escaped and a line break becomes a space."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |\n" for line in lines
    )


def upload(directory: Path, name: str, public: bool, say: Callable[[str], None] = print) -> None:
    """Upload a published stage to the Hugging Face hub as the data set `name`, private unless `public`.

    A data set of that name is replaced if it is a published stage. Raises UserError if it is not, and when the upload
    fails.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi()
    try:
        if api.repo_exists(name, repo_type="dataset"):
            if not api.file_exists(name, FILE_NAME, repo_type="dataset"):
                raise UserError(f"--hub {name}: exists and is not a published stage; choose another name")
        else:
            api.create_repo(name, repo_type="dataset", private=not public)
        api.upload_folder(repo_id=name, repo_type="dataset", folder_path=directory, delete_patterns="*")
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"--hub {name}: the upload failed ({reason}); the data set is complete in {directory}; remove the "
            "cause (if you are not logged in: `hf auth login`), and run the command again with --overwrite"
        ) from None
    say(f"https://huggingface.co/datasets/{name}")
