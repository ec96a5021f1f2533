"""Checks recipes with `[lora]`, before anything slow is imported."""

from __future__ import annotations

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.extras.lora.peft_files import check_base, read_adapter
from mugrpo_megatron.extras.lora.targets import adapted_leaves, adapter_parameters, target_kinds
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.weights.architecture import Architecture


def check_lora(recipe: Recipe, architecture: Architecture) -> str:
    """Check targets, rank, layout and `lora.start`, and return a line for the user about the adapters.

    Raises UserError for a setting that does not fit the model, and for an adapter that does not fit the settings.
    """
    section, rank = recipe.lora, recipe.lora.rank or 0
    kinds = target_kinds(architecture, section.targets)
    if recipe.learner.layers != "local":
        raise UserError(
            f'lora: learner.layers = "{recipe.learner.layers}" may fuse norms into the layers that get adapters; '
            'set it to "local"'
        )
    largest = max(min(leaf.inputs, leaf.outputs) for leaf in adapted_leaves(architecture, kinds))
    if rank > largest:
        raise UserError(
            f"lora.rank = {rank} is above {largest}, the largest rank of a layer that gets an adapter; lower it"
        )
    heads = architecture.transformer["num_query_groups"]
    if heads % recipe.parallel.tensor:
        raise UserError(
            f"lora: parallel.tensor = {recipe.parallel.tensor} does not divide the model's {heads} key/value heads, "
            f"and an adapter needs whole heads on every rank; set it to a divisor of {heads}"
        )
    if section.start is not None:
        start = read_adapter(section.start, architecture)
        for key, setting, stored in (
            ("rank", rank, start.rank),
            ("alpha", section.alpha, start.alpha),
            ("targets", list(kinds), list(start.kinds)),
        ):
            if setting != stored:
                raise UserError(
                    f"lora.start = {section.start} has {key} {stored}, and lora.{key} gives {setting}; set it to the "
                    "adapter's"
                )
        if recipe.model.directory.exists():
            check_base(start, recipe.model.directory)
    trained = sum(adapter_parameters(architecture, rank, section.targets, range(architecture.layers)))
    return f"lora: rank {rank} on {', '.join(kinds)}, {trained:,} trained parameters"
