"""`mugrpo rollouts`: show the responses of a sealed stage, and the tokens that the veto would drop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from mugrpo_megatron.algorithm.advantages import group_advantages
from mugrpo_megatron.algorithm.segments import make_segments
from mugrpo_megatron.algorithm.veto import initial_state, veto
from mugrpo_megatron.data.tokenizer import load_tokenizer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hf_config import read_config
from mugrpo_megatron.recipe import ObjectiveSection, Recipe, load_recipe
from mugrpo_megatron.run.directory import RunDirectory
from mugrpo_megatron.samples import Sample
from mugrpo_megatron.stages.store import StageStore

BATCH_TOKENS = 8192
"""Padded tokens of one forward pass."""


@dataclass(frozen=True, slots=True)
class Stale:
    """One response under a later policy; all arrays [R]."""

    log_ratio: np.ndarray
    """float32: log of the policy's over the behaviour probability."""
    trigger: np.ndarray
    """bool: tokens of a response with negative advantage whose ratio is below `trigger_ratio`."""
    dropped: np.ndarray
    """bool: tokens that the veto drops from the loss."""

    @property
    def lowest_ratio(self) -> float:
        """The smallest importance ratio of a token; inf without tokens."""
        return float(np.exp(self.log_ratio.min(initial=np.inf)))


class LaterPolicy:
    """A Hugging Face checkpoint, run by transformers, under which stale responses are scored."""

    def __init__(self, checkpoint: Path, temperature: float) -> None:
        """Raises UserError when `checkpoint` is not a Hugging Face checkpoint."""
        read_config(checkpoint, remedy="name one with --policy")
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        disable_progress_bar()
        model: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype="auto", use_safetensors=True, trust_remote_code=False
        )
        self._model = model.to(self._device).eval()
        self._temperature = temperature

    def assess(self, samples: Sequence[Sample], advantages: np.ndarray, objective: ObjectiveSection) -> list[Stale]:
        """Each response under this policy; `advantages` float [N]."""
        ratios = [
            torch.from_numpy(logprobs - sample.behaviour_logprobs)
            for sample, logprobs in zip(samples, self._logprobs(samples), strict=True)
        ]
        lengths = torch.tensor([len(ratio) for ratio in ratios])
        segments = make_segments(lengths, torch.ones(len(lengths)))
        per_token = torch.from_numpy(np.asarray(advantages, dtype=np.float32))[segments.ids]
        log_ratio, start = torch.cat(ratios), initial_state(segments)
        keep = veto(log_ratio, per_token, segments, objective, start).keep
        triggers = ~veto(log_ratio, per_token, segments, objective.model_copy(update={"veto": "trigger"}), start).keep
        split = [part.split(lengths.tolist()) for part in (log_ratio, triggers, ~keep)]
        return [Stale(*(part.numpy() for part in parts)) for parts in zip(*split, strict=True)]

    @torch.no_grad()
    def _logprobs(self, samples: Sequence[Sample]) -> Iterator[np.ndarray]:
        """float32 [R] of each response at the rollout's temperature."""
        size = max(1, BATCH_TOKENS // max(sample.tokens for sample in samples))
        for start in range(0, len(samples), size):
            batch = samples[start : start + size]
            rows = [torch.from_numpy(np.concatenate([s.prompt_ids, s.response_ids]).astype(np.int64)) for s in batch]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self._device)
            mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
            logits = self._model(ids, attention_mask=mask.to(self._device)).logits.float() / self._temperature
            found = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0].cpu()
            for sample, row in zip(batch, found, strict=True):
                yield row[len(sample.prompt_ids) - 1 : sample.tokens - 1].numpy()


SIGNS = {"positive": 1, "negative": -1, "zero": 0}
CLIP = 48
"""Characters of a prompt and of a response in the table."""
PIPED_WIDTH = 180
"""Columns where no terminal tells how many there are."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which responses to show."""

    update: int | None = None
    group: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    advantage: Literal["positive", "negative", "zero"] | None = None
    vetoed: bool = False
    """Only those of which the veto drops tokens."""
    limit: int = 20


@dataclass(frozen=True, slots=True)
class Rollout:
    """A response, its update and its advantage."""

    update: int
    sample: Sample
    advantage: float
    stale: Stale | None
    """None without a later policy."""


def browse(
    run_dir: Path, stage: int | None, selection: Selection, policy: Path | None, overrides: Sequence[str] = ()
) -> None:
    """Print the selected responses: a table, or one group in full with its triggers marked.

    The veto is applied under `policy`, a Hugging Face checkpoint; with `selection.vetoed` by default the trained one
    in the run's `hf/`. `overrides` of the run's recipe show another veto: `objective.trigger_ratio=0.1`. Raises
    UserError when the run or the stage does not exist.
    """
    directory = RunDirectory(run_dir)
    recipe = load_recipe(directory.recipe, overrides) if directory.recipe.exists() else None
    if recipe is None:
        raise UserError(f"{run_dir}: not a run directory (it has no {directory.recipe.name})")
    policy = policy or (directory.hf if selection.vetoed else None)
    later = LaterPolicy(policy, recipe.rollout.temperature) if policy else None
    number, store = _stage(directory, stage)
    tokenizer = load_tokenizer(directory.hf if directory.hf.exists() else recipe.model.path)
    chosen = islice(_rollouts(store, selection, later, recipe), selection.limit)
    console = Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    if selection.group is not None:
        for rollout in chosen:
            _print_in_full(console, rollout, tokenizer)
        return
    console.print(_table(f"{run_dir}: stage {number}", list(chosen), tokenizer, recipe.objective if later else None))


