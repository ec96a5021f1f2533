"""The manifest of a stage: which run and weights it came from, and its complete files with their checksums.

A file counts once a manifest lists it, so a change takes effect when the manifest is replaced. Each process that
generates for the stage (a writer) has its own manifest and its own shards. Sealing replaces all of them by one file and
the manifest of writer 0.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import Span, digest, read_checksummed_json, write_checksummed_json
from mugrpo_megatron.files.json_text import is_file_name, read_json

FORMAT = 4
"""Version of the manifest's format. In version 4 columns got the names `engine_logprobs` and `support_ids`, and the
checksums of texts the name `text_columns`."""
SEALED_NAME = "stage.parquet"
DIGITS = "[0-9]" * 5
"""Glob pattern of the number in a shard's file name."""
OTHER_MANIFESTS = "manifest-*.json"
"""Manifests of all writers except writer 0."""
SHARD_PATTERNS = ("shard-*.parquet", OTHER_MANIFESTS)
"""Patterns of the files that a sealed stage does not need."""
STAGE_NAME = re.compile("[0-9]{5}")
"""Name of a stage's directory in a run."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StageShard:
    """A file with some of the stage's groups, in the order in which they were finished. Sealing removes the file."""

    file: str
    number: int
    groups: list[int]
    """Indices of the groups in the shard, in the order of the file's rows."""
    rows: list[int]
    """Number of responses of each group."""
    span: Span


