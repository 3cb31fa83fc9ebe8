"""Arithmetic only: bytes and seconds of a training step, from the widths of a model. It loads nothing."""
