"""What `--server` takes, and recipes that servers cannot generate for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mugrpo_megatron.extras.servers.address import check_address
from mugrpo_megatron.extras.servers.options import check_servers, server_options
from mugrpo_megatron.recipe import Recipe
from tests.refusals import refuses


@pytest.mark.parametrize(
    "text",
    [
        "",
        "localhost:8000",
        "ftp://a",
        "http://",
        "http://[",
        "http://a:99999",
        "http://a\n",
        "http://ä",
        "http://a?b=1",
    ],
)
def test_other_texts_are_no_address(text: str) -> None:
    refuses("--server", check_address, text, None)


def test_an_address_is_a_base() -> None:
    for text in ("http://127.0.0.1:8000", "http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"):
        assert check_address(text, None) == "http://127.0.0.1:8000"
    assert check_address("https://gateway.example.org/team/v1/", "k") == "https://gateway.example.org/team"


def test_a_key_never_crosses_a_network_in_clear() -> None:
    refuses("would cross the network unencrypted", check_address, "http://10.0.0.1:8000", "k")
    refuses("holds a user or a password", check_address, "https://a:b@host", None)
    refuses("no HTTP header may have", check_address, "https://host", "k\n")
    for host in ("localhost", "127.0.0.1", "[::1]"):
        assert check_address(f"http://{host}:1", "k")


def test_options() -> None:
    assert server_options(["http://a", "https://b", "http://a/v1"], 1.0, 2.0).urls() == ["http://a", "https://b"]
    options = server_options(["@servers.txt"], 1.0, 2.0)
    assert options.urls() == [], "the jobs that serve may not have begun"
    Path("servers.txt").write_text("http://a:1\n\nhttp://b:2/\n")
    assert options.urls() == ["http://a:1", "http://b:2"]
    Path("servers.txt").write_text("a:1\n")
    refuses("write a URL", options.urls)
    for number in (0.0, -1.0, float("nan"), float("inf")):
        refuses("--timeout", server_options, ["http://a"], number, 1.0)
        refuses("--patience", server_options, ["http://a"], 1.0, number)


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"rollout": {"top_k": 20}}, "servers do not say which tokens could be drawn"),
        ({"rollout": {"top_p": 0.9}}, "servers do not say which tokens could be drawn"),
        ({"rollout": {"function": "a:b"}}, "an episode has several requests"),
        ({"learner": {"routing_replay": "rollout"}}, "servers return no experts"),
    ],
)
def test_recipes_that_need_more_than_a_server_has(sections: dict[str, Any], why: str) -> None:
    check_servers(Recipe())
    refuses(why, check_servers, Recipe.model_validate(sections))
