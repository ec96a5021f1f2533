"""What a program's output says: its answer, its reward and its numbers, or a sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mugrpo_megatron.extras.episodes.agent import TAIL_BYTES, _cut_result, _result
from mugrpo_megatron.extras.episodes.environment import program_path, secrets_in
from mugrpo_megatron.extras.episodes.launcher import _as_object

JSON = st.recursive(
    st.booleans() | st.integers(-9, 10**6) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
NUMBERS = st.integers(-100, 100) | st.floats(-100, 100, width=32)


def result(text: str | bytes) -> dict[str, Any]:
    path = Path("output")
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    return _result(path)


@given(answer=JSON, indent=st.sampled_from([None, 0, 1, 4]), before=st.sampled_from(["", "log\n", "{\n", "{}\n\n"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_answer_of_any_type_is_the_answer(answer: Any, indent: int | None, before: str) -> None:
    """On one line or several, whatever stands before it; a value that is no text is scored as its JSON."""
    said = result(before + json.dumps({"answer": answer, "x": 1}, indent=indent) + "\n\n")
    assert said["answer"] == (answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False))
    assert (said["reward"], said["parts"]) == (None, {"x": 1.0})


@given(reward=NUMBERS | st.none(), score=NUMBERS | st.none() | st.just("87/100"), first=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_reward_is_the_reward_else_score(reward: Any, score: Any, first: bool) -> None:
    pairs = [("reward", reward), ("score", score)]
    said = dict(pairs if first else pairs[::-1])
    if reward is None and isinstance(score, str):
        with pytest.raises(TypeError, match="87/100"):
            result(json.dumps(said))
        return
    found = result(json.dumps(said))
    assert found["reward"] == (score if reward is None else reward)
    assert found["parts"] == ({"score": score} if reward is not None and isinstance(score, int | float) else {})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"answer": "\\ud800"}', "surrogate"),
        ("{'answer': 42}", "cannot be read"),
        ('{"answer": 42,}', "cannot be read"),
        ("log\n{'answer':\n 42}", "cannot be read"),
        ('{"reward": "1"}', "'1', a str"),
        ('{"reward": [1]}', "a list"),
        ('{"reward": NaN}', "nan"),
        ('{"score": 1e300}', "1e\\+300"),
        ('{"answer": "' + "x" * TAIL_BYTES + '"}', "more than 1,048,576 bytes"),
    ],
)
def test_a_result_that_cannot_be_used_is_named(text: str, sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence):
        result(text)


@pytest.mark.parametrize("text", ["", "42", "[1]", "done", "int main() {\n}", '{"answer": 1}\nbye', '"{}', "}", " }\n"])
def test_other_output_is_not_read(text: str) -> None:
    assert result(text)["answer"] is None
    assert result(text)["reward"] is None


def test_a_long_output_ends_with_its_result() -> None:
    pretty = json.dumps({"answer": ["x"] * 1000}, indent=2)
    assert json.loads(result("noise\n" * TAIL_BYTES + pretty)["answer"]) == ["x"] * 1000
    deep = '{"a":\n' * 100_000  # no part of it is parsed more often than MOST_STARTS times
    with pytest.raises(ValueError, match="looks like a JSON object"):
        result(deep + "}")


def test_what_replaces_the_output_is_not_read_and_nothing_stays_open() -> None:
    Path("file").write_text('{"reward": 1}', encoding="utf-8")
    open_before = len(os.listdir("/proc/self/fd"))
    for make in (os.mkdir, os.mkfifo, lambda path: os.symlink("file", path)):
        make("out")  # type: ignore[operator]
        with pytest.raises(OSError, match="out"):
            _result(Path("out"))
        (os.rmdir if os.path.isdir("out") else os.unlink)("out")
    with pytest.raises(OSError, match="No such file"):
        _result(Path("out"))
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_after_a_limit_a_result_counts_and_its_absence_fails_nothing() -> None:
    Path("out").write_text('{"reward": 0.5}', encoding="utf-8")
    assert _cut_result(Path("out"), 0)["reward"] == 0.5
    assert _cut_result(Path("out"), 1) == {"reward": None, "why": "", "parts": {}, "answer": None, "cut": True}
    Path("out").write_text('{"reward": "x"}', encoding="utf-8")
    assert _cut_result(Path("out"), 0)["reward"] is None
    assert _cut_result(Path("gone"), 0)["cut"]


def test_what_a_function_returns_is_used_or_refused() -> None:
    assert _as_object(None) == {}
    assert _as_object("") == {"answer": ""}
    assert _as_object(0) == {"reward": 0.0}
    assert _as_object(True) == {"reward": 1.0}
    assert _as_object({"answer": [1]}) == {"answer": [1]}
    for value in ([1], (1,), {1}, object()):
        with pytest.raises(TypeError, match="return a number, a text, or a dict"):
            _as_object(value)


def test_secrets_are_known_by_name_or_value() -> None:
    names = (
        "HF_TOKEN HUGGING_FACE_HUB_TOKEN WANDB_API_KEY OPENAI_APIKEY AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY GH_TOKEN "
        "PGPASSWORD MYSQL_PWD DB_PASSWORDS SSH_AUTH_SOCK GOOGLE_APPLICATION_CREDENTIALS gitlab_token GITHUB_PAT"
    )
    others = (
        "PATH HOME PWD OLDPWD TOKENIZERS_PARALLELISM HF_HOME KEYBOARD_LAYOUT LANG PYTHONPATH CUDA_VISIBLE_DEVICES "
        "OMP_NUM_THREADS TMPDIR PATIENCE AUTHOR"
    )
    secret, plain = names.split(" "), others.split(" ")
    environment = dict.fromkeys((*secret, *plain), "x")
    environment |= {"DATABASE_URL": "postgres://me:word@host/db", "HTTP_PROXY": "http://host:80", "URL": "a://b@c"}
    assert secrets_in(environment) == sorted([*secret, "DATABASE_URL"])
    assert secrets_in(environment, ["HF_TOKEN", "DATABASE_URL"]) == sorted(set(secret) - {"HF_TOKEN"})
    assert program_path({"PATH": "/usr/bin"}).endswith(f"{os.pathsep}/usr/bin")
