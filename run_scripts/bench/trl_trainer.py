"""TRL's GRPOTrainer on a job of `sides`: `python -m run_scripts.bench.trl_trainer JOB` prints its result; both JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.rewards.pool import Verifier
from run_scripts.bench.sides import Job, Result, problems


def train(job: Job) -> Result:
    """Train as `job` says; runs in a process of its own."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    if job.threads:
        torch.set_num_threads(job.threads)
    recipe = job.recipe()
    rollout = recipe.rollout
    tokenizer = load_tokenizer(Path(job.model))
    tokenizer.padding_side = "left"
    model = AutoModelForCausalLM.from_pretrained(
        job.model, dtype=getattr(torch, job.dtype), attn_implementation=job.attention, trust_remote_code=False
    )
    asked, held_out = problems(job, recipe)
    assert tokenizer(asked[0].question).input_ids == tokenizer.encode(asked[0].question, add_special_tokens=False)

    with Verifier(recipe.reward) as verifier, TemporaryDirectory() as folder:

        def rewards(completions: list[str], answer: list[str], **_: Any) -> list[float]:
            return [score.reward for score in verifier.score(completions, answer)]

        def accuracy() -> float:
            model.eval()
            right = 0.0
            for start in range(0, len(held_out), 500):
                batch = held_out[start : start + 500]
                inputs = tokenizer([p.question for p in batch], return_tensors="pt", padding=True)
                with torch.no_grad():
                    ids = model.generate(  # type: ignore[misc]  # a mixin that mypy cannot see
                        **inputs, max_new_tokens=rollout.max_response_tokens, do_sample=False
                    )
                texts = tokenizer.batch_decode(ids[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
                right += sum(score.reward for score in verifier.score(texts, [p.answer for p in batch]))
            model.train()
            return right / len(held_out)

        clock = _Stopwatch()
        every = job.updates // max(1, job.evaluations)
        taken: list[list[float]] = []

        class Evaluate(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                self._take(0)
                clock.start()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step % every == 0:
                    self._take(state.global_step)

            def _take(self, update: int) -> None:
                with clock.paused():
                    right = accuracy() if job.evaluations else 0.0
                    taken.append([update, round(clock.wall(), 2), round(clock.cpu(), 2), right])

        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=rewards,
            train_dataset=Dataset.from_list([{"prompt": p.question, "answer": p.answer} for p in asked]),
            callbacks=[Evaluate()],
            args=GRPOConfig(
                output_dir=folder,
                seed=recipe.run.seed,
                max_steps=job.updates,
                per_device_train_batch_size=rollout.prompts_per_update * rollout.responses_per_prompt,
                gradient_accumulation_steps=1,
                steps_per_generation=job.mu,
                num_generations=rollout.responses_per_prompt,
                max_completion_length=rollout.max_response_tokens,
                temperature=rollout.temperature,
                shuffle_dataset=False,
                learning_rate=job.rate,
                lr_scheduler_type="linear" if recipe.optimizer.decay == "linear" else "constant_with_warmup",
                warmup_steps=recipe.optimizer.warmup_updates,
                adam_beta1=recipe.optimizer.beta1,
                adam_beta2=recipe.optimizer.beta2,
                weight_decay=recipe.optimizer.weight_decay,
                max_grad_norm=recipe.optimizer.clip_grad,
                beta=0.0,
                epsilon=0.2,
                loss_type="dapo",
                bf16=False,
                use_cpu=True,
                gradient_checkpointing=False,
                logging_steps=job.updates,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
        )
        parts: dict[str, float] = {}
        trainer._generate_and_score_completions = _timed(  # the only call between generating and optimizing
            trainer._generate_and_score_completions, "generate and score", parts
        )
        with _stdout_to_stderr():
            trainer.train()
    parts["optimize and the rest"] = taken[-1][1] - sum(parts.values())
    return Result("TRL", job.rate, taken, parts)


class _Stopwatch:
    """Wall and CPU time of this process since `start`, without the intervals in `paused`."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def start(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def wall(self) -> float:
        return time.perf_counter() - self._wall

    def cpu(self) -> float:
        return time.process_time() - self._cpu

    @contextmanager
    def paused(self) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self._wall += time.perf_counter() - wall
        self._cpu += time.process_time() - cpu


def _timed(function: Callable[..., Any], name: str, parts: dict[str, float]) -> Callable[..., Any]:
    def timed(*arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*arguments, **named)
        finally:
            parts[name] = parts.get(name, 0.0) + time.perf_counter() - start

    return timed


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect what the trainer prints: stdout is for the result."""
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


if __name__ == "__main__":
    found = train(Job(**json.loads(sys.argv[1])))
    print(json.dumps({"points": found.points, "parts": found.parts}))
