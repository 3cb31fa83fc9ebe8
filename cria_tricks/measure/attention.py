"""Find out which attention kernel really runs, as opposed to what a flag asked for."""

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from cria_tricks.hardware.attention_kernels import KERNELS

_COMPOSITE = ("scaled_dot_product_attention", "_scaled_dot_product_attention_math")
"""Operations that consist of others; which kernel runs is visible only inside them."""


class WatchAttention(TorchDispatchMode):
    """Record which attention kernel runs inside this context, in a single operation or in a whole model."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    @property
    def kernel(self) -> str:
        """The kernel that ran: ``"flash"``, ``"memory-efficient"``, ``"cudnn"``, ``"vendor"`` or ``"math"``.

        If several kernels ran, their names are joined by ``+``. It is ``"none"`` if no such kernel ran, as in the
        attention that transformers calls eager.
        """
        return "+".join(sorted(self._seen)) or "none"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch calls this for every operation inside the context.
        name = func.overloadpacket.__name__
        if name in _COMPOSITE:  # in inference mode these arrive in one piece, and the kernel is inside
            with self:  # torch switches the mode off while this method runs, so switch it on for the pieces
                return func.decompose(*args, **(kwargs or {}))
        if name in KERNELS:
            self._seen.add(KERNELS[name])
        elif func.namespace.startswith("flash_attn"):  # the package's own operations
            self._seen.add("flash")
        return func(*args, **(kwargs or {}))


def attention_kernel(call: Callable[[], Any]) -> str:
    """Run a call, and return the name of its attention kernel; see :attr:`WatchAttention.kernel`."""
    with WatchAttention() as watch:
        call()
    return watch.kernel
