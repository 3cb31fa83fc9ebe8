"""What the machine is and what it really runs."""

from cria_tricks.hardware.device import T4, Device, this_device

__all__ = ["T4", "Device", "this_device"]
