r"""Paged optimizer: states in pages that move to the host when the card is full.

Saves    optimizer states, at the moment when something else needs the room: 8 bytes a trained weight, 2 in 8 bits,
         down to two pages                                                              [bytes]
Costs    PCIe traffic to the host and back, only when that happens. A step reads all states in the same order, which is
         the worst case of an LRU cache: with one page too many, every page travels both ways in every step
Claim    exact: the same numbers in another place, bit for bit
Needs    CUDA; bitsandbytes pages only states of at least 100,000 elements. Of the 14 LoRA matrices in a block of
         Llama-3.2-1B at r = 16 these are 3, the larger ones of gate, up and down, but with 50,331,648 of 90,177,536
         state bytes
Breaks   nothing; while the card has room no page moves, and on a CPU the states are in host memory already
Sources  Dettmers et al. 2023, arXiv:2305.14314, sec. 3 (paged optimizers)
Ours     an LRU cache of fixed-size pages, and AdamW on top of it. A real run uses bitsandbytes instead, which lets
         CUDA's unified memory move the pages

Shapes: F frames on the device hold one page each, E elements long; a weight of N elements has ceil(N / E) pages for
each of its two moments.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable

import torch

REFERENCE = ("Pager.page", "PagedAdamW.step")
PLAIN = """
from transformers import TrainingArguments

arguments = TrainingArguments("plain", max_steps=1, optim="paged_adamw_32bit")
"""


class Pager:
    """Keep up to F pages on the device as an LRU cache: the least recently used page moves to the host to make room.

    Args:
        frames: F, how many pages the device holds at once; two or more, because the two moments of a weight are
            needed together.
        page_elements: E, how many fp32 numbers a page has.
        device: the device of the frames.

    Attributes:
        frames_FE: the frames, shape (F, E); all device memory that the pager uses.
        resident: the pages on the device, key -> index of its frame, the least recently used first.
        host: the pages on the host, key -> content.
        bytes_to_host: how much has moved to the host so far [bytes].
        bytes_to_device: how much has moved back to the device so far [bytes].
    """

    def __init__(self, frames: int, page_elements: int, device: str = "cpu"):
        if frames < 2:
            raise ValueError(f"frames = {frames}: AdamW updates two moments at once, so it needs two frames or more")
        self.frames_FE = torch.zeros(frames, page_elements, device=device)
        self.resident: OrderedDict[Hashable, int] = OrderedDict()
        self.host: dict[Hashable, torch.Tensor] = {}
        self.bytes_to_host = self.bytes_to_device = 0

    def page(self, key: Hashable) -> torch.Tensor:
        """Bring a page to the device, to read and to write there; a new page is all zeros.

        Args:
            key: any name for the page.

        Returns:
            A view of the page's frame, shape (E,). Requests for F other pages evict the page, and the view then shows
            another one.
        """
        if key not in self.resident:
            frame = len(self.resident) if len(self.resident) < len(self.frames_FE) else self._evict()
            if key in self.host:
                self.frames_FE[frame] = self.host.pop(key)
                self.bytes_to_device += self.frames_FE[frame].nbytes
            else:
                self.frames_FE[frame] = 0  # a new page: nothing has to be copied
            self.resident[key] = frame
        self.resident.move_to_end(key)  # the end is for the most recently used
        return self.frames_FE[self.resident[key]]

    def _evict(self) -> int:
        """Move the least recently used page to the host, and return the frame that becomes free."""
        oldest, frame = self.resident.popitem(last=False)
        self.host[oldest] = self.frames_FE[frame].to("cpu", copy=True)
        self.bytes_to_host += self.frames_FE[frame].nbytes
        return frame


class PagedAdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101, alg. 2) with both moments in a pager.

    AdamW works element by element, so a weight can be updated in pieces, one page after the other.

    Args:
        weights: the trained tensors, contiguous, fp32.
        pager: holds the moments.
        lr: learning rate.
        betas: decay rates of the first and the second moment.
        eps: added to the square root of the second moment.
        weight_decay: decoupled weight decay; multiplied by the learning rate.
    """

    def __init__(
        self,
        weights: Iterable[torch.Tensor],
        pager: Pager,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ):
        self.weights = list(weights)
        self.pager = pager
        self.steps = 0
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay

    @torch.no_grad()
    def step(self) -> None:
        """Update all weights, one page after the other; each must have a gradient."""
        self.steps += 1
        page_elements = self.pager.frames_FE.shape[1]
        for number, weight in enumerate(self.weights):
            assert weight.grad is not None, "a weight without a gradient"
            pieces = zip(weight.view(-1).split(page_elements), weight.grad.view(-1).split(page_elements), strict=True)
            for place, (weight_E, grad_E) in enumerate(pieces):
                # The last piece of a weight may be shorter than its page.
                first_E = self.pager.page((number, place, 1))[: len(grad_E)]
                second_E = self.pager.page((number, place, 2))[: len(grad_E)]
                self._update(weight_E, grad_E, first_E, second_E)

    def _update(self, weight: torch.Tensor, grad: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
        # The operations are in the order of torch.optim.AdamW with foreach=False, so that every rounding is the same.
        beta1, beta2 = self.betas
        weight.mul_(1 - self.lr * self.weight_decay)
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (second.sqrt() / (1 - beta2**self.steps) ** 0.5).add_(self.eps)
        weight.addcdiv_(first, root, value=-self.lr / (1 - beta1**self.steps))
