"""Output layer, log-probabilities and loss, with the logits of one chunk of tokens at a time; SwiGLU and rope on CUDA.

fused_loss        fused_policy_loss: loss and gradients of an objective, in one pass if the objective allows it
head              the output layer of one rank: chunked scan and gradient, vocab-parallel merge, GEMMs; token_logprobs:
                  log-probability and entropy of tokens, 1 GEMM without gradients
torch_ops         row-wise operations on a chunk's logits, on any device (PyTorch)
triton_ops        the same on CUDA (Triton): reads each logit's 4 bytes twice, writes 2; SwiGLU and the rotary embedding
"""
