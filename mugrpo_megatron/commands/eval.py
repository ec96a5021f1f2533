"""`mugrpo eval`: evaluate a checkpoint on data sets; the same command continues an interrupted evaluation."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from mugrpo_megatron.checks.engines import EngineSetup
from mugrpo_megatron.checks.preflight import check_engine
from mugrpo_megatron.commands.common import say
from mugrpo_megatron.data.fields import unread_fields
from mugrpo_megatron.data.files import rows
from mugrpo_megatron.data.prepare import PreparedData, evenly_spaced_by_set, held_out_problems
from mugrpo_megatron.data.problems import check_sets, held_out_sets, named_sources
from mugrpo_megatron.data.prompts import FittingPrompts, first_prompt, fitting_prompts_by_set, rendered, template_of
from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.engine.client import Engine
from mugrpo_megatron.engine.placement import ALONE
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.evaluation.estimators import Interval, Measure, macro_average
from mugrpo_megatron.evaluation.scoring import (
    ProblemResult,
    ScoredGroup,
    Summary,
    measure_of,
    problem_result,
    summarize,
)
from mugrpo_megatron.files.durable import (
    check_output,
    full_disk_as_user_error,
    make_directory,
    open_nofollow,
    write_json,
    write_text,
)
from mugrpo_megatron.files.hf_config import read_model_config
from mugrpo_megatron.files.json_text import read_json, to_json_value
from mugrpo_megatron.observe.log import MetricLog
from mugrpo_megatron.observe.progress import Display, new_table, open_display
from mugrpo_megatron.phases.evaluate import answer_set
from mugrpo_megatron.phases.rounds import report
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.functions import source_sum
from mugrpo_megatron.rewards.pool import Verifier
from mugrpo_megatron.run.directory import RunDirectory, file_lock
from mugrpo_megatron.run.engine_spec import engine_spec
from mugrpo_megatron.run.initial_model import hub_model, weights_fingerprint, with_model
from mugrpo_megatron.run.inputs import file_sum, sums_by_set
from mugrpo_megatron.run.leader import Leader, make_leader
from mugrpo_megatron.run.record import RunRecord
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.run.world import World
from mugrpo_megatron.samples import Problem
from mugrpo_megatron.terminal import visible

SETTINGS = "settings.json"
"""File that marks a directory as an evaluation's."""
NEW_SETTINGS = {"problems", "reward files", "template file", "episodes"}
"""Keys of the settings that earlier versions did not write, so that their absence is no difference."""
UNDEFINED = "–"
"""The table's text for majority@K where no answer was extracted."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    sets: list[Summary]
    seconds: dict[str, float]
    """Set -> wall-clock seconds that this command took for the set; 0 if an earlier command had finished the set."""

    @property
    def average(self) -> Interval:
        """Unweighted mean of the sets' mean@K."""
        return macro_average([summary.mean for summary in self.sets])


def run(recipe: Recipe, sources: Sequence[str], output: Path) -> Evaluation:
    """Evaluate `model.path` on data sets, each with its settings in `[eval]`, and write the results to `output`.

    Writes problems.jsonl (a row for each problem, as it finishes), summary.json and table.md. An evaluation with the
    same settings in `output` is continued. Raises UserError if `output` holds an evaluation with other settings, or
    files that no evaluation wrote, and for bad data or a bad model.
    """
    names = held_out_sets(",".join(sources), "--data")
    # `[eval.sets]` of a run's recipe may name sets that this evaluation does not include.
    check_sets(recipe.eval, names.keys() | named_sources(recipe.data.eval).keys(), "--data and data.eval")
    recipe = with_model(recipe, say)
    check_engine(EngineSetup(recipe, read_model_config(recipe.model.directory)))
    tokenizer = load_tokenizer(recipe.model.directory)
    notes: list[str] = []
    held_out = held_out_problems(",".join(sources), recipe.data, recipe.reward, notes, "--data")
    recipe.reward.check_sources(problem.data_source for problem in held_out)
    problems = evenly_spaced_by_set(held_out, recipe.data.eval_problems, notes)
    style, template = recipe.data.prompt_style, template_of(recipe.data)
    fits = fitting_prompts_by_set(problems, tokenizer, style, recipe.data.max_prompt_tokens, template)
    notes += unread_fields(problems, partial(rendered, tokenizer=tokenizer, style=style, template=template))
    record = EvalRecord(
        output, settings_of(recipe, names, problems), inputs=[Path(source) for source in names.values()]
    )
    with file_lock(output / ".lock"), open_display(show=True) as display:
        for note in notes:
            display.say(note)
        display.say(first_prompt(tokenizer, fits.prompts[0], style, template))
        evaluation = _evaluate(recipe, tokenizer, fits, record, display, output)
        display.table(on_screen(table(evaluation)))
    write_text(output / "table.md", markdown(table(evaluation)) + "\n")
    summary = {
        "average": asdict(evaluation.average),
        "sets": [asdict(set_summary) for set_summary in evaluation.sets],
        "seconds": evaluation.seconds,
    }
    write_json(output / "summary.json", to_json_value(summary))
    return evaluation


