"""The algorithm as pure functions on tensors: no module imports Megatron, SGLang or a process group."""
