"""The SGLang engine: its process, its settings, its queue of prompts. Never imports Megatron."""
