"""`mugrpo sft`: fine-tune a model on rows of prompts and responses, or train a small new one on a bundled task.

Learner, packing and optimizer are the same as in RL; the loss is the mean cross-entropy of the response's tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

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
from mugrpo_megatron.files.scratch import Scratch
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

MIN_LR_FRACTION = 0.1
"""Learning rate at the end of the decay, as a fraction of its peak."""
WARMUP_UPDATES = 30
BETA2 = 0.98
HEAD_DIM = 16
"""Head dimension of a new model. The model has no grouped-query attention, with which the bundled task needs several
times as many updates."""
MAX_UPDATES = 4000
"""Most updates of a new model. Its learning rate decays over all of them, even if the training stops earlier."""
CHECK_EVERY = 25
"""Updates between checks of the held-out accuracy."""
INIT_STD = 0.05
ROPE_THETA = 100.0
"""Base of a new model's rotary angles. Questions have a dozen tokens: with the usual 10,000 most angles would hardly
change over them, and aligning digits takes several times the updates."""


def train(recipe: Recipe) -> None:
    """Fine-tune a model and save it as a Hugging Face checkpoint in `sft.output`; every rank of the world runs this.

    With `sft.train`, trains `model.path` on the rows that it names. Otherwise trains a new Qwen2 on the task
    `data.train` until it reaches `sft.target_accuracy` or has taken MAX_UPDATES updates. A finished result of the same
    recipe is kept. Raises UserError if the recipe has nothing to imitate, or if `sft.output` holds the result of
    another recipe.
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
        # Each rank makes its own copy of the new model, with the same weights from the same seed.
        with Scratch("sft") as scratch:
            fresh = scratch / "fresh"
            tokenizer = build_arithmetic_tokenizer()
            tokenizer.save_pretrained(fresh)
            torch.manual_seed(recipe.run.seed)
            Qwen2ForCausalLM(model_config(recipe, tokenizer)).save_pretrained(fresh)
            model = recipe.model.model_copy(update={"path": fresh})
            learner = build_learner(_as_one_stage(recipe, model, MAX_UPDATES))
            with shutdown_after(learner.ranks):
                _write_recipe(recipe, learner)
                with open_display(show=learner.ranks.rank == 0) as display:
                    _imitate(learner, tokenizer, display)
                save_hf(learner.models, learner.architecture, like=fresh, out=out / "hf")
                _print_output(learner, out)


def updates_on(rows: int, section: SftSection) -> int:
    """Returns the number of updates in `sft.epochs` passes over the rows; UserError if it is above
    MAX_STAGE_UPDATES."""
    updates = math.ceil(section.epochs * rows / section.batch)
    if updates > MAX_STAGE_UPDATES:
        raise UserError(
            f"sft.epochs = {section.epochs} over {rows:,} rows is {updates:,} updates; at most {MAX_STAGE_UPDATES:,} "
            "can be numbered; raise sft.batch or lower sft.epochs"
        )
    return updates


def _learn_rows(recipe: Recipe, source: str) -> None:
    """Train `model.path` on the responses in the source's rows; the loss leaves their prompts out."""
    tokenizer = load_tokenizer(recipe.model.directory)
    tokenized = sequences(
        demonstrations(source, recipe.data), tokenizer, recipe.data, recipe.rollout.max_response_tokens
    )
    rows = [TokenSequence(np.array([*prompt, *response]), len(prompt)) for prompt, response in tokenized.pairs]
    section = recipe.sft
    updates = updates_on(len(rows), section)
    learner = build_learner(_as_one_stage(recipe, recipe.model, updates))
    with shutdown_after(learner.ranks):
        _write_recipe(recipe, learner)
        with open_display(show=learner.ranks.rank == 0) as display:
            display.say(f"sft.train: {len(rows):,} rows, {updates:,} updates")
            if tokenized.too_long:
                display.say(f"{tokenized.too_long:,} rows are longer than the recipe's token limits: left out")
            for note in tokenized.notes:
                display.say(note)
            style, template = recipe.data.prompt_style, template_of(recipe.data)
            display.say(first_prompt(tokenizer, tokenized.pairs[0][0], style, template))
            display.say(f"and its response: {decoded_line(tokenizer, tokenized.pairs[0][1])}")
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
        _print_output(learner, section.output)


