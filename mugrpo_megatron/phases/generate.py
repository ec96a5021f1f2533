"""Generating: the engines get the weights and draw the prompts of a stage from one queue, the verifiers score."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import uuid4

import numpy as np

from mugrpo_megatron.data.order import problem_at
from mugrpo_megatron.data.prepare import PreparedData
from mugrpo_megatron.engine.launch import sampling
from mugrpo_megatron.engine.queue import PromptQueue
from mugrpo_megatron.errors import EngineFailure, UserError
from mugrpo_megatron.observe.progress import Bar
from mugrpo_megatron.phases.sync import sleep_engines
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.rewards.scores import Pending
from mugrpo_megatron.rewards.shaping import shaped
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.generator import Generator
from mugrpo_megatron.run.run import Run
from mugrpo_megatron.run.stopping import Stopped
from mugrpo_megatron.samples import Prompt, Response, Sample
from mugrpo_megatron.stages.store import StageStore


def shared_queue(run: Run, groups: Sequence[int]) -> PromptQueue:
    """The queue of what rank 0 says is to be generated, for all engines. Collective; others' `groups` do not count."""
    name, wanted = run.world.broadcast((uuid4().hex, groups))
    if run.learner.ranks.world == 1:
        return PromptQueue(wanted)
    return PromptQueue(wanted, run.engines, lambda counter, amount: run.world.count(f"queue/{name}/{counter}", amount))


def generate(run: Run, stage: StageStore, cursor: Cursor) -> None:
    """Sample and score the groups that the stage still lacks and seal it; every rank leaves together.

    Each engine's groups go to disk as they are scored, then the engine rests. An engine that fails leaves its
    unfinished groups to the next round, in which it takes part again: the stage is then not sealed. EngineFailure is
    raised on every rank after `engine.max_failures` failures of one engine in a row, without a finished group between.
    """
    updates = cursor.stage_updates(run.recipe.schedule)
    groups = range(updates * run.recipe.rollout.prompts_per_update)
    queue = shared_queue(run, sorted(set(groups) - stage.present()) if run.is_main else [])
    scoring: deque[Scoring] = deque()
    with (
        run.phase("generate", cursor) as facts,
        run.display.bar(f"{run.title(cursor)}: generate", queue.total, "prompts") as bar,
    ):
        if run.generator:
            _draw(run, run.generator, stage, cursor, queue, scoring, bar)
        run.world.barrier(lambda: show_totals(bar, queue, run.is_main))
        show_totals(bar, queue, run.is_main)
        facts["tokens"] = float(bar.tokens)
    with run.phase("score", cursor):
        for group in scoring:
            stage.append(_samples(group, run.recipe))
        stage.flush()
        run.world.barrier()
        (stopping,) = run.world.any_rank(run.stop.asked)
        tell_failures(run)
        written = run.world.gather(stage.written)
        _check_shared(run, stage, not run.is_main or stage.wait_for(set().union(*written), sealed=False))
        if run.is_main and not stopping and stage.named().issuperset(groups):
            stage.seal(updates, run.recipe.rollout.prompts_per_update)
    sleep_engines(run)
    if any(run.world.any_rank(run.is_main and stage.sealed)):
        _check_shared(run, stage, stage.wait_for(set(), sealed=True))
    if stopping:
        raise Stopped


def _check_shared(run: Run, stage: StageStore, seen: bool) -> None:
    """UserError on every rank when one of them does not see what another has written. Collective."""
    blind = [rank for rank, sees in enumerate(run.world.gather(seen)) if not sees]
    if blind:
        raise UserError(
            f"rank {blind[0]} does not see what other ranks have written to {stage.directory}: run.dir has to be on a "
            "file system that all nodes share, under the same path"
        )


