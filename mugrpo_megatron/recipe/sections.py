"""The recipe's sections except `[objective]`; each field's docstring is its entry in docs/recipe.md."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from mugrpo_megatron.recipe.objective import ObjectiveSection, Section


class RunSection(Section):
    """Where a run lives and what makes it repeatable."""

    dir: Path = Path("runs/default")
    """Run directory: resolved recipe, metrics, stages, checkpoints, final Hugging Face checkpoint, report."""
    seed: NonNegativeInt = 0
    """Seed of the data order, of sampling and of every other random stream."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of learner and engine; `auto` takes CUDA where torch finds it."""
    collective_timeout_s: PositiveFloat = 1800.0
    """Seconds that a collective waits before it fails with rank, phase and likely cause."""


class ModelSection(Section):
    """The policy that is trained."""

    path: Path = Path("runs/warm-start/hf")
    """Hugging Face checkpoint directory (config.json, safetensors, tokenizer) that training starts from."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Parameter and activation type of learner and engine; master weights and moments are always float32."""


class DataSection(Section):
    """Problems to train on and to evaluate on."""

    train: str = "arithmetic"
    """A bundled task, a `.jsonl` or `.parquet` file, a named data set, or `owner/name` on the hub; commas join them."""
    eval: str = "arithmetic"
    """Held-out problems, named as `train` is."""
    eval_problems: PositiveInt = 500
    """At most this many problems of each held-out set are used for an evaluation."""
    generated_problems: PositiveInt = 50_000
    """Training problems that a bundled task generates."""
    question_field: str = "problem"
    """Column that holds the question, or a path inside one (`prompt.0.content`)."""
    answer_field: str = "answer"
    """Column that holds the gold answer, or a path inside one (`reward_model.ground_truth`)."""
    prompt_style: str = "plain"
    """How a question becomes a prompt: `plain`, `chat` (the tokenizer's chat template) or a named math style."""
    max_prompt_tokens: PositiveInt = 512
    """Longer prompts are left out and counted."""
    strict: bool = True
    """A malformed row or an unverifiable gold ends the command; false leaves them out and says how many."""
    deduplicate: bool = True
    """Keep only the first of several training problems with the same question."""
    contamination: Literal["report", "drop", "off"] = "report"
    """What to do with training problems that share half of their 8-grams with a held-out problem."""


class ScheduleSection(Section):
    """S stages of µ updates each. GRPO and mu-GRPO differ in this section and in `[objective]`."""

    stages: PositiveInt = 4
    """S: how often the engines generate, unless stages end early."""
    updates_per_stage: PositiveInt = 64
    """µ: optimizer updates taken on one stage's responses; the paper has 4 for GRPO and 1024 for mu-GRPO."""
    min_ess: float = Field(0.0, ge=0.0, lt=1.0)
    """End a stage early after an update whose effective sample size is below this; the run still takes S µ updates."""
    max_vetoed: float = Field(1.0, gt=0.0, le=1.0)
    """End a stage early after an update in which more than this fraction of the response tokens was vetoed."""

    @property
    def total_updates(self) -> int:
        """S µ: optimizer updates of the whole run."""
        return self.stages * self.updates_per_stage


class RolloutSection(Section):
    """How the responses of an update are sampled."""

    prompts_per_update: PositiveInt = 32
    """Problems whose responses make up one optimizer update."""
    responses_per_prompt: int = Field(8, ge=2)
    """G: responses sampled for each problem; the group that the advantage is relative to."""
    max_response_tokens: PositiveInt = 1024
    """A longer response is cut and finishes with reason `length`."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the learner divides its logits by it as well, so that ratios compare the same policies."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Nucleus sampling; below 1 the engine's logprobs are not renormalised and ratios are biased."""
    behaviour: Literal["engine", "learner"] = "engine"
    """Source of the behaviour logprobs: the engine (free) or a learner pass at the stage's start (ratio exactly 1)."""


