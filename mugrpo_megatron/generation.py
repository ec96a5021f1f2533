"""Generating: the engine gets the weights, samples a stage or the held-out problems, the verifier scores."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from mugrpo_megatron.data.order import problem_at
from mugrpo_megatron.data.ready import Ready
from mugrpo_megatron.errors import EngineFailure
from mugrpo_megatron.evaluate import grade, summarize
from mugrpo_megatron.learner import memory
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.rewards.scores import Pending
from mugrpo_megatron.rewards.shaping import shaped
from mugrpo_megatron.rollout.sampler import held_out_sampling, sampling
from mugrpo_megatron.rollout.store import StageStore
from mugrpo_megatron.run import Generator, Run
from mugrpo_megatron.samples import Prompt, Response, Sample
from mugrpo_megatron.schedule import Cursor, stage_positions
from mugrpo_megatron.stopping import Stopped
from mugrpo_megatron.weights.sync import sync


def sync_weights(run: Run, cursor: Cursor) -> None:
    """Give the engine the learner's weights, and then the device: learner and engine never hold it whole together.

    The learner's optimizer state leaves first, the engine's weights wake and are synced, the learner's weights leave,
    and only then does the engine take back its KV cache.
    """
    engine = run.generator.engine if run.generator else None
    with run.log.phase("sync", cursor.stage) as facts:
        memory.wake(run.learner)  # an engine that failed is synced again
        memory.sleep(run.learner, "optimizer")
        if engine:
            engine.wake("weights")
        stats = sync(run.bridge, engine, version=cursor.updates_done(run.recipe.schedule))
        memory.sleep(run.learner, "weights")
        if engine:
            engine.wake("kv_cache")
        facts["bytes"] = float(stats.bytes)


def rest_engine(run: Run) -> None:
    """Give the device back to the learner; every rank waits for the engine to have left it."""
    if run.generator:
        run.generator.engine.sleep()
    run.wait_for_leader()
    memory.wake(run.learner)


def evaluate_if_due(run: Run, cursor: Cursor) -> None:
    """Held-out accuracy before the first stage and before every `eval.every_stages`-th one after it."""
    every = run.recipe.eval.every_stages
    if cursor.stage == 0 or (every and cursor.stage % every == 0):
        evaluate(run, cursor)


def evaluate(run: Run, cursor: Cursor) -> None:
    """Held-out accuracy of the engine's present weights; samples apart from training, so that it disturbs nothing."""
    if not run.generator:
        return
    generator, held_out = run.generator, run.generator.problems.held_out
    samples = run.recipe.eval.samples
    prompts = [
        Prompt(index, problem, ids)
        for index, (problem, ids) in enumerate(zip(held_out.problems, held_out.prompts, strict=True))
    ]
    generate_held_out = partial(generator.engine.generate, sampling=held_out_sampling(run.recipe, generator.tokenizer))
    with run.log.phase("eval", cursor.stage), run.display.bar("evaluate", len(prompts), "problems") as bar:
        graded = []
        for one in grade(generate_held_out, generator.verifier, generator.tokenizer, prompts, samples):
            graded.append(one)
            bar.advance(tokens=sum(one.tokens))
        result = summarize("held out", graded)
        bar.values["accuracy"] = result.mean.value
    run.log.evaluation(
        cursor.stage,
        cursor.updates_done(run.recipe.schedule),
        {
            "accuracy": result.mean.value,
            "low": result.mean.low,
            "high": result.mean.high,
            "problems": result.problems,
            "samples": result.samples,
            "tokens": result.tokens,
        },
    )


def generate(run: Run, stage: StageStore, cursor: Cursor) -> None:
    """Sample and score the groups that the stage still lacks and seal it; every rank leaves together.

    The verifier works while the engine does; groups go to disk as they are scored. Afterwards the engine rests. An
    engine that fails leaves the stage unsealed, with every finished group kept, and is started anew; EngineFailure is
    raised after `engine.max_failures` failures in a row, those without a finished group between them.
    """
    if run.generator:
        before = len(stage.present())
        try:
            _fill(run, run.generator, stage, cursor)
        except EngineFailure as failure:
            stage.flush()
            progressed = len(stage.present()) > before
            run.generator.failures_in_a_row = 1 if progressed else run.generator.failures_in_a_row + 1
            if run.generator.failures_in_a_row >= run.recipe.engine.max_failures:
                raise
            run.log.event("engine_failure", str(failure).splitlines()[0])
            run.display.say(f"{failure}\nThe engine is started anew for what the stage still lacks.")
    rest_engine(run)
    if any(run.any_rank(run.stop.asked)):
        raise Stopped


def stage_prompts(recipe: Recipe, problems: Ready, stage: int) -> Iterator[Prompt]:
    """The stage's prompts in the run's order; their index counts from 0 inside the stage."""
    train = problems.train
    for index, position in enumerate(stage_positions(stage, recipe.schedule, recipe.rollout.prompts_per_update)):
        place = problem_at(recipe.run.seed, len(train.problems), position)
        yield Prompt(index, train.problems[place], train.prompts[place])


def _fill(run: Run, generator: Generator, stage: StageStore, cursor: Cursor) -> None:
    schedule, rollout = run.recipe.schedule, run.recipe.rollout
    present = stage.present()
    prompts = stage_prompts(run.recipe, generator.problems, cursor.stage)
    missing = [prompt for prompt in prompts if prompt.index not in present]
    scoring: deque[Scoring] = deque()
    with (
        run.log.phase("generate", cursor.stage) as facts,
        run.display.bar(f"{run.title(cursor)}: generate", len(missing), "prompts") as bar,
    ):
        how = sampling(run.recipe, generator.tokenizer)
        for prompt, responses in generator.engine.generate(missing, rollout.responses_per_prompt, how):
            scoring.append(_submit(generator, prompt, responses))
            while scoring and scoring[0].pending.done():
                stage.append(_samples(scoring.popleft(), run.recipe))
            bar.advance(tokens=sum(len(response.ids) for response in responses))
            if run.stop.asked:
                break
        facts["tokens"] = float(bar.tokens)
    with run.log.phase("score", cursor.stage):
        for group in scoring:
            stage.append(_samples(group, run.recipe))
        if run.stop.asked:
            stage.flush()
        else:
            stage.seal(schedule.updates_per_stage, rollout.prompts_per_update)


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
