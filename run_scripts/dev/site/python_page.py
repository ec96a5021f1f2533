"""docs/python.md, made from docstrings: `python -m run_scripts.dev.site.python_page > docs/python.md`."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from mugrpo_megatron.algorithm.advantages import group_advantages
from mugrpo_megatron.algorithm.segments import Segments
from mugrpo_megatron.algorithm.surrogates import SurrogateLoss, TokenBatch
from mugrpo_megatron.extras.episodes.turns import EpisodeModel
from mugrpo_megatron.samples import Problem, Sample

HEAD = """# Python reference

For everyone who writes a function of their own: what it receives and returns. [Your own loss, advantages, diagnostics
and preset](own-functions.md), [rewards](rewards.md) and [episodes](episodes.md) have examples. [N] and [T] are shapes:
N responses, T tokens.

A recipe names a function as `module:function`; the module is a file of the current directory or an installed package.
Other modules of `mugrpo_megatron` may change between versions. `make docs` makes this page from docstrings.
"""
PARTS: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    (
        "Surrogate: your token loss",
        """`objective.surrogate = "module:function"`. `function(tokens: TokenBatch, config) -> SurrogateLoss` runs in
the learner, in the reference loss and fused with the output layer. `config` is the recipe's section
[`[objective]`](recipe.md#objective). [Example](own-functions.md#your-own-loss).""",
        (TokenBatch, SurrogateLoss, Segments),
    ),
    (
        "Advantage",
        """`objective.advantage = "module:function"`. [Your own
advantages](own-functions.md#your-own-advantages) has the arguments. The built-in ones are in `group_advantages`; a
user's function may read each response as a `Sample`.""",
        (group_advantages, Sample),
    ),
    (
        "Reward",
        """`reward.function = "module:function"`. The names of its parameters select the arguments;
[rewards](rewards.md#your-own-function) lists them. It returns a finite number, or a dict with `score`. It runs in
worker processes, with limits of time and memory.""",
        (),
    ),
    (
        "Episode",
        """`rollout.function = "module:function"`. `async def function(problem: Problem, model)` plays one episode
and returns its score, or None for the verifier's. [Episodes](episodes.md) has examples.""",
        (Problem, EpisodeModel),
    ),
)


def markdown() -> str:
    """The text of docs/python.md."""
    parts = [HEAD]
    for title, text, objects in PARTS:
        parts.append(f"## {title}\n\n{text}\n")
        parts += ["\n".join(_object(entry)) for entry in objects]
    return "\n".join(parts)


def _object(entry: Any) -> Iterator[str]:
    yield f'### <a id="{entry.__name__}"></a>`{entry.__module__}.{entry.__name__}`\n'
    if inspect.isfunction(entry):
        yield f"```python\n{entry.__name__}{_signature(entry)}\n```\n"
        yield f"```text\n{inspect.cleandoc(entry.__doc__ or '')}\n```\n"
        return
    yield f"{_prose(entry.__doc__)}\n"
    for name, annotation, text in _fields(entry):
        yield f"- `{name}: {annotation}`{f': {text}' if text else ''}"
    for name, method in vars(entry).items():
        if inspect.isfunction(method) and not name.startswith("_") and method.__doc__:
            head = "await " if inspect.iscoroutinefunction(method) else ""
            yield f"- `{head}{name}{_signature(method)}`: {_prose(method.__doc__)}"
    yield ""


def _fields(entry: type) -> Iterator[tuple[str, str, str]]:
    """(name, type, docstring) of the public fields that a class declares."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(entry))).body
    assert isinstance(definition, ast.ClassDef)
    for node, after in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            has_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            text = after.value.value if has_text else ""  # type: ignore[union-attr]
            yield node.target.id, ast.unparse(node.annotation), _prose(str(text))


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    kept = [parameter for name, parameter in signature.parameters.items() if name != "self"]
    return re.sub(r"'([^']*)'", r"\1", str(signature.replace(parameters=kept)))


def _prose(text: str | None) -> str:
    """A docstring in one line of Markdown, with brackets escaped that would be read as a link."""
    return re.sub(r"\[([^\]]*)\](?=\()", r"\\[\1\\]", " ".join(inspect.cleandoc(text or "").split()))


if __name__ == "__main__":
    print(markdown(), end="")