class OptimizerSection(Section):
    """AdamW over float32 master weights."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up, over all updates of the run."""
    warmup_updates: NonNegativeInt = 0
    """Updates of linear warm-up from 0 to `lr`."""
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    """Decay of the first moment."""
    beta2: float = Field(0.95, ge=0.0, lt=1.0)
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; norms and biases are left out."""
    clip_grad: PositiveFloat = 1.0
    """Global gradient norm that an update is clipped to."""
    max_skipped: PositiveInt = 10
    """End the run, with state and last batch saved, after this many skipped updates (non-finite gradient) in a row."""


class ParallelSection(Section):
    """How the learner is laid out over ranks; the ranks that the other sizes leave are data parallel."""

    tensor: PositiveInt = 1
    """Tensor parallel size: heads, ffn and vocabulary are split over this many ranks."""
    pipeline: PositiveInt = 1
    """Pipeline parallel size: layers are split over this many ranks."""
    virtual_pipeline: PositiveInt = 1
    """Model chunks per pipeline rank (interleaved schedule); 1 is plain 1F1B."""
    context: PositiveInt = 1
    """Context parallel size: each packed row is split over this many ranks, for sequences that one rank cannot hold."""
    expert: PositiveInt = 1
    """Expert parallel size of mixture-of-experts models."""
    sequence: bool = False
    """Sequence parallelism: norms and residual stream are split over the tensor parallel ranks."""


class LearnerSection(Section):
    """How an update is split into micro-batches, and what it keeps in memory."""

    micro_batch_tokens: PositiveInt = 16384
    """Packed tokens (prompt and response) of one micro-batch on one rank; one response may exceed it alone."""
    loss_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits are in memory at once."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in the backward pass."""
    layers: Literal["local", "transformer_engine", "auto"] = "local"
    """Linear layers: Megatron's own, or Transformer Engine's with fused norms; `auto` takes these if installed."""
    fp8: Literal["none", "tensorwise", "blockwise"] = "none"
    """Products of Transformer Engine's layers in fp8, scaled by tensor or by blocks of 128; weights stay bfloat16."""
    threads: NonNegativeInt = 0
    """CPU threads of each learner rank; 0 divides the machine's cores among the local ranks."""


class EngineSection(Section):
    """The SGLang engine that shares the learner's devices."""

    tensor: PositiveInt = 1
    """Tensor parallel size of each engine; it must divide the ranks of a node."""
    per_node: NonNegativeInt = 0
    """Engines on each node; 0 takes as many as its devices hold (CUDA) or its cores can run (CPU)."""
    between_stages: Literal["restart", "sleep"] = "sleep"
    """While the learner works: `sleep` keeps the process and releases its memory, `restart` ends it."""
    memory_fraction: float = Field(0.8, gt=0.0, lt=1.0)
    """Share of a GPU's memory that weights and KV cache may take (CUDA)."""
    max_running_requests: PositiveInt = 1024
    """Most responses decoded together; short responses gain from many."""
    max_total_tokens: NonNegativeInt = 0
    """KV cache size in tokens; 0 lets the engine size it from `memory_fraction` (CUDA) or the batch (CPU)."""
    attention_backend: str = "auto"
    """SGLang attention backend; `auto` takes torch_native on CPU and SGLang's choice on CUDA."""
    threads: PositiveInt = 1
    """CPU threads of each engine rank (CPU). More than 1 helps only large models on idle cores; on busy cores threads
    slow each other down."""
    start_timeout_s: PositiveFloat = 300.0
    """Seconds until an engine that has not started counts as failed."""
    request_timeout_s: PositiveFloat = 600.0
    """Seconds without any finished response until a generating engine counts as hung."""
    max_failures: PositiveInt = 3
    """End the run after this many engine failures in a row without a finished response between them."""
    bucket_bytes: PositiveInt = 512 * 1024 * 1024
    """Largest flattened bucket of a weight sync; the peak extra memory of the bridge."""
    check_weights: Literal["first", "every", "never"] = "first"
    """Compare the engines' weights with the learner's, bit by bit: after an engine's first sync, each, or never."""


class RewardSection(Section):
    """How a response becomes a number."""

    function: str = "math"
    """`math` (math-verify) or a user's `module:function`."""
    workers: NonNegativeInt = 0
    """Verifier processes on each generating rank; 0 gives the node's engines one per two cores, at least 1."""
    policy: Literal["strict", "lenient"] = "strict"
    """`strict` refuses answers that hedge or leave the arithmetic undone; `lenient` takes what math-verify accepts."""
    timeout_s: PositiveFloat = 8.0
    """Wall-clock seconds after which a worker is killed; it gives up by itself after 1/8 of that in processor time."""
    max_answer_chars: PositiveInt = 2000
    """A longer extracted answer scores 0 without being parsed."""
    worker_memory_mb: PositiveInt = 1024
    """Address-space limit of a verifier process."""
    format_pattern: str = r"\\boxed\{"
    """Regular expression that a well-formed response matches exactly once."""
    format_weight: float = Field(0.0, ge=0.0, le=1.0)
    """Added to the reward of a well-formed response; 0 leaves the format free."""
    overlong_buffer_tokens: NonNegativeInt = 0
    """This many tokens before `rollout.max_response_tokens` cost reward, linearly up to `overlong_penalty`; 0: off."""
    overlong_penalty: NonNegativeFloat = 1.0
    """Reward that a response of `rollout.max_response_tokens` loses, with an overlong buffer."""


