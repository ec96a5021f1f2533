"""The SGLang engine's life and what is sampled; never imports Megatron."""
