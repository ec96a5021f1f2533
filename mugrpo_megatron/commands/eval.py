"""`mugrpo eval`: evaluate a checkpoint on data sets; the same command continues an interrupted evaluation."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from mugrpo_megatron.checks.engines import EngineSetup
from mugrpo_megatron.checks.preflight import check_engine
from mugrpo_megatron.commands.common import say
from mugrpo_megatron.data.files import rows
from mugrpo_megatron.data.prepare import evenly_spaced_by_set, held_out_problems
from mugrpo_megatron.data.problems import check_sets, held_out_sets, named_sources
from mugrpo_megatron.data.prompts import first_prompt, template_of
from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.launch import held_out_sampling
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.evaluation.estimators import Interval, Measure, macro_average
from mugrpo_megatron.evaluation.scoring import (
    ProblemResult,
    Summary,
    measure_of,
    problem_result,
    prompts_of,
    scored,
    summarize,
)
from mugrpo_megatron.files.durable import full_disk_as_user_error, write_json, write_text
from mugrpo_megatron.files.hf_config import read_model_config
from mugrpo_megatron.files.json_text import read_json, to_json_value
from mugrpo_megatron.files.outputs import check_output, make_directory
from mugrpo_megatron.observe.progress import Display, new_table, open_display
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.functions import source_sum
from mugrpo_megatron.rewards.pool import Verifier
from mugrpo_megatron.run.directory import file_lock
from mugrpo_megatron.run.engine_spec import engine_spec
from mugrpo_megatron.run.initial_model import hub_model, weights_fingerprint, with_model
from mugrpo_megatron.run.inputs import file_sum, sums_by_set
from mugrpo_megatron.samples import Problem, Prompt
from mugrpo_megatron.terminal import visible

SETTINGS = "settings.json"
"""The file that makes a directory an evaluation's own."""
LATER = {"problems", "reward files", "template file", "episodes"}
"""Settings that earlier versions did not write."""
UNDEFINED = "–"
"""What the table has for a majority where no response has an extracted answer."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A finished evaluation."""

    sets: list[Summary]
    seconds: dict[str, float]
    """Wall-clock time of this run for each set; 0 where an earlier run had finished it."""

    @property
    def average(self) -> Interval:
        """Unweighted mean of the sets' mean@K."""
        return macro_average([one.mean for one in self.sets])


def run(recipe: Recipe, sources: Sequence[str], output: Path) -> Evaluation:
    """Evaluate `model.path` on data sets, each sampled as `[eval]` and its own `[eval.sets]` say; write to `output`.

    Writes problems.jsonl (a row per problem, as they finish), summary.json and table.md. Continues an evaluation of the
    same settings in `output`. Raises UserError for bad data or model, or when `output` holds one of other settings.
    """
    names = held_out_sets(",".join(sources), "--data")
    # A run's recipe may have settings of sets that this evaluation does not include.
    check_sets(recipe.eval, names.keys() | named_sources(recipe.data.eval).keys(), "--data and data.eval")
    recipe = with_model(recipe, say)
    check_engine(EngineSetup(recipe, read_model_config(recipe.model.directory)))
    tokenizer = load_tokenizer(recipe.model.directory)
    notes: list[str] = []
    held_out = held_out_problems(",".join(sources), recipe.data, recipe.reward, notes, "--data")
    recipe.reward.check_sources(problem.data_source for problem in held_out)
    problems = evenly_spaced_by_set(held_out, recipe.data.eval_problems, notes)
    style, template = recipe.data.prompt_style, template_of(recipe.data)
    prompts = prompts_of(problems, tokenizer, style, recipe.data.max_prompt_tokens, template)
    record = EvalRecord(output, settings_of(recipe, names, problems), inputs=[Path(one) for one in names.values()])
    with file_lock(output / ".lock"), open_display(show=True) as display:
        for note in notes:
            display.say(note)
        display.say(first_prompt(tokenizer, prompts[0].ids, style, template))
        evaluation = _evaluate(recipe, tokenizer, prompts, record, display, output)
        display.table(on_screen(table(evaluation)))
    write_text(output / "table.md", markdown(table(evaluation)) + "\n")
    summary = {
        "average": asdict(evaluation.average),
        "sets": [asdict(one) for one in evaluation.sets],
        "seconds": evaluation.seconds,
    }
    write_json(output / "summary.json", to_json_value(summary))
    return evaluation


