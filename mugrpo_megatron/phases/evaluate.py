"""Evaluates the policy during a run: all engines share the problems of each held-out set, all ranks get the answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from mugrpo_megatron.engine.launch import held_out_sampling
from mugrpo_megatron.evaluation.estimators import SetFigures, figures_of
from mugrpo_megatron.evaluation.scoring import EPISODE, ScoredGroup, Scorer, mean_at_k, measure_of
from mugrpo_megatron.observe.examples import Example, example_indices, shorten, write_examples
from mugrpo_megatron.observe.progress import Bar
from mugrpo_megatron.phases.rounds import Failed, Outcome, open_round, report
from mugrpo_megatron.recipe.scoring import EvalSection
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.leader import Leader
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.samples import Prompt


@dataclass(frozen=True, slots=True)
class Answers:
    """Scores and counts of the responses to one held-out problem."""

    rewards: list[float]
    tokens: int
    truncated: int
    unparsed: int
    """Number of responses in which no answer was found."""
    called: float
    """Number of responses in which the model called a tool."""
    failed: int
    """Number of episodes that failed; their reward is 0."""
    kept: Example | None
    """The first response, if this problem is one of those whose responses are stored."""


T = TypeVar("T")
SHOWN = 6
"""The number of problems of each held-out set whose first response every evaluation stores, for the report."""
ByPlace = dict[int, Answers]
"""Index of a held-out problem among those of all sets -> its answers."""


def evaluation_due(run: Run, cursor: Cursor) -> bool:
    """Whether an evaluation has to take place at the cursor. Collective.

    The recipe asks for one before every `eval.every_stages`-th stage from the first on (with 0 before the first alone),
    and after every `eval.every_updates`-th update of a stage (with 0 after none). The same weights are not evaluated
    twice, and a run without engines evaluates nothing.
    """
    section = run.recipe.eval
    before_stage = cursor.stage % section.every_stages == 0 if section.every_stages else cursor.stage == 0
    due = before_stage if cursor.age == 0 else cursor.due(section.every_updates)
    return run.world.engines > 0 and due and not is_evaluated(run, cursor)


def is_evaluated(run: Run, cursor: Cursor) -> bool:
    """Whether rank 0's log has an evaluation after `cursor.updates` updates of the run, by this process or an earlier
    one. Collective."""
    return run.world.broadcast(cursor.updates in run.log.evaluated)


def sampled_alike(section: EvalSection, names: Sequence[str]) -> list[list[str]]:
    """Group the held-out sets `names` that have the same sampling settings, so that one round can sample them."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in names:
        own = section.of(name)
        groups.setdefault((own.samples, own.temperature, own.top_p, own.max_tokens), []).append(name)
    return list(groups.values())


def evaluate(run: Run, leader: Leader | None, cursor: Cursor) -> None:
    """Sample and score every held-out set with the engines' weights, and log the figures. Collective.

    Training continues bitwise as without it. Problems of an engine that fails go to the other engines. If every engine
    has failed, or the run was asked to stop, before all problems are answered, no figures are logged, so that
    `is_evaluated` returns False. In this case EngineFailure is raised on every rank if an engine has failed
    MOST_FAILURES times in a row.
    """
    names = run.world.broadcast([problem.source for problem in leader.problems.held_out.problems] if leader else [])
    shown = set(example_indices(names, SHOWN))
    answers: ByPlace = {}
    failures: list[Failed] = []

    def answer(group: ScoredGroup) -> Answers:
        return _answers(group, group.prompt.index in shown)

    with run.phase("eval", cursor), run.display.bar("evaluate", len(names), "problems") as bar:
        for alike in sampled_alike(run.recipe.eval, list(dict.fromkeys(names))):
            places = [place for place, name in enumerate(names) if name in alike]
            found, failed = _answers_of_alike(run, leader, alike[0], places, bar, answer)
            answers |= found
            failures += failed
            if len(found) < len(places):
                break
        if done := len(answers) == len(names):
            _log(run, cursor, names, answers, bar)
            if leader:
                leader.progressed()
    report(run, [replace(failed, in_a_row=0) for failed in failures] if done else failures)