def settings_of(recipe: Recipe, names: Mapping[str, str], problems: Sequence[Problem]) -> dict[str, Any]:
    """Returns the settings that decide whether an evaluation of `problems` may be continued: all must be equal.

    `names` is set -> source. Problems, users' reward files and the chat template are in the settings as checksums,
    since a file may change under the same name.
    """
    keys = {"samples", "temperature", "top_p", "max_tokens"}
    hub = hub_model(recipe.model)
    return {
        "model": asdict(hub) if hub else str(recipe.model.directory.resolve()),
        # The path alone does not name the weights: a run that is still training writes its later weights there.
        "weights": weights_fingerprint(recipe.model) or None,
        "sources": dict(names),
        "sampling": {name: recipe.eval.of(name).model_dump(include=keys) for name in names},
        "max_response_tokens": recipe.rollout.max_response_tokens,
        "data": recipe.data.model_dump(mode="json"),
        "reward": recipe.reward.model_dump(mode="json", exclude={"workers"}),
        "problems": sums_by_set(problems),
        "reward files": {name: source_sum(entry.function) for name, entry in recipe.reward.table.items()},
        "episodes": recipe.rollout.episodes and [recipe.rollout.episodes, source_sum(recipe.rollout.episodes)],
        "template file": file_sum(recipe.data.chat_template),
    }


class EvalRecord:
    """The file of an evaluation's results, to which a row is appended as each problem finishes."""

    def __init__(self, directory: Path, settings: dict[str, Any], inputs: Sequence[Path] = ()) -> None:
        """Open or create the record.

        Raises UserError if the directory holds an evaluation with other settings, or files with an evaluation's names
        that no evaluation wrote (`check_output`).
        """
        self._rows = directory / "problems.jsonl"
        settings_file = directory / SETTINGS
        is_evaluation = settings_file.is_file()
        before = read_json(settings_file) if is_evaluation else settings
        unknown = NEW_SETTINGS - before.keys()
        differing = [key for key in settings if key not in unknown and not _same(before.get(key), settings[key])]
        if differing:
            raise UserError(
                f"{directory} holds an evaluation with other settings ({', '.join(differing)}); choose another --out"
            )
        for name in (SETTINGS, "problems.jsonl", "summary.json", "table.md", "engine.log"):
            check_output(directory / name, f"--out {directory}: {name}", own=is_evaluation, inputs=inputs)
        make_directory(directory, f"--out {directory}")
        write_json(settings_file, settings)

    def read(self) -> list[ProblemResult]:
        """Returns the results of the finished problems, and removes a last line that is incomplete.

        Raises UserError with the number of the line if another line is damaged.
        """
        if not self._rows.exists():
            return []
        raw = self._rows.read_bytes()
        complete = raw.rfind(b"\n") + 1
        if complete < len(raw):
            with open_nofollow(self._rows, "r+b") as file:
                file.truncate(complete)
        return [_from_row(row, f"{self._rows}:{line}") for line, row in rows(self._rows)]

    def append(self, result: ProblemResult) -> None:
        """Append the result of a finished problem; UserError if the disk is full."""
        row = asdict(replace(result, problem=replace(result.problem, gold=None, row={})))
        del row["problem"]["gold"], row["problem"]["row"]  # gold and row can be found by the problem's id
        with full_disk_as_user_error(self._rows), open_nofollow(self._rows, "ab") as file:
            file.write((json.dumps(row) + "\n").encode())


def _same(before: Any, now: Any) -> bool:
    """Whether two settings are equal; a missing key, as in an older version's file, counts as null."""
    if isinstance(before, dict) and isinstance(now, dict):
        return all(_same(before.get(key), now.get(key)) for key in before.keys() | now.keys())
    return bool(before == now)


def _from_row(row: dict[str, Any] | str, line: str) -> ProblemResult:
    """Returns the result in a row of problems.jsonl. Raises UserError, which begins with `line`, for a damaged row."""
    try:
        if isinstance(row, str):
            raise TypeError(row)
        messages = tuple(map(_message, row["problem"].get("messages", ())))
        return ProblemResult(**{**row, "problem": Problem(**{**row["problem"], "messages": messages})})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{line}: damaged, not the result of a problem ({error}); delete it, and the problem is evaluated again"
        ) from None


