"""The code keeps its contracts, and each contract finds what breaks it."""

from __future__ import annotations

import pytest

from run_scripts.dev import contracts
from run_scripts.dev.contracts import banned_names, broken
from run_scripts.dev.modules import ROOT, Module, product, walk

TEXT = '''
"""A guest's columns."""
from x import y as anchor_of

reference_logprobs = "a guest"  # guest


def f(AnchorPolicy):
    """Anchored: not a word of the list."""
    return y.guests
'''


def module(name: str, text: str) -> Module:
    return Module(name, ROOT / f"{name.replace('.', '/')}.py", text)


def test_the_code_keeps_its_contracts() -> None:
    assert broken(product()) == []


@pytest.mark.parametrize(
    ("contract", "name", "text", "line"),
    [
        (
            "closed_rooms",
            "algorithm.veto",
            "import torch\n\ndef f():\n    from megatron.core import tensor_parallel",
            4,
        ),
        ("closed_rooms", "data.prompts", "from mugrpo_megatron import megatron_compat", 1),
        ("closed_rooms", "learner.loss", "import torch.nn\nimport sglang.srt.utils", 2),
        ("extras_at_the_top", "phases.generate", "from mugrpo_megatron.extras.lora import adapters", 1),
        ("extras_at_the_top", "phases.generate", "if True:\n    from mugrpo_megatron import extras", 2),
        ("extras_by_a_string", "phases.generate", 'A = 1\nB = "mugrpo_megatron.extras.lora.adapters:LoraAdapters"', 2),
        ("patches", "learner.model", "import torch\ntorch.cuda.synchronize = None", 2),
        ("patches", "learner.model", "import megatron.core.parallel_state as ps\n\nps._GROUP += 1", 3),
        ("patches", "engine.host", "from sglang.srt import server\nsetattr(server.Engine, 'run', print)", 2),
    ],
)
def test_a_broken_contract_is_found_at_its_line(contract: str, name: str, text: str, line: int) -> None:
    assert [
        found.split(":")[1] for found in getattr(contracts, contract)([module(f"mugrpo_megatron.{name}", text)])
    ] == [str(line)]


@pytest.mark.parametrize(
    ("contract", "name", "text"),
    [
        ("closed_rooms", "learner.model", "from megatron.core import tensor_parallel"),
        ("extras_at_the_top", "phases.generate", "def f():\n    from mugrpo_megatron.extras.lora import adapters"),
        ("extras_at_the_top", "extras.plan.time", "from mugrpo_megatron.extras.lora import adapters"),
        ("patches", "cpu.megatron", "import torch\ntorch.cuda.synchronize = None"),
        ("patches", "learner.model", "import torch\ntorch.backends.cudnn.benchmark = True\nmodel.x = torch.ones(1)"),
    ],
)
def test_what_is_allowed_is_not_found(contract: str, name: str, text: str) -> None:
    assert list(getattr(contracts, contract)([module(f"mugrpo_megatron.{name}", text)])) == []


def test_a_circle_of_rooms_is_found_and_named() -> None:
    texts = {"data.a": "stages.b", "stages.b": "files.c", "files.c": "data.a", "run.d": "data.a"}
    modules = {
        f"mugrpo_megatron.{name}": module(f"mugrpo_megatron.{name}", f"import mugrpo_megatron.{other}")
        for name, other in texts.items()
    }
    assert contracts.circles(modules) == ["rooms import one another in a circle: data, files, stages"]
    del modules["mugrpo_megatron.files.c"]
    assert contracts.circles(modules) == []


def test_a_page_that_is_not_what_the_code_makes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contracts.recipe_reference, "markdown", lambda: "another")
    [line] = contracts.stale_pages()
    assert line.startswith("docs/recipe.md")


def test_banned_words_are_found_in_identifiers_and_docstrings_and_not_in_other_text() -> None:
    found = [line.partition(" is banned")[0] for line in banned_names([module("m", TEXT)])]
    assert sorted(found) == [
        "m.py:10: `guest`",
        "m.py:2: `guest`",
        "m.py:3: `anchor`",
        "m.py:5: `reference_logprobs`",
        "m.py:8: `anchor`",
    ]


def test_a_walk_follows_arguments_methods_and_imports() -> None:
    first = "from mugrpo_megatron.b import g, Run\n\n\ndef f(run: Run):\n    g(1, run)\n    run.h()\n    g(2)\n"
    second = "class Run:\n    def h(self):\n        self.k()\n    def k(self): ...\n\n\ndef g(n, other): ...\n"
    modules = {name: module(name, text) for name, text in (("mugrpo_megatron.a", first), ("mugrpo_megatron.b", second))}
    assert [label.partition(":")[2] for label in walk(modules, "a", "f", "run")] == ["f", "g", "h", "k"]
