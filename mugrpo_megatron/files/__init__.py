"""Files that several rooms read or write. Only `tensors` and `torch_dist` import torch; the other modules import
nothing slow."""
