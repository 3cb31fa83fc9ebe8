"""Make any CUDA GPU behave like a T4, to see what happens on a T4 without having one."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from cria_tricks.common.errors import BadInput
from cria_tricks.hardware.device import T4, Device, pretend


@contextlib.contextmanager
def profile(name: str) -> Iterator[Device]:
    """Make the first CUDA GPU of this machine behave like a T4 inside the context::

        with hardware.profile("t4"):
            cria_tricks.train(recipe)

    - attention: torch uses neither its flash kernel nor cuDNN's, so grouped heads without a mask run in the math
      kernel;
    - bf16: switches refuse it, and recipes that choose the precision for the machine choose fp16, because
      :func:`this_device` describes a T4;
    - memory: torch's allocator gets 14.74 GiB and not a byte more. (On a real T4 it gets less, because the CUDA context
      takes its share of them.)

    It does not make the GPU as slow as a T4, and does not make it round as the tensor cores of a T4 do. torch's own
    functions, such as ``torch.cuda.get_device_capability``, still describe the real GPU, because otherwise kernels
    would be compiled for the wrong one. The rules hold for the whole process, because torch's switches do. After the
    context all switches are as they were before.

    Args:
        name: ``"t4"``.

    Yields:
        The device that :func:`this_device` returns inside the context.

    Raises:
        BadInput: for another name, or without a CUDA GPU.
    """
    if name.strip().lower() != "t4":
        raise BadInput(f"hardware profile {name}: there is t4, and no other")
    import torch  # not at the top: recipes import this package, and a wrong recipe is refused without waiting for torch

    if not torch.cuda.is_available():
        raise BadInput(
            "hardware profile t4: there is no CUDA card here that could act like one; to reckon with a T4 without a "
            "card, hand hardware.T4 to whatever takes a device"
        )
    card = torch.cuda.get_device_properties(0)
    # A GPU that is older than a T4, or has less memory, keeps its own values.
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
