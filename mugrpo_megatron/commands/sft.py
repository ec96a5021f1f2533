"""`mugrpo sft`: a model learns rows of prompts and responses, or a small new one a bundled task, as a start for RL.

Learner, packing and optimizer are those of RL; the loss is the mean cross-entropy of the answer's tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from mugrpo_megatron.checks.preflight import check_warm_start
from mugrpo_megatron.commands.warm_start import RECIPE, is_warm_started, locked_warm_start
from mugrpo_megatron.data.arithmetic import GENERATED, demonstration, problems
from mugrpo_megatron.data.demonstrations import demonstrations, sequences
from mugrpo_megatron.data.prepare import problem_at
from mugrpo_megatron.data.prompts import decoded_line, first_prompt, template_of
from mugrpo_megatron.data.tokenizer import build_arithmetic_tokenizer, load_tokenizer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import write_text
from mugrpo_megatron.learner.groups import shutdown_after
from mugrpo_megatron.learner.learner import Learner, build_learner
from mugrpo_megatron.learner.loss import TokenLoss, states_before_targets
from mugrpo_megatron.learner.model import PolicyModel
from mugrpo_megatron.learner.packing import MicroBatch, TokenSequence
from mugrpo_megatron.learner.passes import forward_only, gather_tokens, pack_local, plan_update
from mugrpo_megatron.learner.update import optimize
from mugrpo_megatron.megatron_compat import gather_from_tensor_model_parallel_region
from mugrpo_megatron.observe.environment import rank_of_environment
from mugrpo_megatron.observe.progress import Display, open_display
from mugrpo_megatron.recipe import Recipe, dump_recipe
from mugrpo_megatron.recipe.policy import LoraSection, ModelSection, SftSection
from mugrpo_megatron.recipe.sections import MAX_STAGE_UPDATES, OptimizerSection, ScheduleSection
from mugrpo_megatron.run.initial_model import hub_model
from mugrpo_megatron.run.record import PROVENANCE
from mugrpo_megatron.samples import Problem
from mugrpo_megatron.weights.hf import save_hf

MIN_LR_SHARE = 0.1
"""The learning rate decays to this share of its peak."""
WARMUP_UPDATES = 30
BETA2 = 0.98
HEAD_DIM = 16
"""Of as many key/value heads as heads: with fewer, the bundled task needs several times as many updates."""
MOST_UPDATES = 4000
"""Updates of a new model, over which its learning rate decays, whatever its accuracy."""
CHECK_EVERY = 25
"""Updates between checks of the held-out accuracy."""
INIT_STD = 0.05
ROPE_THETA = 100.0
"""Questions have a dozen tokens: with the usual base of 10,000 most rotary angles would hardly change over them, and
learning to align digits takes several times the updates."""


def train(recipe: Recipe) -> None:
    """Save what `mugrpo sft` makes as a Hugging Face checkpoint in `sft.output`.

    With `sft.train`, `model.path` learns its rows. Else a fresh Qwen2 of `sft`'s size learns `data.train` until
    `sft.target_accuracy`. Every rank of the world runs this. A finished warm start is kept. Raises UserError when the
    recipe names nothing to imitate or `sft.output` holds a warm start of another recipe.
    """
    out = recipe.sft.output
    recipe = check_warm_start(recipe)
    with locked_warm_start(out):
        if is_warm_started(recipe):
            if rank_of_environment() == 0:
                print(f"{out}/hf exists; remove {out} to train it again")
            return
        disable_progress_bar()
        if recipe.sft.train is not None:
            _learn_rows(recipe, recipe.sft.train)
            return
        with TemporaryDirectory() as scratch:  # of each rank: the same weights, drawn from the same seed
            fresh = Path(scratch) / "fresh"
            tokenizer = build_arithmetic_tokenizer()
            tokenizer.save_pretrained(fresh)
            torch.manual_seed(recipe.run.seed)
            Qwen2ForCausalLM(model_config(recipe, tokenizer)).save_pretrained(fresh)
            model = recipe.model.model_copy(update={"path": fresh})
            learner = build_learner(_as_one_stage(recipe, model, MOST_UPDATES))
            with shutdown_after(learner.ranks):
                _write_recipe(recipe, learner)
                with open_display(show=learner.ranks.rank == 0) as display:
                    _imitate(learner, tokenizer, display)
                save_hf(learner.models, learner.architecture, like=fresh, out=out / "hf")
                _tell(learner, out)


def updates_on(rows: int, section: SftSection) -> int:
    """Updates of `epochs` passes over so many rows; UserError for more than can be numbered."""
    updates = math.ceil(section.epochs * rows / section.batch)
    if updates > MAX_STAGE_UPDATES:
        raise UserError(
            f"sft.epochs = {section.epochs} over {rows:,} rows is {updates:,} updates; at most {MAX_STAGE_UPDATES:,} "
            "can be numbered; raise sft.batch"
        )
    return updates


def _learn_rows(recipe: Recipe, source: str) -> None:
    """`model.path` learns the responses of a source's rows: the mean cross-entropy of their tokens alone."""
    rows_of_source = demonstrations(source, recipe.data)
    tokenizer = load_tokenizer(recipe.model.directory)
    read = sequences(rows_of_source, tokenizer, recipe.data, recipe.rollout.max_response_tokens)
    rows = [TokenSequence(np.array([*prompt, *response]), len(prompt)) for prompt, response in read.pairs]
    section = recipe.sft
    updates = updates_on(len(rows), section)
    learner = build_learner(_as_one_stage(recipe, recipe.model, updates))
    with shutdown_after(learner.ranks):
        _write_recipe(recipe, learner)
        with open_display(show=learner.ranks.rank == 0) as display:
            display.say(f"sft.train: {len(rows):,} rows, {updates:,} updates")
            if read.too_long:
                display.say(f"{read.too_long:,} rows are longer than the recipe's token limits: left out")
            style, template = recipe.data.prompt_style, template_of(recipe.data)
            display.say(first_prompt(tokenizer, read.pairs[0][0], style, template))
            display.say(f"and its response: {decoded_line(tokenizer, read.pairs[0][1])}")
            with display.bar("supervised", updates, "updates") as bar:
                for batch in _batches(recipe, rows, updates):
                    tokens = sum(sequence.trained for sequence in batch)
                    step = optimize(learner, batch, _cross_entropy(tokens))
                    bar.values["grad_norm"] = step.grad_norm
                    bar.advance(tokens=sum(len(sequence.ids) for sequence in batch))
        hub = hub_model(recipe.model)
        save_hf(
            learner.models,
            learner.architecture,
            like=recipe.model.directory,
            out=section.output / "hf",
            notes={PROVENANCE: {"model": asdict(hub)}} if hub else None,
        )
        _tell(learner, section.output)


