"""Generation by inference servers of anybody: vLLM, SGLang, or another that returns token ids and log-probabilities."""
