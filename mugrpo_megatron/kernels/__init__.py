"""Kernels of the output layer and the loss, which hold the logits of one chunk of tokens at a time, and of layers.

fused_loss        fused_policy_loss: loss and gradients of an objective, in one pass if the objective allows it
gated_delta       the gated delta rule of linear attention, in PyTorch
head              the output layer of one rank, chunk by chunk, with the vocabulary sharded over ranks; token_logprobs:
                  log-probability and entropy of tokens, for any loss
torch_ops         row-wise operations on a chunk's logits, on any device (PyTorch)
triton_ops        the same operations on CUDA (Triton), and SwiGLU and the rotary embedding
"""
