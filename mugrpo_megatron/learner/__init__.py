"""The Megatron learner, on CUDA and on CPU.

learner     recipe -> a learner ready for updates          update            one optimizer update
groups      process groups, timeouts that name a cause     packing           sequences -> balanced micro-batches
heartbeat   which ranks are alive, and doing what          passes            forward and backward over the pipeline
model       the policy as GPT chunks                       loss              hidden states -> the update's loss
layers      layer specs: local or Transformer Engine       optimizer         AdamW and its learning rate
attention   causal attention over packed sequences         optimizer_states  master weights and moments, by parameter
context     packed rows split over ranks                   checkpoint        save and load in any layout
flash       variable-length flash attention of torch       linear            linear layers that add to main_grad
operators   RMSNorm, SwiGLU, rotary embedding              offload           learner state to host memory and back
cpu         stand-ins for torch.cuda                       pinned            tensors whose bytes are in host memory
"""

from mugrpo_megatron.cpu import megatron as cpu

cpu.install()
cpu.complete_router()
