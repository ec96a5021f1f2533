"""Turns files and data sets of the hub into prompts: problems, tokenizers, prompt styles, order.

Imports neither Megatron nor SGLang.
"""
