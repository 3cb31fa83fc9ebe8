"""Make a CUDA card behave like a T4, so that what happens on one can be seen on any other."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from cria_tricks.common.errors import BadInput
from cria_tricks.hardware.device import T4, Device, pretend


@contextlib.contextmanager
def profile(name: str) -> Iterator[Device]:
    """Inside, the first CUDA card of this machine keeps to a T4's rules::

        with hardware.profile("t4"):
            cria_tricks.train(recipe)

    - attention: no flash kernel and no cuDNN's, so grouped-query heads without a mask end in the math kernel;
    - bf16: toggles refuse it, and recipes that choose by the machine choose fp16, as :func:`this_device` answers
      like a T4;
    - memory: torch's allocator gets 14.74 GiB and not a byte more. On a T4 the CUDA context takes its share of those.

    What it cannot do is compute as slowly, or round as Turing's tensor cores do. torch's own questions
    (``torch.cuda.get_device_capability``) still get the real answer, or kernels would be compiled for the wrong card.
    The switches are the process's, so are these rules; afterwards all are as they were.

    Args:
        name: ``"t4"``.

    Yields:
        The device as it is now.

    Raises:
        BadInput: for another name, or without a CUDA card.
    """
    if name.strip().lower() != "t4":
        raise BadInput(f"hardware profile {name}: there is t4, and no other")
    import torch  # not above: recipes look at this package, and a wrong one should not wait for torch

    if not torch.cuda.is_available():
        raise BadInput(
            "hardware profile t4: there is no CUDA card here that could act like one; to reckon with a T4 without a "
            "card, hand hardware.T4 to whatever takes a device"
        )
    card = torch.cuda.get_device_properties(0)
    memory = min(T4.memory_bytes, card.total_memory)
    capability = min(T4.capability, (card.major, card.minor))
    before = torch.cuda.get_per_process_memory_fraction(0)
    with contextlib.ExitStack() as undo:
        for enabled, enable in (
            (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.enable_flash_sdp),
            (torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.enable_cudnn_sdp),
        ):
            undo.callback(enable, enabled)
            enable(False)
        undo.callback(torch.cuda.set_per_process_memory_fraction, before, 0)
        torch.cuda.set_per_process_memory_fraction(memory / card.total_memory, 0)
        like_t4 = replace(T4, name=f"{card.name} as T4", capability=capability, memory_bytes=memory)
        undo.enter_context(pretend(like_t4))
        yield like_t4
