"""The SGLang engine: its process, its settings, its queue of prompts. No module here imports Megatron."""
