"""Recipes and overrides with odd text, types, sizes and files: valid, or refused in one sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.recipe import Recipe, load_recipe
from mugrpo_megatron.recipe.load import MAX_BASES
from tests.checkout import ROOT
from tests.hostile.outcome import answered, command, refused, sentence

RECIPE = str(ROOT / "run_scripts/recipes/quickstart.toml")

DIGITS = "9" * 5000
HEX = "0x" + "f" * 6000
FILES: dict[str, tuple[bytes, str]] = {
    "5,000 digits": (f"[run]\nseed = {DIGITS}\n".encode(), "not valid TOML"),
    "6,000 hexadecimal digits": (f"[run]\nseed = {HEX}\n".encode(), "`run.seed` = a huge int"),
    "long hexadecimal float": (f"[optimizer]\nlr = {HEX}\n".encode(), "`optimizer.lr`"),
    "nested array": (b"x = " + b"[" * 20_000, "nested too deep"),
    "nested table": (b"x = " + b"{a=" * 20_000, "nested too deep"),
    "nested name": (b"[" + b".".join([b"a"] * 20_000) + b"]\n", "`a` is not a recipe key"),
    "unhashable objective": (b'[objective]\nname = ["x"]\n', "`objective.name` = ['x']"),
    "NUL": (b'[run]\ndir = "a\\u0000b"\n', "`run.dir`"),
    "NUL in the model's path": (b'[model]\npath = "a/b\\u0000"\n', "`model.path` = 'a/b\\x00': holds a null character"),
    "NUL in data": (b'[data]\ntrain = "a\\u0000.jsonl"\n', "`data.train`"),
    "a worker without room for Python": (b"[reward]\nworker_memory_mb = 40\n", "`reward.worker_memory_mb` = 40"),
    "raw NUL": (b"[run]\n\0", "not valid TOML"),
    "surrogate": (b'[run]\ndir = "\\ud800"\n', "not valid TOML"),
    "not UTF-8": (b"\xff\xfe[run]\n", "cannot be read as a recipe"),
    "escape in a key": (b'"\\u001b[2J" = 1\n', "is not a recipe key"),
    "repeated key": (b"[run]\nseed = 1\nseed = 2\n", "not valid TOML"),
    "too long": (b"#" * (1 << 21), "longer than 1,048,576 bytes"),
    "NUL in base": (b'base = "a\\u0000b"\n', "not valid TOML"),
    "base is a number": (b"base = 3\n", "`base` is the path"),
    "base is a table": (b'base = {a = "b"}\n', "`base` is the path"),
    "base is a directory": (b'base = "/"\n', "cannot be read as a recipe"),
    "base is a device": (b'base = "/dev/zero"\n', "longer than 1,048,576 bytes"),
    "base has a long name": (b'base = "' + b"x" * 500 + b'"\n', "cannot be read as a recipe"),
    "empty key": (b'"" = 1\n', "is not a recipe key"),
    "set name": (b"[eval.sets.x]\nsamples = 0\n", "`eval.sets.x.samples` = 0"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_that_cannot_be(name: str, tmp_path: Path) -> None:
    content, reason = FILES[name]
    (tmp_path / "r.toml").write_bytes(content)
    said = refused("train", tmp_path / "r.toml", "--dry-run")
    assert reason in said
    assert str(tmp_path) in said or "base" in name


VALUES: dict[str, str] = {
    "optimizer.lr=inf": "finite",
    "optimizer.min_lr=1.0": "above lr",
    "rollout.temperature=nan": "finite",
    "eval.sets.x.temperature=inf": "finite",
    "objective.mismatch_range=[3.0,2.0]": "above its first",
    "run.seed=1e30": "maximum size",
    "schedule.stages=9007199254740993": "less than or equal to 99999",
    "schedule.updates_per_stage=1" + "0" * 400: "updates_per_stage is above",
    "run.dir=": "name a directory of its own",
    "run.dir=/": "name a directory of its own",
    "run.dir=[]": "run.dir",
    "sft.output=": "name a directory of its own",
    "sft.output=/": "name a directory of its own",
    "schedule.stages=4\nrun.seed=2": "sets several keys",
    "run.dir='a'\n[data]\ntrain='b'": "sets several keys",
    f"run.seed={DIGITS}": "an integer has more than 4,300 digits",
    "run.seed=" + "[" * 20_000: "nested too deep",
    "run.seed=" + HEX: "a huge int",
    "objective.name=[1, 2]": "objective.name",
    "run.dir=\udcff": "not UTF-8",
    "run.\udcff=1": "not UTF-8",
    "a..b=1": "not a recipe key",
    "run.seed.x=1": "`run.seed`",
    "=1": "write it as section.key=value",
    "run=1": "write it as section.key=value",
    "": "write it as section.key=value",
}


@pytest.mark.parametrize("override", VALUES, ids=lambda text: repr(text[:30]))
def test_an_override_that_cannot_be(override: str) -> None:
    assert VALUES[override] in sentence(lambda: load_recipe(None, [override]))


@pytest.mark.parametrize(
    "override",
    [
        "data.train=a,b # c",
        "data.train='''a\nb'''",
        "model.path=7 days",
        "run.dir=./x=y",
        "optimizer.lr=1E-5",
        "run.seed=0x10",
        "run.seed=2147483647",
        "track.wandb_project=true story",
        "rollout.temperature=1",
        "run.dir=.",
    ],
)
def test_an_override_that_is_text_or_a_number(override: str, tmp_path: Path) -> None:
    """A value that is not TOML is text, to its end."""
    (tmp_path / "r.toml").write_text(f'[model]\npath = "{tmp_path}/none"\n[data]\ntrain = "{tmp_path}/none.jsonl"\n')
    key, _, value = override.partition("=")
    section, name = key.split(".")
    found = getattr(getattr(load_recipe(tmp_path / "r.toml", [override]), section), name)
    assert found is not None
    if " " in value and "'" not in value:
        assert str(found) == value


def test_files_that_are_not_recipes(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "device.toml").symlink_to("/dev/zero")
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    (tmp_path / "dangling.toml").symlink_to("nowhere")
    for name in ("folder", "device", "loop", "dangling", "nowhere", "x" * 300):
        refused("train", tmp_path / f"{name}.toml")
        refused("plan", tmp_path / f"{name}.toml")
    (tmp_path / "null.toml").symlink_to("/dev/null")
    (tmp_path / "empty.toml").touch()
    (tmp_path / "mark.toml").write_bytes(b"\xef\xbb\xbf[run]\r\nseed = 3\r\n")
    for name in ("null", "empty", "mark"):
        answered("train", tmp_path / f"{name}.toml", "--dry-run", "--set", f"run.dir={tmp_path}/run")


def test_chains_and_fans_of_bases_end(tmp_path: Path) -> None:
    for number in range(1500):
        (tmp_path / f"{number}.toml").write_text(f'base = "{number + 1}.toml"\n')
    refused("train", tmp_path / "0.toml", says=f"more than {MAX_BASES} recipes")
    (tmp_path / "1500.toml").write_text("[run]\nseed = 5\n")
    refused("train", tmp_path / "0.toml", says=f"more than {MAX_BASES} recipes")
    assert "seed = 5" in command("train", tmp_path / "1450.toml", "--dry-run").out
    for number in range(30):  # each twice the next: 2^30 files to read
        (tmp_path / f"f{number}.toml").write_text(f'base = ["f{number + 1}.toml", "f{number + 1}.toml"]\n')
    (tmp_path / "f30.toml").touch()
    refused("train", tmp_path / "f0.toml", says=f"more than {MAX_BASES} recipes")
    (tmp_path / "a.toml").write_text('base = "b.toml"\n')
    (tmp_path / "b.toml").write_text(f'base = "../{tmp_path.name}/./a.toml"\n')
    refused("train", tmp_path / "a.toml", says="leads back to itself")
    os.link(tmp_path / "a.toml", tmp_path / "c.toml")
    refused("train", tmp_path / "c.toml", says="leads back to itself")


@given(st.text(max_size=40))
def test_any_text_is_a_recipe_or_a_sentence(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("recipe") / "r.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    sentence(lambda: load_recipe(path))


KEYS = [
    f"{section}.{name}"
    for section, field in Recipe.model_fields.items()
    for name in field.annotation.model_fields  # type: ignore[union-attr]
]
ODD = [
    "-1",
    "0",
    "1e308",
    "nan",
    "[]",
    "{}",
    "''",
    "true",
    "1979-05-27",
    "9" * 25,
    '"\\u001b[2J"',
    "[[1]]",
    "0.5",
    "x\ty",
]


@pytest.mark.parametrize("value", ODD, ids=lambda text: repr(text[:12]))
def test_every_key_takes_an_odd_value_or_refuses_it(value: str) -> None:
    valid = 0
    for key in KEYS:
        valid += not sentence(lambda key=key: load_recipe(None, [f"{key}={value}"]))  # type: ignore[misc]
    assert valid < len(KEYS)
