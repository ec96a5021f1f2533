"""What keys of TRL, verl, slime, Megatron and OpenRLHF are called in a recipe."""

from __future__ import annotations

from typing import Any, NamedTuple

MOST_SHOWN = 3
"""Keys of one unknown section that a message translates."""
DEEPEST = 6
"""Levels of an unknown section that are searched for them."""


class Ours(NamedTuple):
    """The keys that do the same in a recipe."""

    keys: tuple[str, ...]
    """As `section.key`."""
    note: str = ""
    """How the value differs."""


_G = Ours(("rollout.responses_per_prompt",))
_LENGTH = Ours(("rollout.max_response_tokens",))
_PROMPT_LENGTH = Ours(("data.max_prompt_tokens",))
_SAMPLES = Ours(("eval.samples",))
_LR = Ours(("optimizer.lr",))
_KL = Ours(("objective.kl_coef",), "with objective.kl_anchor")
_LOW = Ours(("objective.clip_low",), "a bound of the ratio: 1 - epsilon")
_HIGH = Ours(("objective.clip_high",), "a bound of the ratio: 1 + epsilon")
_BOTH = Ours(("objective.clip_low", "objective.clip_high"), "bounds of the ratio: 1 - epsilon and 1 + epsilon")
_MICRO = Ours(("learner.micro_batch_tokens",), "in tokens")
_BATCH = Ours(("rollout.prompts_per_update",), "the prompts of one optimizer update")
_STAGE = Ours(("rollout.prompts_per_update", "schedule.updates_per_stage"), "their product is what a stage samples")
_LENGTH_OF_RUN = Ours(("schedule.stages", "schedule.updates_per_stage"), "their product is the number of updates")
_PER_STAGE = Ours(("schedule.updates_per_stage",))
_PASSES = Ours(("schedule.passes",))
_NAME = Ours(("objective.name",))
_WARMUP = Ours(("optimizer.warmup_updates",))
_DECAY = Ours(("optimizer.decay",))
_CLIP = Ours(("optimizer.clip_grad",))
_REWARD = Ours(("reward.function",), "`module:function`")
_MODEL = Ours(("model.path",))
_RUN = Ours(("run.dir",))
_TENSOR = Ours(("parallel.tensor", "engine.tensor"), "the learner's and the engines'")
_ENGINE_TENSOR = Ours(("engine.tensor",))
_MEMORY = Ours(("engine.memory_fraction",))
_TRAIN = Ours(("data.train",))
_EVAL = Ours(("data.eval",))
_QUESTION = Ours(("data.question_field",))
_ANSWER = Ours(("data.answer_field",))
_DTYPE = Ours(("model.dtype",))
_KL_IN = Ours(("objective.kl_in",), "with objective.kl_anchor and objective.kl_coef")
_ENTROPY = Ours(("objective.entropy_coef",))

