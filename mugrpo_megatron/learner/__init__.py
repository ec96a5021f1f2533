"""The Megatron learner, on CUDA and on CPU.

learner     builds a learner; moves its state to the host  update            one optimizer update
groups      process groups, timeouts that name a cause     packing           sequences -> balanced micro-batches
heartbeat   which ranks are alive, and doing what          passes            forward and backward over the pipeline
model       the policy as GPT chunks, and layer specs      loss              hidden states -> the update's loss
linear      linear layers that add to main_grad            optimizer         AdamW, its learning rate and states
attention   causal attention over packed sequences         checkpoint        save and load in any layout
context     flash attention; rows split over ranks         routing           experts that tokens went to before
operators   RMSNorm, SwiGLU, rotary embedding              latent            multi-head latent attention
delta       gated delta networks
"""

# Imported first: without CUDA it replaces what Megatron calls in `torch.cuda`, before this package's modules import
# Megatron.
import mugrpo_megatron.megatron_compat  # noqa: F401