def settings_of(recipe: Recipe, names: Mapping[str, str], problems: Sequence[Problem]) -> dict[str, Any]:
    """What must be equal to continue an evaluation of `problems`, of the sets `names` (name -> source).

    The problems, the file of each of the user's reward functions and that of the chat template count by their
    checksums: a file may change behind its name.
    """
    keys = {"samples", "temperature", "top_p", "max_tokens"}
    hub = hub_model(recipe.model)
    return {
        "model": asdict(hub) if hub else str(recipe.model.path.resolve()),
        "weights": weights_fingerprint(recipe.model) or None,  # a run writes its later ones to the same place
        "sources": dict(names),
        "sampling": {name: recipe.eval.of(name).model_dump(include=keys) for name in names},
        "max_response_tokens": recipe.rollout.max_response_tokens,
        "data": recipe.data.model_dump(mode="json"),
        "reward": recipe.reward.model_dump(mode="json", exclude={"workers"}),
        "problems": sums_by_set(problems),
        "reward files": {name: source_sum(one.function) for name, one in recipe.reward.table.items()},
        "episodes": recipe.rollout.function and [recipe.rollout.function, source_sum(recipe.rollout.function)],
        "template file": file_sum(recipe.data.chat_template),
    }


class EvalRecord:
    """The rows of an evaluation on disk: appended as problems finish, read by the run that continues it."""

    def __init__(self, directory: Path, settings: dict[str, Any], inputs: Sequence[Path] = ()) -> None:
        """Open or create the record.

        Raises UserError when its settings are others, or when the directory holds files of these names that no
        evaluation wrote (`check_output`).
        """
        self._rows = directory / "problems.jsonl"
        settings_file = directory / SETTINGS
        own = settings_file.is_file()
        before = read_json(settings_file) if own else settings
        unknown = LATER - before.keys()
        differing = [key for key in settings if key not in unknown and not _same(before.get(key), settings[key])]
        if differing:
            raise UserError(
                f"{directory} holds an evaluation with other {', '.join(differing)}; choose another directory"
            )
        for name in (SETTINGS, "problems.jsonl", "summary.json", "table.md", "engine.log"):
            check_output(directory / name, f"--out {directory}: {name}", own=own, inputs=inputs)
        make_directory(directory, f"--out {directory}")
        write_json(settings_file, settings)

    def read(self) -> list[ProblemResult]:
        """Finished problems; truncates a last line that was written in part. UserError names a damaged line."""
        if not self._rows.exists():
            return []
        raw = self._rows.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) < len(raw):
            with self._rows.open("r+b") as file:
                file.truncate(len(whole))
        return [_graded(row, f"{self._rows}:{line}") for line, row in rows(self._rows)]

    def append(self, graded: ProblemResult) -> None:
        """Add a finished problem; UserError when the disk is full."""
        with full_disk_as_user_error(self._rows), self._rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_written(graded)) + "\n")


def _same(before: Any, now: Any) -> bool:
    """Whether two settings are equal; a key that is missing, as in an older version's, is one without a value."""
    if isinstance(before, dict) and isinstance(now, dict):
        return all(_same(before.get(key), now.get(key)) for key in before.keys() | now.keys())
    return bool(before == now)


def _written(graded: ProblemResult) -> dict[str, Any]:
    """A line of problems.jsonl; the row and the untouched gold stay in the data, where the problem's id finds them."""
    bare = replace(graded.problem, gold=None, row={})
    written = asdict(replace(graded, problem=bare))
    del written["problem"]["gold"], written["problem"]["row"]
    return written


