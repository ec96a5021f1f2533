"""What the commands share: exit codes, progress, and what tells whether a source has changed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from checkpoints_convert.output import Output
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.progress import Bar, open_display
from mugrpo_megatron.weights.safetensors_dir import Shard, write_index, write_shard

DTYPES = {"keep": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MEGABYTE = 10**6


def run(name: str, command: Callable[[], None]) -> int:
    """Run a command; returns its exit code: 0 done, 2 for an error in the input, with one sentence on stderr."""
    torch.set_num_threads(1)  # copies and checksums: more threads gain nothing and cost memory
    try:
        command()
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a directory that cannot be read or written, a disk that fails
        print(f"{name}: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted; run the same command again to continue", file=sys.stderr)
        return 130
    return 0


def advance(bar: Bar, done: int) -> None:
    """Set a bar that counts megabytes to `done` bytes."""
    bar.advance(done // MEGABYTE - bar.done)


def fill_hf(
    output: Output, source: str, shards: Sequence[Shard], tensors: Callable[[Shard], Iterator[torch.Tensor]]
) -> None:
    """Write what `output` lacks of the shards of a Hugging Face checkpoint, and their index, with a bar."""
    done = 0
    total = sum(shard.bytes for shard in shards)
    with open_display() as display, display.bar(f"{source} -> Hugging Face", total // MEGABYTE, "MB") as bar:
        for shard in shards:
            if not output.finished(shard.file):
                write_shard(output.directory, shard, tensors(shard))
                output.finish(shard.file)
            advance(bar, done := done + shard.bytes)
        write_index(output.directory, shards)


def fingerprint(directory: Path) -> dict[str, list[int]]:
    """Size and modification time of every file, to tell whether a source has changed since an earlier run."""
    files = sorted(path for path in directory.glob("*") if path.is_file())
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}
