"""Kernels of the layers, and of output layer and loss, where only one chunk of tokens has logits at a time.

fused_loss        fused_policy_loss: loss and gradients of an objective, in one pass if the objective allows it
gated_delta       the gated delta rule of linear attention, in PyTorch
head              the output layer of one rank, chunk by chunk, with the vocabulary sharded over ranks; token_logprobs:
                  log-probability and entropy of tokens, for any loss
torch_ops         row-wise operations on a chunk's logits, on any device (PyTorch)
triton_ops        the same operations on CUDA (Triton), and SwiGLU and the rotary embedding
"""
