"""Facts about GPUs, and what this machine really runs."""

from cria_tricks.hardware.device import T4, Device, this_device
from cria_tricks.hardware.pretend_t4 import profile

__all__ = ["T4", "Device", "profile", "this_device"]
