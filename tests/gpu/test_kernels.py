"""SGLang's compiled kernels, and the matrix products of the loss path, on the device that there is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mugrpo_megatron.kernels.head import HeadLayout, head_backward, make_head, scan
from tests.gpu.tiny import DEVICE
from tests.kernels.problems import distance

TOKENS, HIDDEN, VOCABULARY = 96, 128, 1000


@pytest.mark.gpu
def test_a_kernel_of_sglang_runs_on_this_device() -> None:
    from sgl_kernel import rmsnorm  # imports its whole package, and the library of this device

    x = torch.randn(33, 256, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.rand(256, device=DEVICE, dtype=torch.bfloat16)
    expected = F.rms_norm(x.double(), (256,), weight.double(), 1e-6)
    assert distance(rmsnorm(x, weight, 1e-6), expected) < 1e-2


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_products_of_narrow_inputs_are_wide_and_added_in_place(dtype: torch.dtype, tolerance: float) -> None:
    """`mm` into float32 logits, `addmm` onto a float32 gradient that is its result too."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, device=DEVICE).to(dtype)
    weight = (0.1 * torch.randn(VOCABULARY, HIDDEN, device=DEVICE)).to(dtype)
    targets = torch.randint(VOCABULARY, (TOKENS,), device=DEVICE)
    coefficient = torch.randn(TOKENS, device=DEVICE)
    main_grad = torch.randn(VOCABULARY, HIDDEN, device=DEVICE)
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    expected = (exact[0] @ exact[1].T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    gradients = torch.autograd.grad(expected, exact, coefficient.double())
    total = main_grad.double() + gradients[1]
    head = make_head(weight, HeadLayout(VOCABULARY), TOKENS)
    logprobs, _, lse = scan(head, hidden, targets)
    d_hidden = head_backward(head, hidden, targets, lse, coefficient, main_grad)
    assert distance(logprobs, expected.detach()) < 1e-5
    assert distance(d_hidden, gradients[0]) < tolerance
    assert distance(main_grad, total) < tolerance
