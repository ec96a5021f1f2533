"""From files and hub names to prompts: problems, tokenizers, prompt styles, order. Imports no Megatron, no SGLang."""
