"""`data.question_template`: the text around each question."""

from __future__ import annotations

import re

QUESTION = "{question}"
_OF_LATEX = re.compile(r"\\[A-Za-z]+(?:\{[^{}]*\})+")
"""A command with its arguments, as in `\\boxed{answer}`: no field."""
_FIELD = re.compile(r"\{[A-Za-z_][\w.]*\}")


def question_template(text: str) -> str:
    """The template itself; ValueError when it has no `{question}`, or a field of another name.

    Braces that hold no name, and those of LaTeX commands, are text.
    """
    if QUESTION not in text:
        raise ValueError(f"has no {QUESTION}, where each question goes")
    if "{{" in text:
        raise ValueError("braces are not doubled here: write {question} and \\boxed{}")
    if other := [field for field in _FIELD.findall(_OF_LATEX.sub("", text)) if field != QUESTION]:
        raise ValueError(f"{other[0]} cannot be filled in: {QUESTION} is the only field")
    return text


def asked(question: str, template: str | None) -> str:
    """The question inside the template; without one the question itself."""
    return question if template is None else template.replace(QUESTION, question)
