"""Constants that several parts of the memory bill share."""

FP32 = 4
"""Bytes of one fp32 number."""
BLOCK = 64
"""How many 4-bit weights share one scale (bitsandbytes' absmax)."""
TOKENS_PER_CHUNK = 256
"""How many trained tokens the chunked loss computes logits for at once."""
