"""The page of models and cards: what is planned, trained and measured, generated from the code.

python -m tools.support          # write it
"""

import json
from pathlib import Path

from cria_tricks.common.markdown_table import markdown_table
from cria_tricks.hardware.cards import PRICES_SOURCE, Gpu
from cria_tricks.hardware.gpus import ASSUMED_CAPABILITY, GPUS, SOURCES_READ
from cria_tricks.models.catalogue import CATALOGUE
from cria_tricks.models.configs import KINDS
from cria_tricks.models.shape import find_shape
from cria_tricks.predict.model_settings import lora_targets

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "models.md"
ERRORS = ROOT / "benchmarks" / "results" / "dry-run"
MEASURED: tuple[str, ...] = ()
"""The models of which a run on a GPU was measured by this project: none so far."""

HEAD = """# Models and cards

`cria plan --model NAME --gpu CARD` plans any model of the first table on any card of the second. This page is
generated from the code (`python -m tools.support`), so it lists what the commands know.

## Models

- **Planned**: `cria plan` and the page [Will it fit?](../fit.md) bill it.
- **Trained**: a tiny twin of its family (two blocks, random weights) trains on a CPU in our tests, with every technique
  that applies. The published weights themselves were not trained in these tests.
- **Measured**: we measured a run of it on a GPU.
"""
OTHERS = """
Any other model is planned from its `config.json` if its `model_type` is one of {kinds}:
`cria plan --model path/to/config.json`. All others are refused by name.

A model may need other settings than a recipe has: {needs}. `cria plan --model` adds them and says so; `cria train`
needs them, too.

The shape of each model was read from the source in the last column; of those without one, from the `config.json` on the
Hugging Face hub. A config is named by its place on the hub.

## How close the bill is

The closed form against a dry run of the real modules, at random settings of the models above, cut to 2 to 4 blocks
(`benchmarks/estimate_error.py`):

"""
CARDS = """
## Cards

`--gpu` also takes `t4x2` (two T4s, so two processes; any card with `x2` to `x9`), and an amount of memory: `8GiB`, or
`8GiB:7.5` with the compute capability. Without one {assumed} is assumed. Without `--gpu` this machine's own card is
taken.

Any spelling is understood: `RTX 3060`, `3060`, `NVIDIA GeForce RTX 3060 Laptop GPU`, `rtx3060 8GB`. Where a card is
sold with several sizes of memory, the plan says which one was taken. Another card is never taken for the one that was
named.

Rates are peak rates of dense products, with sums in fp32. For an amount of memory there are none, so no time is
predicted: the bytes are. The memory is what the driver reports to programs; most of these lines of `deviceQuery`, a
sample program of CUDA, and logs of torch were found in public repositories by the card's name, and drivers differ by
some MiB. The sources were read on {read}; the prices are from {prices}.

"""


def model_rows() -> list[tuple[str, ...]]:
    """One row for each model of the catalogue."""
    found: list[tuple[str, ...]] = []
    for name, entry in CATALOGUE.items():
        shape = find_shape(name)
        trained = "yes" if shape.kind in KINDS else "no"
        measured = "yes" if name in MEASURED else "not yet"
        billions = f"{shape.weights / 1e9:.2f}"
        place = f"[{entry.hub}](https://huggingface.co/{entry.hub})" if entry.hub else "its text part, for bills only"
        found.append((f"`{name}`", place, billions, f"`{shape.kind}`", "yes", trained, measured, entry.source or "-"))
    return found


def card_row(name: str, gpu: Gpu) -> tuple[str, ...]:
    """One row for a card."""
    capability = ".".join(map(str, gpu.device.capability))
    rates = ("-", "-", "-", "-")
    source = "no rates known"
    if gpu.card:
        card = gpu.card
        rates = (
            f"{card.half_flops / 1e12:g}",
            f"{card.full_flops / 1e12:g}",
            f"{card.memory_rate / 1e9:g}",
            f"{card.link_rate / 1e9:g}",
        )
        source = card.source
    bf16 = "yes" if gpu.device.real_bf16 else "no"
    several = f"{gpu.count} x " if gpu.count > 1 else ""
    memory = f"{several}{gpu.device.memory_bytes / 2**30:.2f}"
    return (f"`{name}`", gpu.device.name, memory, capability, bf16, *rates, source, gpu.memory_source)


def errors() -> list[tuple[str, ...]]:
    """The largest errors of the closed form, of the first models and of those that came later."""
    found: list[tuple[str, ...]] = []
    for name, said in (("estimate_error", "Llama, Mistral, Mixtral, Qwen 2.5"), ("estimate_error_later", "all others")):
        result = json.loads((ERRORS / f"{name}.json").read_text())
        under, over = f"{-100 * result['worst_under']:.2f} %", f"{100 * result['worst_over']:.2f} %"
        found.append((said, f"{result['settings']:,}", under, over, str(result["outside"])))
    return found


def page() -> str:
    """The whole page."""
    needs = {kind: settings for kind in KINDS for settings in [_needs(kind)] if settings}
    words = "; ".join(f"{kind} needs {settings}" for kind, settings in needs.items())
    kinds = ", ".join(f"`{kind}`" for kind in KINDS)
    models = ("name", "on the hub", "billions", "family", "planned", "trained", "measured", "source of the shape")
    cards = ("name", "card", "GiB", "capability", "bf16", "16-bit TFLOP/s", "fp32 TFLOP/s", "memory GB/s", "link GB/s",
             "source of the rates", "source of the memory")  # fmt: skip
    error = ("models", "settings", "most too low", "most too high", "outside -0.5 % to +2 %")
    assumed = ".".join(map(str, ASSUMED_CAPABILITY))
    lines = [HEAD]
    lines += markdown_table(models, model_rows())
    lines += [OTHERS.format(kinds=kinds, needs=words)]
    lines += markdown_table(error, errors())
    lines += [CARDS.format(assumed=assumed, read=SOURCES_READ, prices=PRICES_SOURCE)]
    lines += markdown_table(cards, (card_row(name, gpu) for name, gpu in GPUS.items()))
    return "\n".join(lines) + "\n"


def _needs(kind: str) -> str:
    """Name the settings that a family of the catalogue needs."""
    for name in CATALOGUE:
        shape = find_shape(name)
        if shape.kind == kind:
            settings = [*lora_targets(shape), *(["tricks.chunked_loss=false"] if shape.beside_head else [])]
            return " and ".join(f"`--set {setting}`" for setting in settings)
    return ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
