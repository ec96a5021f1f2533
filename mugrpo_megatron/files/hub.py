"""Downloads repositories of the Hugging Face hub into the ordinary cache (`HF_HOME`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from mugrpo_megatron.errors import UserError

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
"""Matches the name of a repository on the hub, `owner/name`."""
MODEL_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.jinja", "tokenizer.model")
"""Files of a model's repository that are downloaded: weights, configuration and tokenizer, never code."""
CONFIG_TIMEOUT_S = 10.0


def snapshot(
    repository: str,
    kind: Literal["model", "dataset"],
    revision: str | None,
    files: Sequence[str],
    cached: bool = False,
) -> Path:
    """Returns the directory with a repository's `files` (patterns) at a revision, from the cache or downloaded.

    The directory's name is the commit. A revision that is a full commit needs no network if it is in the cache;
    with `cached` the network is never used. Raises ValueError with the reason if the files cannot be had.
    """
    with _hub_errors_as_value_error(revision):
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            repository,
            repo_type=kind,
            revision=revision,
            allow_patterns=list(files),
            # Files in folders, and those named `consolidated*`, are the same weights in other formats.
            ignore_patterns=["*/*", "consolidated*"] if kind == "model" else None,
            local_files_only=cached,
        )
    return Path(folder)


@contextmanager
def _hub_errors_as_value_error(revision: str | None) -> Iterator[None]:
    """Turn the errors that requests to the hub raise in the block into ValueErrors with the reason."""
    import httpx  # not at the top: the imports take half a second, and most models and data sets are already on disk
    from huggingface_hub import errors as hub

    try:
        yield
    except hub.GatedRepoError:
        raise ValueError("the repository is gated: accept its terms on the hub and set HF_TOKEN") from None
    except hub.RepositoryNotFoundError:
        raise ValueError("no such repository, or HF_TOKEN has no access to it") from None
    except hub.RevisionNotFoundError:
        raise ValueError(f"the repository has no revision {revision!r}") from None
    except (
        hub.HfHubHTTPError,
        hub.HFValidationError,
        hub.LocalEntryNotFoundError,
        hub.OfflineModeIsEnabled,
        httpx.HTTPError,
    ) as error:
        raise ValueError(str(error).strip().partition("\n")[0]) from error


def model_name(path: Path) -> str | None:
    """Returns `owner/name` if a model's path can only be a name on the hub; None if it has another form, or if the path
    or its parent exists here."""
    name = str(path)
    if not REPOSITORY.fullmatch(name) or path.exists() or path.parent.exists():
        return None
    return name


def model_config(name: str, revision: str | None) -> bytes:
    """Returns the bytes of a model's config.json; ValueError with the reason if the hub does not send it."""
    # Not by `snapshot`: a cache in which it has put config.json alone would look as if it held the whole model.
    with _hub_errors_as_value_error(revision):
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        address = hf_hub_url(name, "config.json", revision=revision)
        reply = get_session().get(address, headers=build_hf_headers(), timeout=CONFIG_TIMEOUT_S, follow_redirects=True)
        hf_raise_for_status(reply)
        return reply.content


def download_model(name: str, revision: str | None, cached: bool = False) -> Path:
    """Returns the directory of a hub model, downloaded unless it is in the cache; UserError if it cannot be had.

    With `cached` nothing is downloaded.
    """
    try:
        return snapshot(name, "model", revision, MODEL_FILES, cached)
    except ValueError as error:
        label = f"{name} at {revision}" if revision else name
        raise UserError(
            f"model.path = {label}: there is no such directory, and it could not be downloaded from the "
            f"Hugging Face hub ({error}); check the name and the network, or give the directory of a downloaded model"
        ) from None