OTHERS: dict[str, Ours] = {
    # sampling
    **dict.fromkeys(("num_generations", "n_samples_per_prompt", "rollout.n", "n"), _G),
    **dict.fromkeys(
        (
            "max_completion_length",
            "max_response_length",
            "rollout_max_response_len",
            "generate_max_len",
            "max_new_tokens",
        ),
        _LENGTH,
    ),
    **dict.fromkeys(("max_prompt_length", "rollout_max_prompt_len", "prompt_max_len"), _PROMPT_LENGTH),
    "rollout_temperature": Ours(("rollout.temperature",)),
    "rollout_top_p": Ours(("rollout.top_p",)),
    "rollout_top_k": Ours(("rollout.top_k",)),
    **dict.fromkeys(("n_samples_per_eval_prompt", "num_generations_eval", "val_kwargs.n", "eval.n"), _SAMPLES),
    "val_kwargs.temperature": Ours(("eval.temperature",)),
    "val_kwargs.top_p": Ours(("eval.top_p",)),
    # batches and schedule
    **dict.fromkeys(
        (
            "per_device_train_batch_size",
            "micro_train_batch_size",
            "micro_batch_size",
            "ppo_micro_batch_size",
            "ppo_micro_batch_size_per_gpu",
            "ppo_max_token_len_per_gpu",
            "max_tokens_per_gpu",
        ),
        _MICRO,
    ),
    **dict.fromkeys(("gradient_accumulation_steps", "ppo_mini_batch_size", "global_batch_size"), _BATCH),
    **dict.fromkeys(("train_batch_size", "rollout_batch_size", "generation_batch_size"), _STAGE),
    **dict.fromkeys(("steps_per_generation", "num_steps_per_rollout"), _PER_STAGE),
    **dict.fromkeys(("num_iterations", "ppo_epochs", "max_epochs"), _PASSES),
    **dict.fromkeys(
        ("max_steps", "num_train_epochs", "total_epochs", "total_training_steps", "num_episodes", "num_epoch"),
        _LENGTH_OF_RUN,
    ),
    "num_rollout": Ours(("schedule.stages",)),
    # objective
    **dict.fromkeys(("beta", "kl_coef", "kl_loss_coef", "init_kl_coef"), _KL),
    **dict.fromkeys(("kl_loss_type", "kl_estimator"), Ours(("objective.kl_estimator",))),
    **dict.fromkeys(("use_kl_loss", "use_kl_in_reward"), _KL_IN),
    **dict.fromkeys(("clip_ratio_low", "epsilon_low"), _LOW),
    **dict.fromkeys(("clip_ratio_high", "epsilon_high", "eps_clip_high"), _HIGH),
    **dict.fromkeys(("epsilon", "clip_ratio", "eps_clip", "eps_clip_low_high"), _BOTH),
    **dict.fromkeys(("clip_ratio_c", "eps_clip_c"), Ours(("objective.dual_clip",))),
    **dict.fromkeys(("loss_type", "adv_estimator", "advantage_estimator"), _NAME),
    "loss_agg_mode": Ours(("objective.reduction",)),
    "scale_rewards": Ours(("objective.advantage",)),
    "norm_adv_by_std_in_grpo": Ours(("objective.advantage",)),
    **dict.fromkeys(("entropy_coeff", "entropy_loss_coef"), _ENTROPY),
    "use_tis": Ours(("objective.mismatch",)),
    "tis_clip": Ours(("objective.mismatch_high",)),
    # optimizer
    **dict.fromkeys(("lr", "learning_rate", "actor_learning_rate"), _LR),
    **dict.fromkeys(("warmup_steps", "lr_warmup_steps", "lr_warmup_iters", "lr_warmup_samples"), _WARMUP),
    **dict.fromkeys(("lr_scheduler_type", "lr_decay_style", "lr_scheduler"), _DECAY),
    **dict.fromkeys(("max_grad_norm", "max_norm", "grad_clip"), _CLIP),
    "adam_beta1": Ours(("optimizer.beta1",)),
    "adam_beta2": Ours(("optimizer.beta2",)),
    **dict.fromkeys(("adam_eps", "adam_epsilon"), Ours(("optimizer.eps",))),
    # rewards and data
    **dict.fromkeys(("reward_funcs", "rm_type", "custom_rm_path", "custom_reward_function", "remote_rm_url"), _REWARD),
    "reward_weights": Ours(("reward.functions",), "each has its weight"),
    **dict.fromkeys(("train_files", "prompt_data", "dataset_name", "train_dataset"), _TRAIN),
    **dict.fromkeys(("val_files", "eval_prompt_data", "eval_dataset"), _EVAL),
    **dict.fromkeys(("prompt_key", "input_key"), _QUESTION),
    "label_key": _ANSWER,
    "apply_chat_template": Ours(("data.prompt_style",)),
    **dict.fromkeys(("chat_template_kwargs", "apply_chat_template_kwargs"), Ours(("data.template_arguments",))),
    "input_template": Ours(("data.question_template",), "with {question} where the question goes"),
    # model, machines, engines
    **dict.fromkeys(("model_name_or_path", "hf_checkpoint", "pretrain", "model_name"), _MODEL),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype", "param_dtype"), _DTYPE),
    **dict.fromkeys(("tensor_model_parallel_size", "tensor_parallel_size"), _TENSOR),
    "pipeline_model_parallel_size": Ours(("parallel.pipeline",)),
    "virtual_pipeline_model_parallel_size": Ours(("parallel.virtual_pipeline",)),
    "context_parallel_size": Ours(("parallel.context",)),
    "expert_model_parallel_size": Ours(("parallel.expert",)),
    "sequence_parallel": Ours(("parallel.sequence",)),
    **dict.fromkeys(("recompute_granularity", "gradient_checkpointing", "enable_gradient_checkpointing"),
                    Ours(("learner.recompute",))),
    **dict.fromkeys(("vllm_tensor_parallel_size", "rollout_num_gpus_per_engine"), _ENGINE_TENSOR),
    **dict.fromkeys(
        (
            "gpu_memory_utilization",
            "vllm_gpu_memory_utilization",
            "mem_fraction_static",
            "sglang_mem_fraction_static",
        ),
        _MEMORY,
    ),
    # where results go
    **dict.fromkeys(("output_dir", "save_path", "default_local_dir", "experiment_name"), _RUN),
    "save_steps": Ours(("checkpoint.every_updates",)),
    **dict.fromkeys(("save_freq", "save_interval"), Ours(("checkpoint.every_stages",))),
    "save_total_limit": Ours(("checkpoint.keep",)),
    "eval_steps": Ours(("eval.every_updates",)),
    **dict.fromkeys(("test_freq", "eval_interval"), Ours(("eval.every_stages",))),
    **dict.fromkeys(("project_name", "wandb_project", "use_wandb", "report_to"), Ours(("track.wandb_project",))),
}  # fmt: skip
"""A key of another trainer, in lower case with underscores, with what stands before it if that decides -> ours."""


def ours(name: str) -> Ours | None:
    """What a key of another trainer is called here, whatever stands before it; None for one that is not known.

    The name may be written as a flag: `--tensor-model-parallel-size`.
    """
    parts = name.strip().lstrip("-").replace("-", "_").lower().split(".")
    return OTHERS.get(".".join(parts[-2:])) or OTHERS.get(parts[-1])


def translated(name: str, value: Any = None) -> str:
    """A sentence on the keys that a name, and those of the section `value` below it, have here; empty without any."""
    names = list(_leaves(name, value)) if isinstance(value, dict) else [name]
    found = {one: there for one in names if (there := ours(one)) and one not in there.keys}
    return "; ".join(_sentence(one, there) for one, there in list(found.items())[:MOST_SHOWN])


def _sentence(name: str, there: Ours) -> str:
    keys = " and ".join(f"`{key}`" for key in there.keys)
    return f"`{name}` of another trainer is {keys} here" + (f" ({there.note})" if there.note else "")


def _leaves(name: str, value: Any, deep: int = 0) -> list[str]:
    """The dotted names of a section's values, down to `DEEPEST` levels."""
    if not isinstance(value, dict) or deep == DEEPEST:
        return [name]
    return [leaf for key, inner in value.items() for leaf in _leaves(f"{name}.{key}", inner, deep + 1)]
