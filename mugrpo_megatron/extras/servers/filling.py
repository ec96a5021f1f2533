"""Fills a stage from servers: sends the prompts of the groups that it lacks, and writes the scored groups to disk.

`mugrpo generate --server` fills a shard, which is a part of the stage's groups, in a process of its own with a learner
that only computes log-probabilities.
`mugrpo train --server` fills the whole stage, with the learner of the run, which keeps its device memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mugrpo_megatron.data.prepare import PreparedData, Problems, prepare
from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.engine.launch import training_sampling
from mugrpo_megatron.evaluation.scoring import Scorer
from mugrpo_megatron.extras.engine_only.shards import GenerationShard, NextStage, open_shard
from mugrpo_megatron.extras.servers.attested import Attestor, Measure, Patience, attested_groups
from mugrpo_megatron.extras.servers.options import ServerOptions, check_servers
from mugrpo_megatron.extras.servers.pool import Pool, StageRequest
from mugrpo_megatron.extras.servers.replies import Asked
from mugrpo_megatron.files.hf_config import read_model_config
from mugrpo_megatron.files.json_text import read_json
from mugrpo_megatron.observe.progress import Bar
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.rewards.pool import Verifier
from mugrpo_megatron.run.cursor import Cursor
from mugrpo_megatron.run.inputs import editable_after_failure
from mugrpo_megatron.run.stage_groups import group_prompt, group_samples
from mugrpo_megatron.run.stopping import StopRequest
from mugrpo_megatron.stages.store import StageStore
from mugrpo_megatron.weights.families import read_architecture

Say = Callable[[str], None]


def weights_name(run: str, updates: int) -> str:
    """The name under which a server serves the run's weights after `updates` updates."""
    return f"{run}-{updates}"


def how_to_serve(name: str, weights: Path, dtype: str) -> str:
    """The commands that serve a stage's weights, for people."""
    return (
        f"This stage needs servers of {weights}, each with this name for it:\n"
        f"  vllm serve WEIGHTS --served-model-name {name} --dtype {dtype} --logprobs-mode processed_logprobs\n"
        f"  python -m sglang.launch_server --model-path WEIGHTS --served-model-name {name} --dtype {dtype}"
    )


def end_tokens(model: Path, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end a response: the tokenizer's and those in the model's own files, which engines read too."""
    ends = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    for content in (read_model_config(model), _generation_config(model)):
        value = content.get("eos_token_id")
        ends |= {token for token in (value if isinstance(value, list) else [value]) if type(token) is int}
    return frozenset(ends)


def _generation_config(model: Path) -> dict[str, object]:
    path = model / "generation_config.json"
    return read_json(path) if path.exists() else {}


def request_for(
    recipe: Recipe, name: str, model: Path, tokenizer: PreTrainedTokenizerBase, cursor: Cursor, options: ServerOptions
) -> StageRequest:
    """The request that every server of the stage gets, without the prompt."""
    rollout = recipe.rollout
    sampling = training_sampling(rollout, recipe.run, tokenizer, None)
    asked = Asked(
        rollout.responses_per_prompt,
        rollout.max_response_tokens,
        read_architecture(model).vocab_size,
        end_tokens(model, tokenizer),
        sampling.stop,
        cursor.updates,
    )
    # Twice the prompts that a server decodes together, so that another request waits there whenever one ends.
    concurrency = max(1, 2 * recipe.engine.max_running_requests // rollout.responses_per_prompt)
    return StageRequest(name, sampling, asked, recipe.data.max_prompt_tokens, concurrency, options.timeout_s)


@dataclass(frozen=True)
class Filling:
    """A stage of a run while servers fill it."""

    recipe: Recipe
    problems: PreparedData
    tokenizer: PreTrainedTokenizerBase
    cursor: Cursor
    store: StageStore
    verifier: Verifier
    stop: StopRequest
    say: Say

    def fill(
        self, request: StageRequest, options: ServerOptions, missing: Sequence[int], attestor: Attestor, bar: Bar
    ) -> None:
        """Have servers answer the prompts of the groups `missing`, and append each to the store once it is scored.

        Ends early when the run is asked to stop. Raises UserError, with every group on disk that was taken, when no
        server can be used.
        """
        recipe, scorer = self.recipe, Scorer(self.verifier, self.tokenizer)
        prompts = [group_prompt(recipe, self.problems, self.cursor, group) for group in missing]
        to_samples = partial(group_samples, rollout=recipe.rollout, reward=recipe.reward, objective=recipe.objective)
        patience = Patience(options.patience_s)
        try:
            with Pool(options.urls, request) as pool:
                groups = attested_groups(pool, prompts, attestor, patience, self.stop.poll, self.say)
                for group in scorer.during(groups):
                    self.store.append(to_samples(group))
                    bar.advance(tokens=group.tokens)
        finally:
            for group in scorer.rest(self.stop.poll):
                self.store.append(to_samples(group))
                bar.advance(tokens=group.tokens)
            self.store.flush()


def fill_shard(
    recipe: Recipe, shard: GenerationShard, stage: int | None, problems: Problems, options: ServerOptions
) -> str:
    """Have servers fill the groups that the shard still lacks; returns a sentence on what is done and what comes next.

    The process has a learner of its own, of one rank, that only computes log-probabilities. Groups that an earlier
    process put on disk stay. Raises UserError when `stage` is given and is not the run's next one, when another process
    fills the same shard, when the shard was begun with other weights, other problems or another number of shards, and
    when no server can be used; Stopped, with every group on disk, when asked to stop.
    """
    check_servers(recipe)
    with open_shard(recipe, shard, stage, problems) as opened:
        following, cursor, store, display = opened.stage, opened.stage.cursor, opened.store, opened.display
        if opened.missing:
            with _measuring(recipe, following) as measure, Verifier(recipe.reward) as verifier:
                tokenizer = load_tokenizer(following.weights)
                prepared = prepare(recipe.data, recipe.reward, load_tokenizer(recipe.model.directory), problems)
                name = weights_name(following.record.id, cursor.updates)
                display.say(how_to_serve(name, following.weights, recipe.model.dtype))
                request = request_for(recipe, name, following.weights, tokenizer, cursor, options)
                path = store.directory / f"servers-{shard.writer:04d}.json"
                attestor = Attestor(measure, recipe.rollout.temperature, recipe.model.dtype, path)
                filling = Filling(recipe, prepared, tokenizer, cursor, store, verifier, opened.stop, display.say)
                with (
                    editable_after_failure(recipe.run.dir),
                    display.bar(f"stage {cursor.stage}, shard {shard}", len(opened.missing), "prompts") as bar,
                ):
                    filling.fill(request, options, opened.missing, attestor, bar)
            if opened.stop.requested:
                finished = len(opened.groups & store.verified_groups())
                raise opened.stop.stopped(f"{finished} of {len(opened.groups)} groups of shard {shard} are on disk")
    count, seal = len(opened.groups), f"mugrpo seal {opened.directory.path}"
    return f"shard {shard} has all of its {count:,} groups; once all shards have, `{seal}`"


@contextmanager
def _measuring(recipe: Recipe, stage: NextStage) -> Iterator[Measure]:
    # Not at the top: it imports Megatron, which takes seconds.
    from mugrpo_megatron.extras.servers.learner_values import learner_values, open_scoring_learner

    with open_scoring_learner(recipe, stage.weights) as learner:
        yield partial(learner_values, learner)
