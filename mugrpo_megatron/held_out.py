"""Held-out accuracy during a run: all engines share the problems, rank 0 puts the grades together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.evaluate import Graded, grade, summarize
from mugrpo_megatron.generation import shared_queue
from mugrpo_megatron.generator import Generator
from mugrpo_megatron.observe.progress import Bar
from mugrpo_megatron.rollout.queue import PromptQueue
from mugrpo_megatron.rollout.sampler import held_out_sampling
from mugrpo_megatron.run import Run
from mugrpo_megatron.samples import Prompt, Response
from mugrpo_megatron.schedule import Cursor


def evaluate_if_due(run: Run, cursor: Cursor) -> None:
    """Held-out accuracy before the first stage and before every `eval.every_stages`-th one after it."""
    every = run.recipe.eval.every_stages
    if cursor.stage == 0 or (every and cursor.stage % every == 0):
        evaluate(run, cursor)


def evaluate(run: Run, cursor: Cursor) -> None:
    """Held-out accuracy of the engines' present weights; samples apart from training, so that it disturbs nothing.

    Problems of an engine that fails go to the others. Raises EngineFailure on every rank when none is left.
    """
    known: dict[int, Graded] = {}
    total = run.world.broadcast(len(run.generator.problems.held_out.problems) if run.generator else 0)
    with run.phase("eval", cursor), run.display.bar("evaluate", total, "problems") as bar:
        while missing := [index for index in range(total) if index not in known]:
            queue = shared_queue(run, missing)
            own = _grade(run, run.generator, queue, bar) if run.generator else {}
            run.world.meet()
            found = {index: graded for part in run.world.gather(own) for index, graded in part.items()}
            known |= found
            bar.advance(len(known) - bar.done, sum(sum(one.tokens) for one in known.values()) - bar.tokens)
            if not found:
                causes = run.world.gather(str(run.generator.failure) if run.generator else "")
                raise EngineFailure(f"no engine is left to evaluate with: {causes[0]}")
        result = summarize("held out", [known[index] for index in range(total)])
        bar.values["accuracy"] = result.mean.value
    run.log.evaluation(
        cursor.stage,
        cursor.updates,
        {
            "accuracy": result.mean.value,
            "low": result.mean.low,
            "high": result.mean.high,
            "problems": result.problems,
            "samples": result.samples,
            "tokens": result.tokens,
        },
    )


def _grade(run: Run, generator: Generator, queue: PromptQueue, bar: Bar) -> dict[int, Graded]:
    """What this rank's engine claims of the queue, graded, by the problem's index."""
    held_out, graded = generator.problems.held_out, {}
    places = {id(problem): index for index, problem in enumerate(held_out.problems)}
    how = held_out_sampling(run.recipe, generator.tokenizer)

    def take(held: int, slots: int) -> list[Prompt]:
        return [Prompt(i, held_out.problems[i], held_out.prompts[i]) for i in queue.take(held, slots)]

    def generate(prompts: Iterable[Prompt], samples: int) -> Iterator[tuple[Prompt, list[Response]]]:
        yield from generator.engine.generate_from(take, samples, how)

    try:
        if generator.engine.running:
            for one in grade(generate, generator.verifier, generator.tokenizer, (), run.recipe.eval.samples):
                graded[places[id(one.problem)]] = one
                bar.advance(tokens=sum(one.tokens))
    except EngineFailure as failure:
        generator.failed(failure)
    return graded
