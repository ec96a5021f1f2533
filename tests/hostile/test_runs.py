"""A run directory that anything may have happened to: one sentence, or the run as it was; and nothing is lost.

`count` in a test is the number of cases that it tries.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.report.report import write_report
from tests.hostile.rundir import content, make, recipe, resume

FILES = [
    "run.json",
    "data.json",
    "recipe.toml",
    "metrics.jsonl",
    "summary.json",
    ".lock",
    "hf/mugrpo.json",
    "stages/00000/manifest.json",
    "stages/00000/stage.parquet",
    "stages/00001/manifest.json",
    "stages/00001/stage.parquet",
    "stages/00001/behaviour.parquet",
    "stages/00001/behaviour.json",
    "stages/00002/manifest.json",
    "stages/00002/shard-00000.parquet",
    "checkpoints/stage00001-age00001/state.json",
    "checkpoints/stage00001-age00001/.metadata",
    "checkpoints/stage00001-age00001/__0_0.distcp",
    "checkpoints/stage00001-age00000/state.json",
]
FLIPS = 14
JUNK = [
    b"",
    b"\0" * 64,
    b"[" * 100_000,
    b"\xff\xfe{}",
    b"{}",
    b"[]",
    b"null",
    b"1e999",
    b'{"updates": "\\ud800"}',
    b"\n",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, str]:
    """A run directory, to be changed and put back, and what a resumed run reads of it."""
    made = make(tmp_path_factory.mktemp("runs") / "run")
    digest, found = resume(made)
    assert found == []
    return made, digest


def mutations(data: bytes, draw: random.Random) -> Iterator[bytes]:
    """Flipped bits, torn and extended files, and other text in its place."""
    for place in draw.sample(range(len(data)), min(FLIPS, len(data))):
        yield data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :]
    for end in draw.sample(range(len(data)), min(3, len(data))):
        yield data[:end]
    yield data + data
    yield from JUNK


@pytest.mark.parametrize("file", FILES)
def test_any_byte_may_change(file: str, whole: tuple[Recipe, str]) -> None:
    """What is read is what was written, or the file is named; everything else stays as it was."""
    made, digest = whole
    path = made.run.dir / file
    data, before, count = path.read_bytes(), content(made.run.dir), 0
    for mutated in mutations(data, random.Random(file)):
        path.write_bytes(mutated)
        count += 1
        try:
            seen, found = resume(made)
        except UserError as error:
            assert path.name in str(error) or str(made.run.dir) in str(error), str(error)
            assert "\n" not in str(error)
        else:
            assert found or seen == digest, f"{mutated[:200]!r} was read as something else"
        finally:
            path.write_bytes(data)
        assert content(made.run.dir) == before
    assert count > len(JUNK)


@pytest.mark.parametrize("file", ["metrics.jsonl", "recipe.toml", "summary.json"])
def test_the_report_names_what_it_cannot_read(file: str, whole: tuple[Recipe, str]) -> None:
    made, _ = whole
    path = made.run.dir / file
    data = path.read_bytes()
    for mutated in mutations(data, random.Random(file)):
        path.write_bytes(mutated)
        try:
            write_report(made.run.dir)
        except UserError as error:
            assert path.name in str(error)
        finally:
            path.write_bytes(data)
            (made.run.dir / "report.html").unlink(missing_ok=True)


ODD_VALUES = ["null", "{}", "[]", '"x"', "-1", "1e300", "1" * 400, "true", "NaN", "Infinity"]


def test_a_row_of_the_log_may_have_any_value_anywhere(whole: tuple[Recipe, str]) -> None:
    """Of every kind of row each key is left out or takes an odd value: the report is written, or the line is named."""
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
    count = 0
    for text in rows.values():
        pairs = text.split(", ")
        for place, pair in enumerate(pairs):
            name = pair.split(": ")[0]
            for changed in ([], *([f"{name}: {value}"] for value in ODD_VALUES)):
                line = "{" + ", ".join([*pairs[:place], *changed, *pairs[place + 1 :]]) + "}\n"
                path.write_bytes(data + line.encode())
                count += 1
                try:
                    write_report(made.run.dir)
                except UserError as error:
                    assert f"metrics.jsonl:{data.count(10) + 1}: not a row" in str(error), str(error)
    path.write_bytes(data)
    (made.run.dir / "report.html").unlink(missing_ok=True)
    assert count > 300


def remove(*names: str) -> Callable[[Path], None]:
    def act(run: Path) -> None:
        for name in names:
            path = run / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return act


def swap(one: str, other: str) -> Callable[[Path], None]:
    def act(run: Path) -> None:
        (run / one).rename(run / "aside")
        (run / other).rename(run / one)
        (run / "aside").rename(run / other)

    return act


def copy(source: str, target: str) -> Callable[[Path], None]:
    def act(run: Path) -> None:
        shutil.rmtree(run / target, ignore_errors=True)
        (run / target).unlink(missing_ok=True)
        (shutil.copytree if (run / source).is_dir() else shutil.copyfile)(run / source, run / target)

    return act


def replace_by(kind: str, name: str) -> Callable[[Path], None]:
    def act(run: Path) -> None:
        remove(name)(run)
        if kind == "file":
            (run / name).write_text("mine")
        elif kind == "directory":
            (run / name).mkdir()
            (run / name / "mine").write_text("mine")
        else:
            (run / name).symlink_to(run.parent / "elsewhere" if kind == "dangling" else run.parent)

    return act


def both(*acts: Callable[[Path], None]) -> Callable[[Path], None]:
    def act(run: Path) -> None:
        for one in acts:
            one(run)

    return act


STATE = "checkpoints/stage00001-age{:05d}/state.json"
REFUSED = {
    "stages swapped": (swap("stages/00000", "stages/00001"), r"stages/00001 holds stage 0 of run"),
    "an earlier stage in place of the current one": (copy("stages/00000", "stages/00001"), "holds stage 0"),
    "sealed files swapped": (
        swap("stages/00000/stage.parquet", "stages/00001/stage.parquet"),
        r"stage\.parquet: damaged",
    ),
    "logprobs of another stage": (
        both(*(copy(f"stages/00000/behaviour.{end}", f"stages/00001/behaviour.{end}") for end in ("parquet", "json"))),
        "of other responses",
    ),
    "logprobs without checksums": (remove("stages/00001/behaviour.json"), r"behaviour\.json: missing or damaged"),
    "logprobs gone": (remove("stages/00001/behaviour.parquet"), r"behaviour\.parquet: missing"),
    "a manifest gone": (remove("stages/00001/manifest.json"), r"manifest\.json is missing"),
    "a sealed file gone": (remove("stages/00001/stage.parquet"), r"stage\.parquet: missing"),
    "all states gone": (remove(STATE.format(0), STATE.format(1)), "every checkpoint in .* is damaged"),
    "the record gone": (remove("run.json"), r"has no run\.json"),
    "all but the stages gone": (
        remove("run.json", "recipe.toml", "metrics.jsonl", "hf", "checkpoints", "summary.json"),
        r"stages exists, but",
    ),
    "hf without a mark": (remove("hf/mugrpo.json"), "was not written by this run"),
    "hf is a file": (replace_by("file", "hf"), "not a directory"),
    "hf is another directory": (replace_by("directory", "hf"), "was not written by this run"),
    "hf is a link": (replace_by("link", "hf"), "a symbolic link"),
    "hf is a broken link": (replace_by("dangling", "hf"), "a symbolic link"),
    "stages is a file": (replace_by("file", "stages"), "cannot be created"),
    "checkpoints is a file": (replace_by("file", "checkpoints"), "cannot be created"),
    "the log is a directory": (replace_by("directory", "metrics.jsonl"), "cannot be read"),
    "the lock is a directory": (replace_by("directory", ".lock"), "cannot be written"),
    "the recipe is a directory": (replace_by("directory", "recipe.toml"), "recipe.toml"),
    "the record is a directory": (replace_by("directory", "run.json"), r"run\.json: damaged"),
    "the data's record is a directory": (replace_by("directory", "data.json"), r"data\.json: damaged"),
    "the summary is a directory": (replace_by("directory", "summary.json"), "summary.json"),
    "a manifest is a directory": (replace_by("directory", "stages/00001/manifest.json"), "damaged"),
}
TOLD = {
    "the newest state gone": (remove(STATE.format(1)), "not a complete checkpoint"),
    "a data file gone": (remove("checkpoints/stage00001-age00001/__0_0.distcp"), "is missing"),
    "data files swapped": (
        both(*(copy("run.json", f"checkpoints/stage00001-age{age:05d}/__0_0.distcp") for age in (0, 1))),
        "damaged",
    ),
    "a shard gone": (remove("stages/00002/shard-00000.parquet"), "generated again"),
}
ACCEPTED = {
    "a backup of a stage": copy("stages/00001", "stages/00001.bak"),
    "another directory among the stages": copy("stages/00001", "stages/old"),
    "a backup of a checkpoint": copy("checkpoints/stage00001-age00001", "checkpoints/stage00001-age00001.bak"),
    "a file among the stages": copy("run.json", "stages/00007"),
    "a file among the checkpoints": copy("run.json", "checkpoints/stage00009-age00000"),
    "notes in the run's directory": copy("run.json", "notes.json"),
    "no lock": remove(".lock"),
    "no summary": remove("summary.json"),
    "no log": remove("metrics.jsonl"),
    "no fingerprint of the data": remove("data.json"),
    "no hf": remove("hf"),
    "no recipe": remove("recipe.toml"),
    "leftovers": copy("run.json", ".summary.json.0123abcd.partial"),
}


@pytest.fixture
def changed(whole: tuple[Recipe, str], tmp_path: Path) -> Recipe:
    """A copy of the run directory at another place, which a user may well make."""
    shutil.copytree(whole[0].run.dir, tmp_path / "run")
    return recipe(tmp_path / "run")


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_the_runs_own_is_refused_and_stays(case: str, changed: Recipe) -> None:
    act, words = REFUSED[case]
    act(changed.run.dir)
    before = content(changed.run.dir)
    with pytest.raises(UserError, match=words):
        resume(changed)
    assert content(changed.run.dir) == before


@pytest.mark.parametrize("case", TOLD)
def test_damage_with_a_way_on_is_told(case: str, changed: Recipe) -> None:
    act, words = TOLD[case]
    act(changed.run.dir)
    before = content(changed.run.dir)
    _, found = resume(changed)
    assert words in " ".join(found)
    assert content(changed.run.dir) == before


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_lies_next_to_the_run_changes_nothing(case: str, changed: Recipe, whole: tuple[Recipe, str]) -> None:
    ACCEPTED[case](changed.run.dir)
    assert resume(changed) == (whole[1], [])