def _print_output(learner: Learner, out: Path) -> None:
    if learner.ranks.rank == 0:
        print(f"Hugging Face checkpoint: {out / 'hf'}")


def _write_recipe(recipe: Recipe, learner: Learner) -> None:
    """Write the recipe, on rank 0 and before hf/. So an hf/ without a recipe is another program's, and is never
    overwritten."""
    if learner.ranks.rank == 0:
        write_text(recipe.sft.output / RECIPE, dump_recipe(recipe))


def model_config(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Qwen2Config:
    """Returns the Hugging Face configuration of the new model."""
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


def question_and_answer(problem: Problem, tokenizer: PreTrainedTokenizerBase) -> TokenSequence:
    """Returns question and answer as one sequence; the loss is on the answer and the end-of-sequence token."""
    prompt = tokenizer.encode(problem.question, add_special_tokens=False)
    answer = tokenizer.encode(demonstration(problem), add_special_tokens=False)
    return TokenSequence(np.array([*prompt, *answer, tokenizer.eos_token_id]), len(prompt))


def greedy_accuracy(learner: Learner, sequences: Sequence[TokenSequence]) -> float:
    """Returns the fraction of sequences whose whole answer greedy decoding would produce. Collective; every rank gets
    the same result.

    Greedy decoding produces an answer exactly when each of its tokens is the most likely one after those before it, so
    one forward pass over the right answers is enough.
    """

    def hits(model: PolicyModel, hidden: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        logits = gather_from_tensor_model_parallel_region(
            states_before_targets(model, hidden, batch) @ model.output_weight().T
        )
        best = logits[:, : learner.architecture.vocab_size].argmax(-1)
        return (best == batch.targets).float()[None]

    batches = pack_local(learner, sequences, plan_update(learner, sequences))
    token_hits = gather_tokens(learner, sequences, batches, forward_only(learner, batches, hits), k=1)[0]
    return float(np.mean([hit.min().item() for hit in token_hits.split([s.trained for s in sequences])]))


def _imitate(learner: Learner, tokenizer: PreTrainedTokenizerBase, display: Display) -> None:
    recipe, section = learner.recipe, learner.recipe.sft
    train = problems(recipe.run.seed, "train", GENERATED, recipe.data.train)
    held_out = problems(recipe.run.seed, "eval", recipe.data.eval_problems, recipe.data.train)
    answers = [question_and_answer(problem, tokenizer) for problem in train]
    checks = [question_and_answer(problem, tokenizer) for problem in held_out]
    with display.bar("warm start", MAX_UPDATES, "updates") as bar:
        for update, batch in enumerate(_batches(recipe, answers, MAX_UPDATES), start=1):
            tokens = sum(sequence.trained for sequence in batch)
            optimize(learner, batch, _cross_entropy(tokens))
            bar.advance(tokens=sum(len(sequence.ids) for sequence in batch))
            if update % CHECK_EVERY == 0:
                bar.values["accuracy"] = accuracy = greedy_accuracy(learner, checks)
                if accuracy >= section.target_accuracy:
                    break


def _cross_entropy(tokens: int) -> TokenLoss:
    """Returns the loss function of a micro-batch: the sum of its token losses, divided by `tokens`.

    `tokens` is the number of trained tokens in the whole update, so the losses of the update's micro-batches add up to
    the mean over tokens.
    """
    return lambda logprobs, batch: -logprobs.sum() / tokens


def _batches(recipe: Recipe, rows: Sequence[TokenSequence], updates: int) -> Iterator[list[TokenSequence]]:
    size, seed = recipe.sft.batch, recipe.run.seed
    for update in range(updates):
        indices = range(update * size, (update + 1) * size)
        yield [rows[problem_at(seed, len(rows), index)] for index in indices]


def _as_one_stage(recipe: Recipe, model: ModelSection, updates: int) -> Recipe:
    """Returns the recipe for SFT: `model`, SFT's optimizer, one stage of `updates` updates, and no LoRA."""
    lr = recipe.sft.peak_lr
    optimizer = OptimizerSection(
        lr=lr, min_lr=MIN_LR_FRACTION * lr, decay="cosine", warmup_updates=WARMUP_UPDATES, beta2=BETA2
    )
    schedule = ScheduleSection(stages=1, updates_per_stage=updates)
    sections = {"optimizer": optimizer, "schedule": schedule, "model": model, "lora": LoraSection()}
    return recipe.model_copy(update=sections)
