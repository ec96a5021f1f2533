"""What functions of slime's convention import: a file of slime's runs here once its three imports name this module.

from mugrpo_megatron.extras.episodes.slime import GenerateState, Sample, post
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any

from transformers import AutoTokenizer  # here: inside an episode its seconds would count as a process that is blocked

from mugrpo_megatron.extras.episodes.turns import current


@dataclass
class Sample:
    """A sample, with the fields of slime's that have a meaning here."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    prompt: Any = ""
    """The prompt's text, as the recipe renders it."""
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    index: int | None = None
    tokens: list[int] = field(default_factory=list)
    """Prompt and response."""
    response: str = ""
    response_length: int = 0
    loss_mask: list[int] | None = None
    """Of the response; a token that the model did not sample is never trained on, whatever it says."""
    rollout_log_probs: list[float] | None = None
    """Ignored: those that the engine gave count."""
    reward: Any = None
    status: Status = Status.PENDING


class GenerateState:
    """The tokenizer, for functions that build their prompts of tokens."""

    def __init__(self, args: Any) -> None:
        self.args = args

    @property
    def tokenizer(self) -> Any:
        return _tokenizer(self.args.hf_checkpoint)


@lru_cache(maxsize=1)
def _tokenizer(path: str) -> Any:
    return AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)


async def post(url: str, payload: Mapping[str, Any], **_: Any) -> dict[str, Any]:
    """SGLang's answer on `/generate` to a payload with `text` or `input_ids`, from the episode's own engine."""
    if not url.endswith("/generate"):
        raise ValueError(f"{url}: only /generate is answered here")
    model = current.get()
    settings = payload.get("sampling_params") or {}
    for name in ("temperature", "top_p", "top_k", "min_p"):
        if name in settings and settings[name] != model.sampling[name]:
            raise ValueError(
                f"{name} = {settings[name]} in the payload, and the recipe samples with {model.sampling[name]}: ratios "
                "compare policies at one setting"
            )
    ids = payload.get("input_ids")
    answer = await model.ask(
        "generate",
        **({"text": payload["text"]} if ids is None else {"ids": list(map(int, ids))}),
        max_tokens=settings.get("max_new_tokens"),
        stop=[settings["stop"]] if isinstance(settings.get("stop"), str) else list(settings.get("stop") or ()),
    )
    pairs = [[logprob, token] for logprob, token in zip(answer["logprobs"], answer["ids"], strict=True)]
    meta = {
        "finish_reason": {"type": answer["finish_reason"]},
        "output_token_logprobs": pairs,
        "completion_tokens": len(pairs),
    }
    return {"text": answer["text"], "output_ids": answer["ids"], "meta_info": meta}
