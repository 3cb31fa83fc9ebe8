r"""Activation offload: saved activations wait in host memory until the backward pass needs them.

Saves    activations on the card: with gradient checkpointing L x s -> 0, so only those of the open block (the one that
         is being recomputed) remain. overlapped: L x s -> 2 x s, the inputs of the open block and of the next one
Costs    PCIe traffic: the input of each block goes to the host and comes back. The copies run on the CUDA stream that
         computes, so the computation waits for them. overlapped: on a stream of their own, so it waits only where a
         copy takes longer than a block computes. The host needs as many bytes of pinned memory
Claim    exact: the same bits come back
Needs    CUDA; best with gradient checkpointing, because without it the saved inputs of every operation travel: a tensor
         that three products read travels three times. overlapped needs checkpointing, and sends only the inputs of
         checkpointed blocks; the inputs of a micro-batch so short that copies would cost time stay on the card
Breaks   jobs with more activations than host memory: Colab's free machine has 12.7 GB, less than its card, and each
         pinned tensor is rounded up to a power of two. The int8 products of bitsandbytes hide their inputs from
         autograd, so these stay on the card. overlapped: compile, and strategies other than ddp, are refused
Sources  Rhu et al. 2016, arXiv:1602.08124 (vDNN), sec. 3; torch.autograd.graph.save_on_cpu
Ours     hooks of our own, because torch's save_on_cpu also copies the frozen weights that products save (all 16-bit
         ones), although they are on the card anyway. transformers has save_on_cpu around each checkpointed block
         (activation_checkpointing_kwargs={"offload": True}), on the stream that computes. TRL
         (activation_offloading=True) has a stream of its own and holds up to five tensors on their way; overlapped
         (``load/overlapped_offload.py``) holds one, so that a bill can count it

Shapes: s = B T D elements, the input of one of L blocks.
"""

from collections.abc import Iterable
from typing import Any

import torch

REFERENCE = ("Offloaded._pack", "Offloaded._unpack", "_copy")
PLAIN = """
import functools
import torch
from transformers import AutoModelForCausalLM

# From transformers 5.17 on, Trainer does this for checkpointed blocks, without weights:
# gradient_checkpointing_kwargs={"use_reentrant": False, "offload": True}. Older ones
# ignore "offload" without a word, so there it takes these lines.
model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
plain = model.forward


@functools.wraps(plain)
def forward(*arguments, **named):
    with torch.autograd.graph.save_on_cpu(
        pin_memory=torch.cuda.is_available()
    ):  # it takes weights along
        return plain(*arguments, **named)


model.forward = forward
"""


class Offloaded(torch.autograd.graph.saved_tensors_hooks):
    """Move what autograd saves to the host, inside ``with``; the backward pass fetches each tensor when it needs it.

    No copy needs an explicit wait, because the CUDA stream that computes runs the copies too, in order. So the memory
    of a tensor is reused only after the copy has read it, and a fetched tensor is read only after it has arrived.

    Args:
        weights: tensors that live on the device anyway. They, and views of them, are not copied.

    Attributes:
        bytes_to_host: how much has been copied to the host so far [bytes].
        bytes_to_device: how much has been copied back so far [bytes].
    """

    HOST = "cpu"

    def __init__(self, weights: Iterable[torch.Tensor] = ()):
        super().__init__(self._pack, self._unpack)
        # The storages themselves are kept alive, and not only their addresses. bitsandbytes replaces a bias by a cast
        # copy in the forward pass. Without this, an activation could get the freed address, and would not be offloaded.
        self._stay = {}
        for weight in weights:
            storage = weight.untyped_storage()
            self._stay[storage._cdata] = storage
        self.bytes_to_host = self.bytes_to_device = 0

    def _pack(self, tensor: torch.Tensor) -> Any:
        if tensor.untyped_storage()._cdata in self._stay:
            return tensor, tensor.device
        host = _copy(tensor, self.HOST, pin_memory=tensor.is_cuda)
        self.bytes_to_host += host.untyped_storage().nbytes()
        return host, tensor.device

    def _unpack(self, packed: tuple[torch.Tensor, torch.device]) -> torch.Tensor:
        tensor, device = packed
        if tensor.untyped_storage()._cdata in self._stay:
            return tensor
        self.bytes_to_device += tensor.untyped_storage().nbytes()
        return _copy(tensor, device)


def _copy(tensor: torch.Tensor, device: torch.device | str, *, pin_memory: bool = False) -> torch.Tensor:
    return fill(room_for(tensor, device, pin_memory=pin_memory), tensor)


def room_for(tensor: torch.Tensor, device: torch.device | str, *, pin_memory: bool = False) -> torch.Tensor:
    """Allocate a tensor with the same strides: another layout could mean another kernel, and another rounding."""
    kind: dict[str, Any] = {"dtype": tensor.dtype, "device": device, "pin_memory": pin_memory}
    if 0 in tensor.stride():
        return torch.empty_strided(tensor.shape, tensor.stride(), **kind)
    return torch.empty_like(tensor, **kind)


def fill(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Start to copy the numbers of one tensor into another with the same strides, and return that."""
    # A stride of 0: the tensor is expanded, as attention's mask is for all heads. Its numbers are in memory only once,
    # so copy them only once.
    once = tuple(slice(None if stride else 1) for stride in source.stride())
    target[once].copy_(source[once], non_blocking=True)
    return target
