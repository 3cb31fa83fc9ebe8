"""Numbers of the libraries that several bills count with."""

FP32 = 4


BLOCK = 64
"""4-bit weights that share a scale."""
