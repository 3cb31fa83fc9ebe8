"""Numbers of the libraries that several bills count with."""

FP32 = 4
"""Bytes of a number."""
BLOCK = 64
"""4-bit weights that share one absmax."""
TOKENS_PER_CHUNK = 256
"""Trained tokens whose logits the chunked loss makes at once."""
