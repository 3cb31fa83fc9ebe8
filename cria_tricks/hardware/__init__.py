"""Facts about GPUs, and what this machine really runs."""

from cria_tricks.hardware.device import T4, Device, profile, this_device

__all__ = ["T4", "Device", "profile", "this_device"]
