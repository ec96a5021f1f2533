"""A search over several turns in slime's convention, after the shape of its documented examples."""

from __future__ import annotations

import re
from typing import Any

from mugrpo_megatron.extras.episodes.conventions import GenerateState, SlimeSample, post

FACTS = {"capital of France": "Paris"}


async def generate(args: Any, sample: SlimeSample, sampling_params: dict[str, Any]) -> SlimeSample:
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response, response_ids, loss_mask, logprobs = "", [], [], []
    for _ in range(3):
        payload = {"text": sample.prompt + response, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, payload)
        ids = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
        response += state.tokenizer.decode(ids)
        response_ids += ids
        logprobs += [item[0] for item in output["meta_info"]["output_token_logprobs"]]
        loss_mask += [1] * len(ids)
        if output["meta_info"]["finish_reason"]["type"] == "length":
            sample.status = SlimeSample.Status.TRUNCATED
            break
        query = re.search(r"<search>(.*?)</search>", output["text"])
        if not query:
            break
        found = f"<information>{FACTS.get(query[1], 'nothing')}</information>"
        found_ids = state.tokenizer(found, add_special_tokens=False)["input_ids"]
        response += found
        response_ids += found_ids
        logprobs += [0.0] * len(found_ids)
        loss_mask += [0] * len(found_ids)
    sample.tokens, sample.response, sample.loss_mask = prompt_ids + response_ids, response, loss_mask
    sample.response_length, sample.rollout_log_probs = len(response_ids), logprobs
    if sample.status is SlimeSample.Status.PENDING:
        sample.status = SlimeSample.Status.COMPLETED
    sample.reward = float(sample.label in response)
    return sample


async def loses_a_token(args: Any, sample: SlimeSample, sampling_params: dict[str, Any]) -> SlimeSample:
    sample = await generate(args, sample, sampling_params)
    sample.tokens = sample.tokens[:-2] + sample.tokens[-1:]
    return sample
