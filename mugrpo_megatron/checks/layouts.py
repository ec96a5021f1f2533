"""Checks the learner's layout against ranks, model and batch, and finds the nearest one that works."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from importlib.util import find_spec
from itertools import product
from typing import Any

from mugrpo_megatron.checks.engines import EngineSetup, engine_problems
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hf_config import experts_of, has_delta
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.policy import RolloutSection
from mugrpo_megatron.recipe.systems import FP8_MULTIPLE, LearnerSection, ParallelSection

VIRTUAL = (1, 2, 4)
"""Values of `virtual_pipeline` that the search for the nearest layout tries."""


def bundled_configs() -> dict[str, dict[str, Any]]:
    """Returns the configs of public models by the name of their folder, for checks and plans of a recipe whose model is
    not on this machine."""
    table = tomllib.loads(files(__package__).joinpath("models.toml").read_text(encoding="utf-8"))

    def config(entry: dict[str, Any]) -> dict[str, Any]:
        fields = {key: value for key, value in entry.items() if key != "like"}
        return {**config(table[entry["like"]]), **fields} if "like" in entry else fields

    return {name: config(entry) for name, entry in table.items()}


def divisors(n: int) -> list[int]:
    """Returns all divisors of n > 0, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def candidates(model: Mapping[str, Any], world: int) -> Iterator[ParallelSection]:
    """Yields the layouts of `world` ranks in which `tensor` divides the model's heads, `expert` divides its experts,
    and `pipeline` is at most its number of layers.

    Not all of them are valid; `layout_problems` decides.
    """
    heads, layers = model.get("num_attention_heads") or 1, model.get("num_hidden_layers") or 1
    experts = experts_of(model)
    for tensor, pipeline in product(divisors(heads), divisors(world)):
        if world % (tensor * pipeline) or pipeline > layers:
            continue
        for context in divisors(world // (tensor * pipeline)):
            data = world // (tensor * pipeline * context)
            for expert in divisors(math.gcd(data * context, experts)) if experts else [1]:
                for virtual in VIRTUAL if pipeline > 1 else (1,):
                    if virtual > 1 and layers % (pipeline * virtual):
                        continue
                    yield ParallelSection(
                        tensor=tensor,
                        pipeline=pipeline,
                        virtual_pipeline=virtual,
                        context=context,
                        expert=expert,
                    )


def layout_distance(first: ParallelSection, second: ParallelSection) -> float:
    """Returns how far two layouts are apart: for `tensor`, `pipeline` and so on, the number of doublings from one
    layout's value to the other's, weighted and summed."""
    # Context parallelism weighs most, so that the nearest layout seldom adds it: only sequences that are too long for
    # one rank need it.
    weights = {"tensor": 1.0, "pipeline": 1.0, "virtual_pipeline": 0.5, "context": 2.0, "expert": 1.0}
    return sum(w * abs(math.log2(getattr(first, size) / getattr(second, size))) for size, w in weights.items())


def describe_layout(layout: ParallelSection) -> str:
    """Returns the layout's sizes above 1 as recipe keys, `tensor = 2, pipeline = 4`; "every size 1" if none is."""
    return ", ".join(f"{name} = {value}" for name, value in layout if value > 1) or "every size 1"


LAUNCH_HINT = "start `torchrun --nproc-per-node {block}` or shrink the layout"
"""Way out for a run whose number of ranks is not a multiple of `block`."""
RECIPE_KEYS = {
    "tensor": "parallel.tensor",
    "pipeline": "parallel.pipeline",
    "virtual_pipeline": "parallel.virtual_pipeline",
    "expert": "parallel.expert",
}


def check_layout(
    recipe: Recipe,
    model: Mapping[str, Any],
    world_size: int,
    way_out: str = LAUNCH_HINT,
    describe: Callable[[ParallelSection], str] = describe_layout,
) -> None:
    """Check the layout before a process group or an engine exists.

    `model` is the Hugging Face config, `world_size` the number of learner ranks. `way_out`, a format string, tells the
    user how to get a multiple of `{block}` ranks. Raises UserError with every problem and, for a wrong layout, the
    nearest one that works, formatted by `describe`.
    """
    wrong = list(layout_problems(recipe.parallel, recipe.rollout, model, world_size, way_out))
    problems = [*wrong, *problems_of_any_layout(recipe, model)]
    if wrong:
        nearest = nearest_layout(recipe.parallel, recipe.rollout, model, world_size)
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        problems.append(
            f"the nearest layout that {ranks} can run: {describe(nearest)}"
            if nearest
            else f"no layout of this model and batch works on {ranks}; change the number of ranks"
        )
    if problems:
        raise UserError("; ".join(problems))


def check_layers(learner: LearnerSection, dtype: str, cuda: bool) -> None:
    """Raise UserError when `learner.layers` cannot work with `model.dtype` or on this machine."""
    if learner.layers in ("local", "auto"):
        return
    setting = f'learner.layers = "{learner.layers}"'
    if learner.fp8 != "none" and dtype != "bfloat16":
        raise UserError(
            f"{setting} keeps the weights, and computes what is not in fp8, in bfloat16, so it "
            'needs model.dtype = "bfloat16"; set that, or learner.layers = "local"'
        )
    if not cuda:
        raise UserError(f'{setting} needs CUDA, and this learner runs on CPU; set it to "local" or "auto"')
    if find_spec("transformer_engine") is None:
        raise UserError(
            f"{setting}, but Transformer Engine is not installed: run `run_scripts/setup.sh --cuda --with-te`, or set "
            'the key to "local" or "auto"'
        )


def nearest_layout(
    parallel: ParallelSection, rollout: RolloutSection, model: Mapping[str, Any], world_size: int
) -> ParallelSection | None:
    """Returns the valid layout nearest to `parallel`; None if the model and batch have none on `world_size` ranks."""
    for candidate in sorted(candidates(model, world_size), key=lambda layout: layout_distance(layout, parallel)):
        if not any(layout_problems(candidate, rollout, model, world_size)):
            return candidate
    return None


def layout_problems(
    parallel: ParallelSection,
    rollout: RolloutSection,
    model: Mapping[str, Any],
    world_size: int,
    way_out: str = LAUNCH_HINT,
) -> Iterator[str]:
    """Yields a sentence for each reason why a layout cannot run this model and batch on `world_size` ranks.

    `way_out`, a format string, tells the user how to get a multiple of `{block}` ranks.
    """
    tp, pp, cp = parallel.tensor, parallel.pipeline, parallel.context
    block = tp * pp * cp
    if world_size % block:
        yield (
            f"parallel: tensor {tp} x pipeline {pp} x context {cp} needs a multiple of {block} ranks but {world_size} "
            f"run; {way_out.format(block=block)}"
        )
        return
    data_parallel = world_size // block
    responses = rollout.prompts_per_update * rollout.responses_per_prompt
    if responses % data_parallel:
        yield (
            f"rollout: prompts_per_update x responses_per_prompt = {responses} does not divide over "
            f"{data_parallel} data parallel ranks"
        )
    if cp > 1 and has_delta(model):
        yield (
            f"parallel.context = {cp} splits sequences, and the state of the model's gated delta networks passes from "
            "each token to the next; set it to 1"
        )
    yield from split_problems(parallel, model)
    yield from _expert_problems(parallel, experts_of(model), data_parallel)


def split_problems(
    parallel: ParallelSection, model: Mapping[str, Any], keys: Mapping[str, str] = RECIPE_KEYS
) -> Iterator[str]:
    """Yields a sentence for each reason why a layout cannot split the model, whatever the number of ranks.

    `keys` are the names by which the user knows the layout's sizes: recipe keys, or a command's options.
    """
    pp, vpp, expert = parallel.pipeline, parallel.virtual_pipeline, parallel.expert
    if vpp > 1 and pp == 1:
        yield f"{keys['virtual_pipeline']} above 1 needs {keys['pipeline']} of at least 2"
    yield from _shard_problems(keys["tensor"], parallel.tensor, model)
    if has_delta(model) and (kv_heads := model.get("num_key_value_heads") or 1) % parallel.tensor:
        # Megatron cannot give one head to several ranks in attention with an output gate
        # (core/transformer/attention.py).
        yield f"{keys['tensor']} = {parallel.tensor} does not divide the {kv_heads} key/value heads of gated attention"
    layers, experts = model.get("num_hidden_layers") or 1, experts_of(model)
    if pp > layers:
        yield f"{keys['pipeline']} = {pp} is more than the model's {layers} layers"
    elif vpp > 1 and layers % (pp * vpp):
        product = f"{keys['pipeline']} x {keys['virtual_pipeline']} = {pp * vpp}"
        yield f"{product} does not divide the model's {layers} layers; choose one of {divisors(layers)}"
    if expert > 1 and not experts:
        yield f"{keys['expert']} = {expert} but the model has no experts"
    elif experts and experts % expert:
        yield f"{keys['expert']} = {expert} does not divide the model's {experts} experts"


def _expert_problems(parallel: ParallelSection, experts: int, data_parallel: int) -> Iterator[str]:
    if not experts:
        return
    if data_parallel * parallel.context % parallel.expert:
        yield (
            f"parallel.expert = {parallel.expert} does not divide the {data_parallel * parallel.context} data times "
            "context parallel ranks that the experts are spread over"
        )


def _shard_problems(name: str, size: int, model: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each dimension of the model that `size` tensor parallel ranks cannot split evenly."""
    heads = model.get("num_attention_heads") or 1
    kv_heads = model.get("num_key_value_heads") or heads
    if heads % size:
        yield f"{name} = {size} does not divide the model's {heads} attention heads; take one of {divisors(heads)}"
    if kv_heads % size and size % kv_heads:
        yield f"{name} = {size} neither divides nor is a multiple of the model's {kv_heads} key/value heads"
    for key in (
        "intermediate_size",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "linear_num_key_heads",
    ):
        if model.get(key) and model[key] % size:
            yield f"{name} = {size} does not divide the model's {key} of {model[key]}"


def _fp8_problems(learner: LearnerSection, tp: int, model: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each reason why `tp` tensor parallel ranks cannot compute the model's products in fp8; none
    if the recipe does not ask for fp8."""
    if learner.fp8 == "none":
        return
    if has_delta(model):
        yield f'learner.layers = "{learner.layers}": gated delta networks were not tried in fp8; take "local"'
    multiple = FP8_MULTIPLE[learner.fp8]
    for key in ("hidden_size", "intermediate_size", "moe_intermediate_size"):
        if model.get(key) and model[key] % (multiple * tp):
            shared = f" over {tp} tensor parallel ranks" if tp > 1 else ""
            yield (
                f'learner.layers = "{learner.layers}" needs multiples of {multiple}, but the model\'s {key} is '
                f'{model[key]}{shared}; take "transformer_engine"'
            )


def problems_of_any_layout(recipe: Recipe, model: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each conflict of the model with settings other than the learner's layout.

    Of the layout only `parallel.tensor` counts, for the sizes that fp8 needs.
    """
    yield from _shard_problems("engine.tensor", recipe.engine.tensor, model)
    yield from engine_problems(EngineSetup(recipe, model))
    yield from _fp8_problems(recipe.learner, recipe.parallel.tensor, model)
    if recipe.model.dtype == "float16" and experts_of(model):
        yield (
            'model.dtype = "float16" with experts: Megatron has one loss scale for the experts and another for the '
            'other weights, and an overflow lowers only one of them; set it to "bfloat16"'
        )
    if recipe.learner.routing_replay != "off" and not experts_of(model):
        yield (
            f'learner.routing_replay = "{recipe.learner.routing_replay}" but the model has no experts; set it to "off"'
        )
    if recipe.objective.mismatch != "none" and recipe.rollout.behaviour == "engine":
        yield (
            f'objective.mismatch = "{recipe.objective.mismatch}" corrects ratios against the learner\'s probabilities; '
            'set rollout.behaviour = "learner" with it, or objective.mismatch = "none"'
        )
    if recipe.checkpoint.every_stages > 1 and recipe.schedule.ends_early:
        yield (
            "checkpoint.every_stages above 1 with schedule.max_kl: a resumed run repeats whole stages, and by rounding "
            "on a GPU a repeated stage could end at another update than before; set it to 1"
        )
    limit = model.get("max_position_embeddings")
    response = recipe.longest_response
    tokens = recipe.data.max_prompt_tokens + response
    if limit and tokens > limit:
        key = "rollout.max_response_tokens" if response == recipe.rollout.max_response_tokens else "eval's max_tokens"
        yield (
            f"data.max_prompt_tokens + {key} = {tokens} exceeds the model's {limit} positions "
            "(max_position_embeddings); lower one of the two"
        )
