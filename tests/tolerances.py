"""Every tolerance of the technique tests, with the measured noise it was sized to.

Noise is the largest absolute difference seen over the cases of the test that uses the constant, with torch 2.13 on
one thread of a Xeon at 2.5 GHz. A tolerance is 2 to 250 times the noise: other processors sum in another order.
"""

import torch

# expand_kv
EXPAND_KV = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 0.125,
}
"""Repeated against shared heads, output and gradients of order 4."""

# flash_attention
FLASH_ATTENTION = {
    torch.float64: 1e-12,  # noise 4.9e-15; the bound is the issue's
    torch.float32: 1e-5,  # noise 2.2e-6
    torch.float16: 2**-7,  # noise 2**-8: one rounding step of a number between 4 and 8
    torch.bfloat16: 2**-4,  # noise 2**-5: one rounding step of a number between 4 and 8
}
"""The reference against plain attention and SDPA, output and gradients of order 4."""

# flash_decoding
FLASH_DECODING = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2**-10,
    torch.bfloat16: 2**-7,
}
"""Split against whole, outputs of order 1."""