def _stage(directory: RunDirectory, stage: int | None) -> tuple[int, StageStore]:
    """The stage asked for, or the newest sealed one."""
    stages = {int(path.name): StageStore(path) for path in sorted((directory.path / "stages").glob("[0-9]*"))}
    sealed = [number for number, store in stages.items() if store.sealed]
    number = stage if stage is not None else max(sealed, default=0)
    if number not in sealed:
        found = f"{len(stages[number].present())} groups so far" if number in stages else "nothing"
        raise UserError(
            f"{directory.path}: stage {number} holds {found}, only sealed ones are shown: {sealed or 'none'}"
        )
    return number, stages[number]


def _rollouts(store: StageStore, selection: Selection, later: LaterPolicy | None, recipe: Recipe) -> Iterator[Rollout]:
    """The selected responses, read update by update, so that memory holds one update."""
    objective, updates = recipe.objective, range(store.updates)
    if selection.update is not None and selection.update not in updates:
        raise UserError(f"--update {selection.update}: the stage's updates are 0 to {updates[-1]}")
    if selection.group is not None:
        selection = replace(selection, update=selection.group // recipe.rollout.prompts_per_update)
    for update in updates if selection.update is None else [selection.update]:
        samples = store.read_update(update)
        advantages = group_advantages(
            np.array([s.reward for s in samples]), np.array([s.group for s in samples]), objective
        )
        places = [i for i, sample in enumerate(samples) if _fits(sample, advantages[i], selection)]
        stale: list[Stale] | list[None] = [None] * len(places)
        if later and places:
            stale = later.assess([samples[i] for i in places], advantages[places], objective)
        for i, one in zip(places, stale, strict=True):
            if not selection.vetoed or (one is not None and one.dropped.any()):
                yield Rollout(update, samples[i], float(advantages[i]), one)


def _fits(sample: Sample, advantage: float, selection: Selection) -> bool:
    return (
        (selection.group is None or sample.group == selection.group)
        and (selection.min_reward is None or sample.reward >= selection.min_reward)
        and (selection.max_reward is None or sample.reward <= selection.max_reward)
        and (selection.advantage is None or np.sign(advantage) == SIGNS[selection.advantage])
        and (not selection.vetoed or advantage < 0)
    )


def _table(
    title: str, rollouts: list[Rollout], tokenizer: PreTrainedTokenizerBase, vetoed: ObjectiveSection | None
) -> Table:
    """`vetoed` is the objective whose veto was applied, None without a later policy."""
    caption = None if vetoed is None else _legend(vetoed)
    table = Table(title=title, caption=caption)
    for name in ("update", "group", "reward", "advantage", "tokens", *(["lowest ratio", "dropped"] if vetoed else [])):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("finish", no_wrap=True)
    for name in ("prompt", "response"):
        table.add_column(name, overflow="ellipsis", no_wrap=True, max_width=CLIP)
    for rollout in rollouts:
        sample, stale = rollout.sample, rollout.stale
        table.add_row(
            str(rollout.update),
            str(sample.group),
            f"{sample.reward:g}",
            f"{rollout.advantage:+.2f}",
            str(len(sample.response_ids)),
            *([] if stale is None else [f"{stale.lowest_ratio:.1e}", str(int(stale.dropped.sum()))]),
            sample.finish_reason,
            *(escape(_text(tokenizer, ids).replace("\n", "⏎")) for ids in (sample.prompt_ids, sample.response_ids)),
        )
    return table


def _legend(objective: ObjectiveSection) -> str:
    """The caption that says what a trigger is and what is dropped."""
    measure = {"token": "ratio", "prefix_mean": "prefix's mean ratio"}[objective.trigger]
    return f"dropped: by veto {objective.veto}; trigger: {measure} below {objective.trigger_ratio:g} where A < 0"


def _print_in_full(console: Console, rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> None:
    """Prompt and response as text; triggers are in «», dropped tokens in ⟦⟧, visible in a pipe too."""
    sample = rollout.sample
    facts = f"reward {sample.reward:g}, advantage {rollout.advantage:+.2f}, {sample.finish_reason}"
    console.rule(f"group {sample.group}, {escape(sample.problem)}: {facts}")
    console.print(Text(_text(tokenizer, sample.prompt_ids), style="dim"))
    response = Text(_text(tokenizer, sample.response_ids)) if rollout.stale is None else _marked(rollout, tokenizer)
    console.print(response)


def _marked(rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> Text:
    assert rollout.stale is not None
    text, inside = Text(), False
    stale = rollout.stale
    for token, trigger, dropped in zip(rollout.sample.response_ids, stale.trigger, stale.dropped, strict=True):
        if dropped != inside:
            text.append("⟦" if dropped else "⟧", style="red")
            inside = bool(dropped)
        piece = _text(tokenizer, np.array([token]))
        text.append(f"«{piece}»" if trigger else piece, style="bold red" if trigger else "red" if dropped else "")
    return text.append("⟧", style="red") if inside else text


def _text(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> str:
    return str(tokenizer.decode(ids.tolist()))