def _draw(
    run: Run,
    generator: Generator,
    stage: StageStore,
    cursor: Cursor,
    queue: PromptQueue,
    scoring: deque[Scoring],
    bar: Bar,
) -> None:
    """Let one engine generate what it claims of the queue; what is scored goes to the stage, the rest to `scoring`."""
    if not generator.engine.running:
        queue.leave()
        return

    def take(held: int, slots: int) -> list[Prompt]:
        return [stage_prompt(run.recipe, generator.problems, cursor, g) for g in queue.take(held, slots)]

    responses_per_prompt = run.recipe.rollout.responses_per_prompt
    how = sampling(run.recipe, generator.tokenizer)
    try:
        for prompt, responses in generator.engine.generate_from(take, responses_per_prompt, how):
            generator.failures_in_a_row = 0
            scoring.append(_submit(generator, prompt, responses))
            while scoring and scoring[0].pending.done():
                stage.append(_samples(scoring.popleft(), run.recipe))
            queue.finished(sum(len(response.ids) for response in responses))
            show_totals(bar, queue, run.is_main)
            if run.stop.asked:
                queue.close()
                break
    except EngineFailure as failure:
        generator.failed(failure)
        queue.leave()


def show_totals(bar: Bar, queue: PromptQueue, is_main: bool) -> None:
    """Advance rank 0's bar to what all engines have finished of a queue that it shows alone."""
    if is_main:
        groups, tokens = queue.totals()
        bar.advance(groups - bar.done, tokens - bar.tokens)


def tell_failures(run: Run) -> None:
    """Say which engines failed since the last call; each is restarted at the next sync. Collective.

    Raises EngineFailure on every rank after `engine.max_failures` failures of one engine in a row.
    """
    generator = run.generator
    mine = None
    if generator and generator.failure:
        mine, generator.failure = (str(generator.failure), generator.failures_in_a_row), None
    for rank, report in enumerate(run.world.gather(mine)):
        if report is None:
            continue
        text = f"rank {rank}: {report[0]}" if run.learner.ranks.world > 1 else report[0]
        if report[1] >= run.recipe.engine.max_failures:
            raise EngineFailure(text)
        run.log.event("engine_failure", text.splitlines()[0])
        run.display.say(f"{text}\nThe engine is restarted for what is missing.")


def stage_prompt(recipe: Recipe, problems: PreparedData, cursor: Cursor, group: int) -> Prompt:
    """The prompt of a stage's group, in the run's order; groups count from 0 inside the stage."""
    train = problems.train
    position = cursor.stage_positions(recipe.schedule, recipe.rollout.prompts_per_update)[group]
    place = problem_at(recipe.run.seed, len(train.problems), position)
    return Prompt(group, train.problems[place], train.prompts[place])


@dataclass(frozen=True, slots=True)
class Scoring:
    """A generated group that the verifier works on."""

    prompt: Prompt
    responses: list[Response]
    texts: list[str]
    pending: Pending


def _submit(generator: Generator, prompt: Prompt, responses: list[Response]) -> Scoring:
    texts = generator.tokenizer.batch_decode([r.ids.tolist() for r in responses], skip_special_tokens=True)
    pending = generator.verifier.submit(texts, [prompt.problem.answer] * len(texts))
    return Scoring(prompt, responses, texts, pending)


def _samples(group: Scoring, recipe: Recipe) -> list[Sample]:
    """A scored group as rows of the stage store; waits for its scores."""
    prompt_ids = np.asarray(group.prompt.ids, dtype=np.int32)
    limit = recipe.rollout.max_response_tokens
    return [
        Sample(
            group=group.prompt.index,
            problem=group.prompt.problem.id,
            prompt_ids=prompt_ids,
            response_ids=response.ids,
            behaviour_logprobs=response.logprobs,
            reward=shaped(score.reward, text, len(response.ids), limit, recipe.reward),
            weight_version=response.weight_version,
            finish_reason=response.finish_reason,
        )
        for response, text, score in zip(group.responses, group.texts, group.pending.result(), strict=True)
    ]