def _graded(row: dict[str, Any] | str, place: str) -> ProblemResult:
    """A row of problems.jsonl; UserError when it is not one."""
    try:
        if isinstance(row, str):
            raise TypeError(row)
        messages = tuple((role, text) for role, text in row["problem"].get("messages", ()))
        return ProblemResult(**{**row, "problem": Problem(**{**row["problem"], "messages": messages})})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{place}: not a finished problem ({error}); delete the line to evaluate it again") from None


def table(evaluation: Evaluation) -> list[list[str]]:
    """Header and lines of figures with 95 % intervals; K is a set's own number of responses to each problem.

    Accuracies and pass@k are percentages, mean rewards are as they are.
    """
    passes = sorted({k for one in evaluation.sets for k in one.passes if k > 1})
    columns = ["K", "mean@K", *(f"pass@{k}" for k in passes), "majority@K"]
    lines = [["set", "problems", *columns, "tokens", "cut", "s"]]
    for one in evaluation.sets:
        figures = [_text(one.mean, one.measure), *(_text(one.passes[k]) if k in one.passes else "" for k in passes)]
        figures.append(_text(one.majority, one.measure) if one.majority else UNDEFINED)
        responses = one.problems * one.samples
        ends = [
            f"{one.tokens / responses:.0f}",
            f"{one.truncated / responses:.1%}",
            f"{evaluation.seconds[one.name]:.0f}",
        ]
        lines.append([one.name, str(one.problems), str(one.samples), *figures, *ends])
    average = _text(evaluation.average, evaluation.sets[0].measure)
    return [*lines, ["average", "", "", average, *[""] * (len(columns) + 1)]]


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table for a page."""
    head, *body = lines
    rows = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "\n".join("".join(f"| {cell} " if cell else "| " for cell in cells) + "|" for cells in rows)


def on_screen(lines: Sequence[Sequence[str]]) -> Table:
    """A table for a terminal."""
    (first, *others), *body = lines
    shown = new_table("", first, *(f">{name}" for name in others))
    for cells in body:
        shown.add_row(*(Text(visible(cell)) for cell in cells))
    return shown


def _evaluate(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
    record: EvalRecord,
    display: Display,
    output: Path,
) -> Evaluation:
    """Evaluate the prompts whose problems the record lacks; the engine starts only where there are some."""
    known = {graded.problem.id: graded for graded in record.read()}
    by_set: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_set.setdefault(prompt.problem.source, []).append(prompt)
    seconds = dict.fromkeys(by_set, 0.0)
    if any(prompt.problem.id not in known for prompt in prompts):
        engine = Engine.start(engine_spec(recipe), recipe.model.directory, output / "engine.log")
        try:
            with Verifier(recipe.reward) as verifier:
                engine.wait_ready()
                for name, own in by_set.items():
                    missing = [prompt for prompt in own if prompt.problem.id not in known]
                    how = held_out_sampling(recipe.eval, name, recipe.rollout, recipe.run, tokenizer)
                    start = time.perf_counter()
                    with display.bar(name, len(missing), "problems") as bar:
                        groups = engine.generate(missing, recipe.eval.of(name).samples, how)
                        for group in scored(groups, verifier, tokenizer):
                            bar.advance(tokens=group.tokens)
                            known[group.prompt.problem.id] = graded = problem_result(group)
                            record.append(graded)
                    seconds[name] = time.perf_counter() - start
        finally:
            engine.stop()
    measure = measure_of(recipe.reward)
    summaries = [summarize(name, [known[prompt.problem.id] for prompt in own], measure) for name, own in by_set.items()]
    return Evaluation(summaries, seconds)


def _text(interval: Interval, measure: Measure = "accuracy") -> str:
    if measure == "accuracy":
        return f"{100 * interval.value:.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"
    known = math.isfinite(interval.low) and math.isfinite(interval.high)
    return f"{interval.value:.4g}" + (f" [{interval.low:.4g}, {interval.high:.4g}]" if known else "")
