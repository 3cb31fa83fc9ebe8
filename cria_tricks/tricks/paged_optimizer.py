r"""Paged optimizer: states in pages that move to the host when the card is full.

Saves    optimizer states, at the moment when something else needs the room: 8 bytes a trained weight, 2 in 8 bits,
         down to two pages                                                              [bytes]
Costs    their way over PCIe and back, only when that happens. A step reads all states in one order, which is the worst
         for least recently used: with one page too many, every page travels both ways in every step
Claim    exact: the same numbers in another place, bit for bit
Needs    CUDA; bitsandbytes pages only states of at least 100,000 elements: of Llama-3.2-1B's r = 16 matrices the wide
         halves of gate, up and down, 3 of 14 in a block, but 50,331,648 of 90,177,536 state bytes
Breaks   nothing; without pressure nothing moves, and on a CPU there is nowhere to move to
Sources  Dettmers et al. 2023, arXiv:2305.14314, sec. 3 (paged optimizers)
Ours     a pager of fixed-size pages and AdamW over it; in production bitsandbytes, and CUDA's unified memory pages

Shapes: F frames of E elements on the device; a weight of N elements has 2 ceil(N / E) pages, one for each moment.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace

import torch

from cria_tricks.bill.facts import StepFacts
from cria_tricks.bill.work import Work
from cria_tricks.models.shape import Shape
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan

SWITCHES = ("paged_optimizer=true",)
CLAIM = "exact"
LESSON = "08_paged_optimizer"
REFERENCE = ("Pager.page", "PagedAdamW.step")
PLAIN = """
from transformers import TrainingArguments

arguments = TrainingArguments("plain", max_steps=1, optim="paged_adamw_32bit")
"""
PAGED_FROM = 100_000
"""Elements from which bitsandbytes pages a state (``bitsandbytes/optim/optimizer.py``, ``get_state_buffer``)."""


class Pager:
    """More pages than the device holds: whichever was not used for longest makes room.

    Args:
        frames: F, pages that the device holds at once; two or more, for the two moments of a weight.
        page_elements: E, fp32 numbers of a page.
        device: where the frames are.

    Attributes:
        frames_FE: all that the device ever holds, shape (F, E).
        resident: the frame of each page on the device, the least recently used first.
        host: the pages that are not.
        bytes_to_host: traffic out, so far.
        bytes_to_device: traffic in.
    """

    def __init__(self, frames: int, page_elements: int, device: str = "cpu"):
        if frames < 2:
            raise ValueError(f"frames = {frames}: AdamW updates two moments at once, so it needs two frames or more")
        self.frames_FE = torch.zeros(frames, page_elements, device=device)
        self.resident: OrderedDict[Hashable, int] = OrderedDict()
        self.host: dict[Hashable, torch.Tensor] = {}
        self.bytes_to_host = self.bytes_to_device = 0

    def page(self, key: Hashable) -> torch.Tensor:
        """Get a page to read and write, zeros when it is new.

        Returns:
            Shape (E,), valid until F - 1 other pages were asked for.
        """
        if key not in self.resident:
            frame = len(self.resident) if len(self.resident) < len(self.frames_FE) else self._evict()
            if key in self.host:
                self.frames_FE[frame] = self.host.pop(key)
                self.bytes_to_device += self.frames_FE[frame].nbytes
            else:
                self.frames_FE[frame] = 0  # a first touch: nothing travels
            self.resident[key] = frame
        self.resident.move_to_end(key)
        return self.frames_FE[self.resident[key]]

    def _evict(self) -> int:
        oldest, frame = self.resident.popitem(last=False)
        self.host[oldest] = self.frames_FE[frame].to("cpu", copy=True)
        self.bytes_to_host += self.frames_FE[frame].nbytes
        return frame


class PagedAdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101, alg. 2) with both moments in a pager.

    Every number of the update depends on its own weight alone, so a weight may be updated page by page.

    Args:
        weights: what trains, contiguous fp32.
        pager: where the moments are.
        lr: learning rate.
        betas: decay of the two moments.
        eps: added to the root of the second.
        weight_decay: decoupled.
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
        """Update all weights, which must all have a gradient, one page after the other."""
        self.steps += 1
        page_elements = self.pager.frames_FE.shape[1]
        for number, weight in enumerate(self.weights):
            assert weight.grad is not None, "a weight without a gradient"
            pieces = zip(weight.view(-1).split(page_elements), weight.grad.view(-1).split(page_elements), strict=True)
            for place, (weight_E, grad_E) in enumerate(pieces):
                first_E, second_E = (self.pager.page((number, place, moment))[: len(grad_E)] for moment in (1, 2))
                self._update(weight_E, grad_E, first_E, second_E)

    def _update(self, weight: torch.Tensor, grad: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
        # In the order of torch's own loop over single tensors, so that every rounding is the same.
        beta1, beta2 = self.betas
        weight.mul_(1 - self.lr * self.weight_decay)
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (second.sqrt() / (1 - beta2**self.steps) ** 0.5).add_(self.eps)
        weight.addcdiv_(first, root, value=-self.lr / (1 - beta1**self.steps))


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Ask for paged states where there is a card to page from."""
    if not recipe.tricks.paged_optimizer:
        return plan
    if plan.device.kind != "cuda":
        return plan.warn("paged_optimizer has no effect without CUDA: the states are in host memory already")
    return plan.with_("optimizer", paged=True)


def estimate(memory: StepFacts, shape: Shape, recipe: Recipe) -> StepFacts:
    """Large states live in managed memory: on the card while in use, unseen by its allocator."""
    if not recipe.tricks.paged_optimizer or memory.device.kind != "cuda":
        return memory
    return replace(
        memory,
        state_bytes=functools.partial(on_the_card, memory.state_bytes),
        embedding_state_bytes=functools.partial(on_the_card, memory.embedding_state_bytes),
    )


def on_the_card(state_bytes: Callable[[int], int], elements: int) -> int:
    """Bytes of the two states of a tensor that the card's allocator sees: those of a large one it does not."""
    return 0 if elements >= PAGED_FROM else state_bytes(elements)


def seconds(work: Work, shape: Shape, recipe: Recipe) -> Work:
    """Unchanged: while the card has room no page moves, and an estimate of time is for what fits."""
    return work
