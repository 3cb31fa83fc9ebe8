"""How much of its datasheet's rates each card reaches in training, taken from public runs, with their spread.

No training step reaches the peak rates of a datasheet. A T4, for example, is held to 70 watts. So an estimate of time
divides by the share that public runs on the same card reached. Where a measured card was accepted (``cria bench``), its
own share stands instead: ``measured_cards.json`` has them, and ``python -m tools.measured_cards`` makes it.

The runs are in ``benchmarks/published_runs.toml``, and ``python -m benchmarks.published_runs`` fits the shares again,
also with each run left out. There are few runs, so there are few constants:

- One share stands for 16-bit products (``half``) and for memory traffic (``memory``) on each card, because the runs do
  not separate the two. Where products take most of the time (TinyLlama with Unsloth), a T4 reached 0.29, and where
  memory does (TinyLlama with TRL), 0.29, too. Both shares stand here all the same: a calibrated machine has two.
- ``launch`` is bound by one run: Qwen-7B on an A100 with rows of 256 tokens, which takes longer than its products and
  its memory traffic. Every public run on a T4 has longer batches, which wait for the card and not for launches. So the
  A100's value stands there, too; Colab's processors may be slower.
- ``full``, the share of fp32 products, is bound by no run at all. It is that of the other products, and estimates in
  fp32 have the wide range on every card.

Cards without a run are known by their datasheets alone, and get :data:`WIDE`: from 0.23 to 0.64 of the datasheet. One
public run on such a card is inside: Qwen2.5-1.5B on an RTX 4060 (628 tokens a second, arXiv 2509.12229) reached 0.27 if
it kept all activations, and 0.40 if it recomputed them; the paper does not say which. Kernels that we do not have can
be faster: the best run on an A100 reached 0.78.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

SPREAD = 1.5
"""The high end of a range divided by its low end, where public runs of the card back it [ratio]."""
WIDE = 2.8
"""The same where none does: from the low end of a T4's range to the high end of an A100's [ratio]."""
LAPTOP = WIDE * 2175 / 1230
"""The same for a laptop's GPU: its clocks differ by this ratio with the laptop (RTX 4070, 35 to 115 W) [ratio]."""
LINK = 12 / 15.75
"""The share of PCIe's rate that copies of large tensors reach: NCCL 2.30 counts 12.0 of 15.75 GB/s for PCIe 3.0 x16."""


@dataclass(frozen=True)
class Reached:
    """The shares of its peak rates that a card reaches, and the time that it takes to start a kernel.

    Attributes:
        half: share of the rate of 16-bit products.
        full: share of the rate of fp32 products.
        memory: share of the memory's bandwidth.
        launch: time between the starts of two kernels [s]. The host starts them one after the other. Where the card is
            faster than that, it waits.
        spread: high over low of the range around an estimate, for steps with 16-bit products [ratio].
        source: the runs that these are taken from.
        link: share of the rate of the link between card and host.
        measurements: how many accepted measurements of this card these are taken from; 0 for public runs.
    """

    half: float
    full: float
    memory: float
    launch: float
    spread: float
    source: str
    link: float = LINK
    measurements: int = 0


LAUNCH = 17e-6
"""Time between the starts of two kernels, by eager PyTorch with transformers and peft [s]."""

DEFAULT = Reached(0.385, 0.385, 0.385, LAUNCH, WIDE, "no public run on this card: between a T4 and an A100")
"""For cards without a public run: the geometric middle of the two below."""
ON_A_LAPTOP = Reached(0.385, 0.385, 0.385, LAUNCH, LAPTOP, "no public run on this card, and clocks set by the laptop")
ON_A_T4 = Reached(0.283, 0.283, 0.283, LAUNCH, SPREAD, "six public runs: Llama-3.2-1B, TinyLlama (3), Llama-2-7B (2)")
ON_AN_A100 = Reached(0.525, 0.525, 0.525, LAUNCH, SPREAD, "six public runs: Llama-2-7B (5), Qwen-7B")

MEASURED = Path(__file__).with_name("measured_cards.json")
"""What accepted measurements give: the product name of a card -> the fields of its :class:`Reached`."""


@functools.cache
def measured() -> dict[str, Reached]:
    """Read what cards reached in accepted measurements, by product name."""
    return {name: Reached(**fields) for name, fields in json.loads(MEASURED.read_text(encoding="utf-8")).items()}