@dataclass(frozen=True, slots=True)
class SealedFile:
    """The file of a sealed stage: row group k holds the rows of update k, its groups in order."""

    file: str
    updates: int
    prompts_per_update: int
    row_groups: list[Span]
    """[updates]: the bytes of the columns that training reads; they come first in a row group."""
    text_columns: list[Span]
    """[updates]: the bytes of the columns that training does not read."""
    footer: Span
    """All bytes after the last row group. Together with the spans above it covers the file, except the four bytes at
    its start."""
    statistics: dict[str, float]

    @property
    def content(self) -> str:
        """A checksum of the responses, by which columns name the stage that they belong to."""
        # The footer is left out, since pyarrow writes its own version there: a copy that another version wrote holds
        # the same stage.
        spans = (*self.row_groups, *self.text_columns)
        return hashlib.sha256("".join(span.sha256 for span in spans).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Origin:
    """The run and the weights that generated a stage.

    Only that run and its branches may train on the stage. The run begins the stage's updates with these weights; a
    branch may begin them with later weights.
    """

    run: str
    """Id of the run that generated the stage."""
    stage: int
    updates: int
    """Number of optimizer updates after which the learner had the weights that sampled the responses."""


@dataclass(frozen=True, slots=True)
class Manifest:
    shards: list[StageShard]
    sealed: SealedFile | None = None
    origin: Origin | None = None
    """The run and weights that generated the stage; None for a stage that no run generated."""


def manifest_name(writer: int) -> str:
    """The file name of a writer's manifest; writers are numbered from 0."""
    return f"manifest-{writer:04d}.json" if writer else "manifest.json"


def shard_name(writer: int, number: int | str) -> str:
    """File name of a writer's shard; if `number` is a glob pattern, the pattern of the names with such numbers."""
    digits = number if isinstance(number, str) else f"{number:05d}"
    return f"shard-{writer:04d}-{digits}.parquet" if writer else f"shard-{digits}.parquet"


def read_manifest(directory: Path, name: str = manifest_name(0)) -> Manifest:
    """Returns the manifest `name` of a stage; an empty one if the file does not exist. UserError if it is damaged or in
    another version of the format."""
    path = directory / name
    if not path.exists():
        return Manifest([])
    try:
        return _manifest(read_checksummed_json(path, "stage", format=FORMAT))
    except (OSError, ValueError, TypeError, KeyError):
        raise UserError(f"{path}: {_unreadable(path)}, or remove {directory} to generate the stage again") from None


def _unreadable(path: Path) -> str:
    """The damage to a manifest that cannot be read, with a remedy, as a sentence."""
    try:
        version = read_json(path).get("format")
    except UserError:
        version = None
    if isinstance(version, int) and version != FORMAT:
        return (
            f"the stage has format {version}, and this version reads format {FORMAT} alone; finish the run with the "
            "version that began it"
        )
    return "damaged or unreadable, so the stage's contents are unknown; restore it from a copy"


def _manifest(body: Any) -> Manifest:
    shards = [StageShard(**{**shard, "span": _span(shard["span"])}) for shard in body["shards"]]
    sealed = body["sealed"]
    for shard in shards:
        if not _counts(shard.groups + shard.rows) or len(shard.groups) != len(shard.rows):
            raise ValueError("a shard does not have a number of rows for each of its groups")
    if sealed is not None:
        spans = {name: [_span(span) for span in sealed[name]] for name in ("row_groups", "text_columns")}
        sealed = SealedFile(**{**sealed, **spans, "footer": _span(sealed["footer"])})
        if not _counts([sealed.prompts_per_update]) or len({*map(len, spans.values()), sealed.updates}) > 1:
            raise ValueError("the sealed file does not have a row group for each update")
    for file in [*(shard.file for shard in shards), *([sealed.file] if sealed else [])]:
        if not is_file_name(file):
            raise ValueError(f"{file!r} is not the name of a file in the manifest's directory")
    return Manifest(shards, sealed, Origin(**body["origin"]) if body["origin"] else None)


def _span(body: Any) -> Span:
    span = Span(**body)
    if not _counts([span.start, span.end]):
        raise ValueError("the start or the end of a span is not a number of bytes")
    return span


def _counts(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 2**63 for value in values)


def check_stage(directory: Path, origin: Origin | None = None) -> None:
    """Raise UserError when the stage in `directory` has another origin than `origin`, or has files but no manifest.

    If `origin` is None, only the number of the stage is compared, with the directory's name. Call this only while no
    other process seals the stage.
    """
    check_listed(directory, 0)
    for name in [manifest_name(0), *sorted(path.name for path in directory.glob(OTHER_MANIFESTS))]:
        check_origin(directory, read_manifest(directory, name), origin)


def check_listed(directory: Path, writer: int) -> None:
    """Raise UserError when a writer has shards, or a sealed file, but no manifest."""
    # A writer writes an empty manifest before anything else. So a manifest that is missing beside shards was lost, and
    # the shards may be intact.
    manifest = directory / manifest_name(writer)
    if manifest.exists():
        return
    sealed = [] if writer else directory.glob(SEALED_NAME)
    for path in sorted([*directory.glob(shard_name(writer, DIGITS)), *sealed]):
        raise UserError(
            f"{manifest} is missing, so {path.name} cannot be checked; restore it from a copy, or remove {directory} "
            f"to generate the stage again"
        )


def check_origin(directory: Path, manifest: Manifest, origin: Origin | None) -> None:
    """Raise UserError when the manifest of the stage in `directory` names another origin than `origin`.

    If `origin` is None, only the number of the stage is compared, with the directory's name.
    """
    origin_here = manifest.origin
    if origin is None:
        if origin_here and STAGE_NAME.fullmatch(directory.name) and int(directory.name) != origin_here.stage:
            raise UserError(
                f"{directory} holds {_described(origin_here)}; give it its right name, {origin_here.stage:05d}"
            )
        return
    if origin_here == origin or not (origin_here or manifest.shards or manifest.sealed):
        return
    raise UserError(
        f"{directory} holds {_described(origin_here)}, not {_described(origin)}; put the right stage there, or "
        f"remove {directory} to generate it again"
    )


def _described(origin: Origin | None) -> str:
    if origin is None:
        return "a stage that no run generated"
    return f"stage {origin.stage} of run {origin.run}, sampled after {origin.updates} updates"


def other_shards(directory: Path, writer: int) -> list[StageShard]:
    """The shards in the manifests of all writers except `writer`."""
    names = [manifest_name(0), *sorted(path.name for path in directory.glob(OTHER_MANIFESTS))]
    return [shard for n in names if n != manifest_name(writer) for shard in read_manifest(directory, n).shards]


def write_manifest(directory: Path, manifest: Manifest, name: str = manifest_name(0)) -> None:
    write_checksummed_json(directory / name, "stage", asdict(manifest), format=FORMAT)


def stage_identity(content: str) -> dict[str, Any]:
    """The identity of a column that depends on nothing but the stage and the weights that sampled it. `content` is
    `SealedFile.content`."""
    return {"stage": content}


def verify(path: Path, span: Span, remedy: str) -> None:
    """Raise UserError, which ends with `remedy`, unless the bytes of the span in the file have the span's checksum."""
    if not path.exists():
        raise UserError(f"{path}: missing, although its checksum is recorded; {remedy}")
    if digest(path, span.start, span.end) != span:
        raise UserError(
            f"{path}: damaged, since bytes {span.start} to {span.end} do not have the recorded checksum; {remedy}"
        )


def intact(directory: Path, shards: list[StageShard]) -> list[StageShard]:
    """Returns the shards whose bytes have the checksum in the manifest; logs a warning about each other one."""
    intact = []
    for shard in shards:
        try:
            verify(directory / shard.file, shard.span, f"its {len(shard.groups)} groups are generated again")
        except UserError as damage:
            log.warning("%s", damage)
        else:
            intact.append(shard)
    return intact


def parquet_spans(path: Path, first: Collection[str]) -> tuple[list[Span], list[Span], Span]:
    """Compute checksums of a Parquet file: two for each row group, and one for the footer.

    Returns, for each row group, the spans of its columns `first`, which come first in the file; for each row group, the
    spans of its other columns; and the span of the footer.
    """
    metadata = pq.read_metadata(path)
    spans: tuple[list[Span], list[Span]] = [], []
    end = 4  # a Parquet file begins with four magic bytes
    for index in range(metadata.num_row_groups):
        row_group = metadata.row_group(index)
        chunks = [row_group.column(column) for column in range(row_group.num_columns)]
        sizes = [0, 0]
        for chunk in chunks:  # a list column's path goes on after its name: `support_ids.list.element`
            sizes[chunk.path_in_schema.split(".")[0] not in first] += chunk.total_compressed_size
        for column_spans, size in zip(spans, sizes, strict=True):
            column_spans.append(digest(path, end, end + size))
            end += size
    return *spans, digest(path, end)
