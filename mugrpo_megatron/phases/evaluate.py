"""Held-out figures during a run: all engines share the problems of each set, rank 0 puts the rewards together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mugrpo_megatron.engine.launch import held_out_sampling
from mugrpo_megatron.engine.queue import PromptQueue
from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.evaluation.grading import grade, mean_at_k, measure_of
from mugrpo_megatron.observe.progress import Bar
from mugrpo_megatron.phases.generate import shared_queue, tell_failures
from mugrpo_megatron.phases.optimize import save_and_stop
from mugrpo_megatron.phases.sync import sleep_engines, sync_weights
from mugrpo_megatron.recipe.sections import EvalSection
from mugrpo_megatron.report.evaluations import SetFigures, figures_of
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.generator import Generator
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.samples import Prompt, Response

Scored = dict[int, tuple[list[float], int]]
"""A held-out problem's place -> the rewards of its responses, and their tokens."""


def evaluate_before_stage(run: Run, cursor: Cursor) -> None:
    """Evaluate before the first stage and before every `eval.every_stages`-th one after it; the engines are awake.

    Where no engine is left, or the run is asked to stop, nothing is logged: generation comes next and sees to both.
    """
    every = run.recipe.eval.every_stages
    if (cursor.stage == 0 or (every and cursor.stage % every == 0)) and not _evaluated(run, cursor):
        _evaluate(run, cursor)


def evaluate_inside_stage(run: Run, cursor: Cursor) -> None:
    """Evaluate where `eval.every_updates` of the stage's updates are taken, or a multiple; a run without engines never.

    Training goes on as if nothing had happened: the learner's state leaves the devices and comes back bit by bit.
    """
    if cursor.due(run.evaluates_every):
        evaluate_weights(run, cursor)


def evaluate_weights(run: Run, cursor: Cursor) -> None:
    """Wake the engines with the learner's weights, evaluate, and let them rest; the same weights once.

    Engines that fail are restarted: raises EngineFailure on every rank after `engine.max_failures` failures of one
    in a row. Raises Stopped, with everything saved, when the run is asked to stop meanwhile; it evaluates on resuming.
    """
    done = _evaluated(run, cursor)
    while not done:
        sync_weights(run, cursor)
        done = _evaluate(run, cursor)
        sleep_engines(run)
        if any(run.world.any_rank(not done and run.stop.asked)):
            save_and_stop(run, cursor)


def sampled_alike(section: EvalSection, names: Sequence[str]) -> list[list[str]]:
    """The sets in groups that are sampled in the same way: the engines answer a group without a pause."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in names:
        own = section.of(name)
        groups.setdefault((own.samples, own.temperature, own.top_p, own.max_tokens), []).append(name)
    return list(groups.values())


def _evaluated(run: Run, cursor: Cursor) -> bool:
    """Whether the log holds an evaluation of these weights, as after a resume or an engine's failure. Collective."""
    return any(run.world.any_rank(run.is_main and cursor.updates in run.log.evaluated))


def _evaluate(run: Run, cursor: Cursor) -> bool:
    """Sample and score every held-out set with the engines' weights and log the figures; whether it came to that.

    It does not where no engine is left or the run is asked to stop. Problems of an engine that fails go to the others.
    """
    own = run.generator.problems.held_out.problems if run.generator else []
    names = run.world.broadcast([problem.source for problem in own])
    scored: Scored = {}
    with run.phase("eval", cursor), run.display.bar("evaluate", len(names), "problems") as bar:
        for alike in sampled_alike(run.recipe.eval, list(dict.fromkeys(names))):
            if not _score(run, alike[0], [place for place, name in enumerate(names) if name in alike], scored, bar):
                break
        done = len(scored) == len(names)
        if done:
            _log(run, cursor, names, scored, bar)
    tell_failures(run)
    return done


def _log(run: Run, cursor: Cursor, names: Sequence[str], scored: Scored, bar: Bar) -> None:
    """One row of the log, set by set; `names` are those of the problems' sets. The engines have proved to work."""
    measure = measure_of(run.recipe.reward)
    sets = {}
    for name in dict.fromkeys(names):
        rewards = [scored[place][0] for place, other in enumerate(names) if other == name]
        sets[name] = SetFigures(mean_at_k(rewards, measure), len(rewards), len(rewards[0]))
    figures = figures_of(measure, sets) | {"tokens": float(sum(tokens for _, tokens in scored.values()))}
    run.log.evaluation(cursor.stage, cursor.updates, cursor.age, figures)
    bar.values[measure] = figures[f"{measure}/mean"]
    if len(sets) > 1:
        bar.values |= {name: one.mean.value for name, one in sets.items()}
    if run.generator:
        run.generator.failures_in_a_row = 0


def _score(run: Run, name: str, wanted: Sequence[int], scored: Scored, bar: Bar) -> bool:
    """Add the rewards of the problems at the places `wanted`, sampled as the set `name` is, to `scored`.

    Collective; False when the run is to go no further, for want of an engine or because it was asked to stop.
    """
    while missing := [place for place in wanted if place not in scored]:
        queue = shared_queue(run, missing)
        own = _grade(run, run.generator, name, queue, bar) if run.generator else {}
        run.world.barrier()
        found = {place: one for part in run.world.gather(own) for place, one in part.items()}
        scored |= found
        bar.advance(len(scored) - bar.done, sum(tokens for _, tokens in scored.values()) - bar.tokens)
        if not found or any(run.world.any_rank(run.stop.asked)):
            return False
    return True


def _grade(run: Run, generator: Generator, name: str, queue: PromptQueue, bar: Bar) -> Scored:
    """What this rank's engine claims of the queue, scored."""
    held_out = generator.problems.held_out
    places = {id(problem): place for place, problem in enumerate(held_out.problems)}
    how = held_out_sampling(run.recipe, generator.tokenizer, name)
    scored: Scored = {}

    def take(held: int, slots: int) -> list[Prompt]:
        return [Prompt(i, held_out.problems[i], held_out.prompts[i]) for i in queue.take(held, slots)]

    def generate(prompts: Iterable[Prompt], samples: int) -> Iterator[tuple[Prompt, list[Response]]]:
        for group in generator.engine.generate_from(take, samples, how):
            yield group
            if run.stop.asked:  # what is in flight is aborted, what is here is scored
                queue.close()
                break

    samples = run.recipe.eval.of(name).samples
    try:
        if generator.engine.running:
            for one in grade(generate, generator.verifier, generator.tokenizer, (), samples):
                scored[places[id(one.problem)]] = one.rewards, sum(one.tokens)
                bar.advance(tokens=sum(one.tokens))
    except EngineFailure as failure:
        generator.failed(failure)
    return scored
