"""The algorithm as pure functions on tensors: no module imports Megatron or SGLang, or uses a process group."""