def _tell(learner: Learner, out: Path) -> None:
    if learner.ranks.rank == 0:
        print(f"Hugging Face checkpoint: {out / 'hf'}")


def _write_recipe(recipe: Recipe, learner: Learner) -> None:
    """Before hf/ is written, so that an hf/ without it is not a warm start."""
    if learner.ranks.rank == 0:
        write_text(recipe.sft.output / RECIPE, dump_recipe(recipe))


def model_config(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Qwen2Config:
    """The new model's Hugging Face configuration."""
    section = recipe.sft
    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=section.hidden,
        intermediate_size=2 * section.hidden,
        num_hidden_layers=section.layers,
        num_attention_heads=section.hidden // HEAD_DIM,
        num_key_value_heads=section.hidden // HEAD_DIM,
        max_position_embeddings=1024,
        initializer_range=INIT_STD,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=recipe.model.dtype,
    )


def answered(problem: Problem, tokenizer: PreTrainedTokenizerBase) -> TokenSequence:
    """Question and answer as one sequence; the answer and the end-of-sequence token are learned."""
    prompt = tokenizer.encode(problem.question, add_special_tokens=False)
    answer = tokenizer.encode(demonstration(problem), add_special_tokens=False)
    return TokenSequence(np.array([*prompt, *answer, tokenizer.eos_token_id]), len(prompt))


def greedy_accuracy(learner: Learner, sequences: Sequence[TokenSequence]) -> float:
    """Share of sequences whose trained tokens are what greedy decoding gives; collective, the same on every rank.

    Greedy decoding gives an answer exactly when each of its tokens is the most likely one after those before it, so one
    forward pass over the right answers decides.
    """

    def hits(model: PolicyModel, hidden: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        logits = gather_from_tensor_model_parallel_region(
            states_before_targets(model, hidden, batch) @ model.output_weight().T
        )
        best = logits[:, : learner.architecture.vocab_size].argmax(-1)
        return (best == batch.targets).float()[None]

    batches = pack_local(learner, sequences, plan_update(learner, sequences))
    hits_of_all = gather_tokens(learner, sequences, batches, forward_only(learner, batches, hits), k=1)[0]
    return float(np.mean([part.min().item() for part in hits_of_all.split([s.trained for s in sequences])]))


def _imitate(learner: Learner, tokenizer: PreTrainedTokenizerBase, display: Display) -> None:
    recipe, section = learner.recipe, learner.recipe.sft
    train = problems(recipe.run.seed, "train", GENERATED, recipe.data.train)
    held_out = problems(recipe.run.seed, "eval", recipe.data.eval_problems, recipe.data.train)
    answers = [answered(problem, tokenizer) for problem in train]
    checked = [answered(problem, tokenizer) for problem in held_out]
    with display.bar("warm start", MOST_UPDATES, "updates") as bar:
        for update, batch in enumerate(_batches(recipe, answers, MOST_UPDATES), start=1):
            tokens = sum(sequence.trained for sequence in batch)
            optimize(learner, batch, _cross_entropy(tokens))
            bar.advance(tokens=sum(len(sequence.ids) for sequence in batch))
            if update % CHECK_EVERY == 0:
                bar.values["accuracy"] = accuracy = greedy_accuracy(learner, checked)
                if accuracy >= section.target_accuracy:
                    break


def _cross_entropy(tokens: int) -> TokenLoss:
    """Mean over the `tokens` of a whole update, so that the micro-batches' losses add up."""
    return lambda logprobs, batch: -logprobs.sum() / tokens


def _batches(recipe: Recipe, rows: Sequence[TokenSequence], updates: int) -> Iterator[list[TokenSequence]]:
    size, seed = recipe.sft.batch, recipe.run.seed
    for update in range(updates):
        places = range(update * size, (update + 1) * size)
        yield [rows[problem_at(seed, len(rows), place)] for place in places]


def _as_one_stage(recipe: Recipe, model: ModelSection, updates: int) -> Recipe:
    """The recipe with the warm start's optimizer, model and a schedule of so many updates; all weights train."""
    lr = recipe.sft.peak_lr
    optimizer = OptimizerSection(
        lr=lr, min_lr=MIN_LR_SHARE * lr, decay="cosine", warmup_updates=WARMUP_UPDATES, beta2=BETA2
    )
    schedule = ScheduleSection(stages=1, updates_per_stage=updates)
    parts = {"optimizer": optimizer, "schedule": schedule, "model": model, "lora": LoraSection()}
    return recipe.model_copy(update=parts)
