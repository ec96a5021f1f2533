"""docs/metrics.md, made from the table of metrics: `python -m run_scripts.dev.metrics_page > docs/metrics.md`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from mugrpo_megatron.observe.metrics import KINDS, METRICS, PHASES, ROW_KEYS, Metric

_THRESHOLD = re.compile(r"_1e-\d$")
_THRESHOLD_IN_TEXT = re.compile(r"(threshold )?\b1e-\d\b")
HEAD = """For everyone who reads the numbers of a run: every metric, with its unit and its meaning. Each has an address,
such as `metrics.md#update.ess`. `make docs` makes this page from mugrpo_megatron/observe/metrics.py.

A run writes `metrics.jsonl`: each line, or *row*, is a JSON object. Its `kind` is one of the headings below. If a run
resumes, it may repeat updates; then the later row of an update counts. NaN and infinity are written as `null`, and the
key `not_finite` lists the names of these metrics. In brackets stands the unit; a *fraction* is a share between 0 and 1.

`pi` is the policy that is being trained, and `behaviour` the policy that sampled the responses. r, the *importance
ratio* of a token, is its probability under `pi` divided by its probability under `behaviour`. The log-ratio is log r.
A response is *negative* if its advantage is below 0. `TH` in a name stands for a threshold of the
[veto](algorithm.md#the-negative-advantage-veto): 1e-1, 1e-2, 1e-3, 1e-4, 1e-5 or 1e-6. The [glossary](glossary.md)
has the other words."""


def markdown() -> str:
    """The text of docs/metrics.md."""
    sections = [
        "# Metrics",
        HEAD,
    ]
    for kind, meaning in KINDS.items():
        sections.append(
            f"## `{kind}`\n\n{meaning}\n\nKeys beside the metrics: {', '.join(f'`{key}`' for key in ROW_KEYS[kind])}."
        )
        if rows := [metric for metric in METRICS if metric.kind == kind]:
            sections.append("\n".join(_lines(kind, rows)))
    sections.append("## Phases\n\n" + _table(("Phase", "What happens"), [(f"`{k}`", v) for k, v in PHASES.items()]))
    return "\n\n".join(sections) + "\n"


def _lines(kind: str, rows: Iterable[Metric]) -> Iterator[str]:
    """One line for each metric; metrics that differ only in their threshold, or have the same meaning, share a line."""
    names: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        meaning = _THRESHOLD_IN_TEXT.sub("the threshold", row.meaning)
        names.setdefault((row.unit, meaning), {})[_THRESHOLD.sub("_TH", row.name)] = None
    for (unit, meaning), group in names.items():
        shown = ", ".join(f'<a id="{kind}.{name}"></a>`{name}`' for name in group)
        yield f"- {shown}{'' if unit == '1' else f' ({unit})'}: {meaning}"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines)


if __name__ == "__main__":
    print(markdown(), end="")