class SetSection(Section):
    """How one held-out set is sampled; unset keys take the values of `[eval]`."""

    samples: PositiveInt | None = None
    """Responses per problem (mean@k)."""
    temperature: NonNegativeFloat | None = None
    """0 is greedy."""
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    """Nucleus sampling."""
    max_tokens: PositiveInt | None = None
    """A longer response is cut."""


class EvalSection(Section):
    """Held-out accuracy before, during and after training, set by set."""

    every_stages: NonNegativeInt = 1
    """Evaluate after every n-th stage; 0 evaluates only before the first stage and after the last."""
    every_updates: NonNegativeInt = 0
    """Also evaluate inside a stage, after every n-th of its updates; 0 evaluates only at the ends of stages."""
    samples: PositiveInt = 1
    """Responses per problem (mean@k)."""
    temperature: NonNegativeFloat = 0.0
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Nucleus sampling."""
    max_tokens: PositiveInt | None = None
    """A longer response is cut; unset takes `rollout.max_response_tokens`."""
    sets: dict[str, SetSection] = Field(default_factory=dict)
    """Held-out sets with other settings, by name: `[eval.sets.aime24]`, with any of the four keys above."""

    def of(self, name: str) -> EvalSection:
        """The settings of the held-out set `name`: its own, else the general ones."""
        own = self.sets.get(name, SetSection())
        return self.model_copy(update={**own.model_dump(exclude_none=True), "sets": {}})


class CheckpointSection(Section):
    """When the learner's full state is saved, and how many saves are kept."""

    every_updates: NonNegativeInt = 0
    """Also save inside a stage every n updates; 0 saves only at stage ends."""
    every_minutes: NonNegativeFloat = 0.0
    """Also save inside a stage when the last save is n minutes old; 0 ignores the clock."""
    asynchronous: bool = True
    """Copy the state to host memory and write it while training continues; false waits for the disk."""
    keep: PositiveInt = 2
    """Number of newest complete checkpoints to keep."""


class TrackSection(Section):
    """Where metrics go besides metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard event files under the run directory."""
    wandb_project: str | None = None
    """Weights & Biases project; the key stays in the environment."""


class SftSection(Section):
    """Warm start: a small Qwen2 model learns a bundled task from scratch by supervised learning."""

    output: Path = Path("runs/warm-start")
    """Run directory of the warm start; the checkpoint is in its `hf/`."""
    layers: PositiveInt = 2
    """Transformer layers of the new model."""
    hidden: PositiveInt = 128
    """Width of the residual stream."""
    ffn: PositiveInt = 256
    """Width of the gated feed-forward layer."""
    heads: PositiveInt = 8
    """Attention heads."""
    kv_heads: PositiveInt = 8
    """Key/value heads; with fewer than `heads` the bundled task takes several times the updates."""
    max_updates: PositiveInt = 4000
    """Updates after which the warm start ends at any accuracy."""
    batch: PositiveInt = 48
    """Problems in one update."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate."""
    target_accuracy: float = Field(0.45, gt=0.0, le=1.0)
    """Held-out greedy accuracy at which the warm start stops."""
    check_every: PositiveInt = 25
    """Updates between accuracy checks."""


class Recipe(Section):
    """All settings of one run."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    schedule: ScheduleSection = ScheduleSection()
    rollout: RolloutSection = RolloutSection()
    objective: ObjectiveSection = ObjectiveSection()
    optimizer: OptimizerSection = OptimizerSection()
    parallel: ParallelSection = ParallelSection()
    learner: LearnerSection = LearnerSection()
    engine: EngineSection = EngineSection()
    reward: RewardSection = RewardSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    track: TrackSection = TrackSection()
    sft: SftSection = SftSection()