def _message(turn: Any) -> dict[str, Any]:
    """Returns a chat message as a dictionary; earlier versions wrote it as a pair of role and content."""
    return turn if isinstance(turn, dict) else dict(zip(("role", "content"), turn, strict=True))


def table(evaluation: Evaluation) -> list[list[str]]:
    """Returns the table of an evaluation as rows of text: a header, a row for each set, and the average.

    Figures have 95 % intervals. K is a set's number of responses to each problem. Accuracies and pass@k are
    percentages, mean rewards plain numbers.
    """
    passes = sorted({k for summary in evaluation.sets for k in summary.passes if k > 1})
    columns = ["K", "mean@K", *(f"pass@{k}" for k in passes), "majority@K"]
    lines = [["set", "problems", *columns, "tokens", "cut", "s"]]
    for row in evaluation.sets:
        figures = [_text(row.mean, row.measure), *(_text(row.passes[k]) if k in row.passes else "" for k in passes)]
        figures.append(_text(row.majority, row.measure) if row.majority else UNDEFINED)
        responses = row.problems * row.samples
        costs = [
            f"{row.tokens / responses:.0f}",
            f"{row.truncated / responses:.1%}",
            f"{evaluation.seconds[row.name]:.0f}",
        ]
        lines.append([row.name, str(row.problems), str(row.samples), *figures, *costs])
    average = _text(evaluation.average, evaluation.sets[0].measure)
    return [*lines, ["average", "", "", average, *[""] * (len(columns) + 1)]]


def markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *body = lines
    rows = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "\n".join("".join(f"| {cell} " if cell else "| " for cell in cells) + "|" for cells in rows)


def on_screen(lines: Sequence[Sequence[str]]) -> Table:
    (first, *others), *body = lines
    screen = new_table("", first, *(f">{name}" for name in others))
    for cells in body:
        screen.add_row(*(Text(visible(cell)) for cell in cells))
    return screen


def _evaluate(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    held_out: FittingPrompts,
    record: EvalRecord,
    display: Display,
    output: Path,
) -> Evaluation:
    """Evaluate the problems that the record lacks; no engine is started if it lacks none."""
    results = {result.problem.id: result for result in record.read()}
    by_set: dict[str, list[int]] = {}
    for place, problem in enumerate(held_out.problems):
        by_set.setdefault(problem.source, []).append(place)
    seconds = dict.fromkeys(by_set, 0.0)
    if any(problem.id not in results for problem in held_out.problems):
        run = Run(recipe, RunDirectory(output), World(engines=1), MetricLog(), display, RunRecord("evaluation"))
        engine = Engine.start(engine_spec(recipe), recipe.model.directory, output / "engine.log")
        try:
            with Verifier(recipe.reward) as verifier:
                problems = PreparedData(FittingPrompts([], [], 0), held_out, [])
                leader = make_leader(recipe, ALONE, engine, verifier, problems)
                engine.wait_ready()
                for name, places in by_set.items():
                    start = time.perf_counter()
                    _evaluate_set(run, leader, name, places, results, record)
                    seconds[name] = time.perf_counter() - start
        finally:
            engine.stop()
    measure = measure_of(recipe.reward)
    summaries = [
        summarize(name, [results[held_out.problems[place].id] for place in places], measure)
        for name, places in by_set.items()
    ]
    return Evaluation(summaries, seconds)


def _evaluate_set(
    run: Run, leader: Leader, name: str, places: Sequence[int], results: dict[str, ProblemResult], record: EvalRecord
) -> None:
    """Answer and score the problems of the set `name`, whose indices are `places`, until `results` has all of them."""
    ids = [leader.problems.held_out.problems[place].id for place in places]

    def keep(group: ScoredGroup) -> None:
        results[group.prompt.problem.id] = result = problem_result(group)
        record.append(result)
        leader.progressed()

    with run.display.bar(name, sum(problem not in results for problem in ids), "problems") as bar:
        while missing := [place for place, problem in zip(places, ids, strict=True) if problem not in results]:
            with leader.guarded():
                leader.restart_if_failed()
                leader.engine.wait_ready()
            report(run, answer_set(run, leader, name, missing, bar, keep).failures)


def _text(interval: Interval, measure: Measure = "accuracy") -> str:
    if measure == "accuracy":
        return f"{100 * interval.value:.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"
    finite = math.isfinite(interval.low) and math.isfinite(interval.high)
    return f"{interval.value:.4g}" + (f" [{interval.low:.4g}, {interval.high:.4g}]" if finite else "")
