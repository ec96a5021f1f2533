"""Generates with servers outside of the run: vLLM, SGLang, or another that returns token ids and log-probabilities."""
