"""A run directory that anything may have happened to: one sentence, or the run as it was; and nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.report.details import Details
from mugrpo_megatron.report.page import write_report
from tests.hostile.outcome import sentence
from tests.hostile.rundir import content, make, resume

FILES = [
    "run.json",
    "data.json",
    "user_files.json",
    "recipe.toml",
    "metrics.jsonl",
    "summary.json",
    ".lock",
    "hf/mugrpo.json",
    "stages/00001/manifest.json",
    "stages/00001/stage.parquet",
    "stages/00001/behaviour.parquet",
    "stages/00001/behaviour.json",
    "stages/00002/manifest.json",
    "stages/00002/shard-00000.parquet",
    "checkpoints/stage00001-age00001/state.json",
    "checkpoints/stage00001-age00001/.metadata",
    "checkpoints/stage00001-age00001/__0_0.distcp",
]
FLIPS = 5
JUNK = [b"", b"\0" * 64, b"[" * 100_000, b"{}", b"null", b'{"updates": "\\ud800"}']


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, str]:
    """A run directory, to be changed and put back, and what a resumed run reads of it."""
    made = make(tmp_path_factory.mktemp("runs") / "run")
    digest, found = resume(made)
    assert found == []
    return made, digest


@contextmanager
def holding(path: Path, other: bytes) -> Iterator[None]:
    """The file holds `other` while the block runs."""
    data = path.read_bytes()
    path.write_bytes(other)
    try:
        yield
    finally:
        path.write_bytes(data)


def mutations(data: bytes, draw: random.Random, flips: int = FLIPS) -> Iterator[bytes]:
    """Flipped bits, torn and extended files, and other text in its place."""
    for place in draw.sample(range(len(data)), min(flips, len(data))):
        yield data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :]
    yield data[: draw.randrange(len(data) or 1)]
    yield data + data
    yield from JUNK


@pytest.mark.parametrize("flips", [FLIPS, pytest.param(400, marks=pytest.mark.night)])
@pytest.mark.parametrize("file", FILES)
def test_any_byte_may_change(file: str, flips: int, whole: tuple[Recipe, str]) -> None:
    """What is read is what was written, or the file is named; everything else stays as it was."""
    made, digest = whole
    path = made.run.dir / file
    data, before = path.read_bytes(), content(made.run.dir)
    outcomes: list[tuple[str, list[str]]] = []
    for mutated in mutations(data, random.Random(file), flips):
        with holding(path, mutated):
            refusal = sentence(lambda: outcomes.append(resume(made)))
        if refusal:
            assert path.name in refusal or str(made.run.dir) in refusal, refusal
        else:
            seen, found = outcomes.pop()
            assert found or seen == digest, f"{mutated[:200]!r} was read as something else"
        assert content(made.run.dir) == before


def test_the_report_names_a_log_that_it_cannot_read(whole: tuple[Recipe, str]) -> None:
    made, _ = whole
    path = made.run.dir / "metrics.jsonl"
    data = path.read_bytes()
    for mutated in mutations(data, random.Random(0)):
        with holding(path, mutated):
            refusal = sentence(lambda: write_report(made.run.dir))
        assert not refusal or path.name in refusal
    (made.run.dir / "report.html").unlink()


ODD_VALUES = ["null", "[]", '"x"', "1e300", "1" * 400, "NaN"]


def test_a_row_of_the_log_may_have_any_value_anywhere(
    whole: tuple[Recipe, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every kind of row each key is left out or takes an odd value: the report is written, or the line is named."""
    monkeypatch.setattr("mugrpo_megatron.report.page.read_details", lambda *_: Details())  # the same for every log
    made, _ = whole
    path = made.run.dir / "metrics.jsonl"
    data = path.read_bytes()
    rows = {
        "event": '"kind": "event", "time": 2e9, "event": "e", "text": "t"',
        "stage": '"kind": "stage", "time": 2e9, "stage": 0, "reward_mean": 0.5, "generated_tokens": 5',
        "eval": '"kind": "eval", "time": 2e9, "stage": 0, "update": 0, "age": 0, "accuracy/a": 1, "accuracy/mean": 1, '
        '"problems/a": 3, "samples/a": 1, "low/a": 0.5, "high/a": 1',
        "update": '"kind": "update", "time": 2e9, "stage": 1, "update": 3, "age": 1, "loss": 1, "tokens": 1, "ess": 1',
        "phase": '"kind": "phase", "phase": "save", "stage": 0, "start": 2e9, "end": 2.1e9, "tokens": 5',
        "process": '"kind": "process", "time": 2e9, "environment": {}',
    }
    lines = data.count(b"\n") + 1
    for text in rows.values():
        pairs = text.split(", ")
        for place, pair in enumerate(pairs):
            name = pair.split(": ")[0]
            for changed in ([], *([f"{name}: {value}"] for value in ODD_VALUES)):
                line = "{" + ", ".join([*pairs[:place], *changed, *pairs[place + 1 :]]) + "}\n"
                with holding(path, data + line.encode()):
                    refusal = sentence(lambda: write_report(made.run.dir))
                assert not refusal or f"metrics.jsonl:{lines}: not a row" in refusal
    (made.run.dir / "report.html").unlink()