def _answers_of_alike(
    run: Run, leader: Leader | None, name: str, places: Sequence[int], bar: Bar, answer: Callable[[ScoredGroup], T]
) -> tuple[dict[int, T], list[Failed]]:
    """Run rounds until every problem at `places` is answered, a round answers none, or the run is asked to stop.

    All these problems are sampled with the settings of the set `name`. Returns place -> result of `answer`, of all
    ranks, and the failures of engines.
    """
    answers: dict[int, T] = {}
    failures: list[Failed] = []
    while missing := [place for place in places if place not in answers]:
        outcome = answer_set(run, leader, name, missing, bar, answer)
        failures += outcome.failures
        for part in outcome.results:
            answers |= part
        if not any(outcome.results) or outcome.stopping:
            break
    return answers, failures


def answer_set(
    run: Run, leader: Leader | None, name: str, missing: Sequence[int], bar: Bar, answer: Callable[[ScoredGroup], T]
) -> Outcome[dict[int, T]]:
    """Run one round over the held-out problems whose indices are `missing`, with the sampling of the set `name`.
    Collective.

    `answer` is called with each group once it is scored. The result of a rank maps the indices of the problems that
    it scored to what `answer` returned.
    """
    recipe, round = run.recipe, open_round(run, leader, missing, bar, durable=False)
    own: dict[int, T] = {}
    if leader:
        held_out = leader.problems.held_out
        how = held_out_sampling(recipe.eval, name, recipe.rollout, recipe.run, leader.tokenizer)

        def prompt_of(place: int) -> Prompt:
            return Prompt(place, held_out.problems[place], held_out.prompts[place])

        sampled = round.groups(prompt_of, recipe.eval.of(name).samples, how)
        for group in Scorer(leader.verifier, leader.tokenizer).scored(sampled, run.stop.poll):
            own[group.prompt.index] = answer(group)
    return round.end(own)


def _log(run: Run, cursor: Cursor, names: Sequence[str], answers: ByPlace, bar: Bar) -> None:
    """Log the figures of all held-out sets as one row; `names` has the name of each problem's set."""
    measure = measure_of(run.recipe.reward)
    sets: dict[str, SetFigures] = {}
    shares: dict[str, float] = {}
    for name in dict.fromkeys(names):
        of_set = [answers[place] for place, other in enumerate(names) if other == name]
        own = [each.rewards for each in of_set]
        sets[name] = SetFigures(mean_at_k(own, measure), len(own), len(own[0]))
        responses = len(own) * len(own[0])
        shares |= {f"truncated/{name}": sum(each.truncated for each in of_set) / responses}
        if run.recipe.rollout.episodes:
            shares |= {f"called/{name}": sum(each.called for each in of_set) / responses}
            shares |= {f"failed/{name}": sum(each.failed for each in of_set) / responses}
        if measure == "accuracy":
            if run.recipe.reward.finds_answers:
                shares |= {f"unparsed/{name}": sum(each.unparsed for each in of_set) / responses}
            shares |= {f"passed/{name}": sum(max(each) >= 1.0 for each in own) / len(own)}
    tokens = float(sum(each.tokens for each in answers.values()))
    figures = figures_of(measure, sets) | shares | {"tokens": tokens}
    shown = [answers[place].kept for place in sorted(answers)]
    if run.is_main and any(shown):
        write_examples(run.directory.samples(cursor.updates), [one for one in shown if one])
    run.log.evaluation(cursor.stage, cursor.updates, cursor.age, figures)
    bar.values[measure] = figures[f"{measure}/mean"]
    if len(sets) > 1:
        bar.values |= {name: one.mean.value for name, one in sets.items()}


def _answers(group: ScoredGroup, keep: bool) -> Answers:
    tokens, group = group.tokens, group.episodes
    return Answers(
        rewards=[score.reward for score in group.scores],
        tokens=tokens,
        truncated=sum(response.finish_reason == "length" for response in group.responses),
        unparsed=sum(not score.extracted for score in group.scores),
        called=sum(score.components.get(f"{EPISODE}called", 0.0) for score in group.scores),
        failed=sum(response.episode is not None and response.episode.failed for response in group.responses),
        kept=_example(group) if keep else None,
    )


def _example(group: ScoredGroup) -> Example:
    problem, response, score = group.prompt.problem, group.responses[0], group.scores[0]
    return Example(
        set=problem.source,
        problem=problem.id,
        question=problem.question or (problem.messages[-1]["content"] or "" if problem.messages else ""),
        gold=problem.answer,
        text=shorten(group.texts[0]),
        extracted=shorten(score.extracted),
        why=score.why,
        reward=score.reward,
        tokens=len(response.ids),
        truncated=response.finish_reason == "length",
        components=dict(score.components),
    )
