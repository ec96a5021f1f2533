"""mu-GRPO with Megatron-core learners and SGLang engines that share the same devices."""

__version__ = "0.1.0"
