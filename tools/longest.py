"""The table of the longest rows on each card, by the estimate: ``python -m tools.longest`` writes it into its page.

To add a column, add a line to :data:`WAYS`; to add a model or a card, add its name below.
"""

from collections.abc import Iterable
from pathlib import Path

from cria_tricks.common.markdown_table import markdown_table
from cria_tricks.common.units import human
from cria_tricks.hardware.device import Device
from cria_tricks.hardware.gpus import find_gpu
from cria_tricks.models.shape import find_shape
from cria_tricks.predict.host import host_bill
from cria_tricks.predict.toggles import Target, longest
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.settings import Data, Tricks

PAGE = Path(__file__).resolve().parents[1] / "docs" / "longest_rows.md"
BEGIN, END = "<!-- the longest rows: python -m tools.longest -->", "<!-- end of the longest rows -->"
MODELS = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "qwen3-14b")
GPUS = ("t4", "p100", "l4", "rtx3060", "rtx4090")
FUSED = ("tricks.fused_lora=true", "tricks.fused_blocks=true")
WAYS: dict[str, tuple[str, ...]] = {
    "QLoRA": (),
    "`tiled_mlp`": ("tricks.tiled_mlp=true",),
    "`activation_offload`": ("tricks.activation_offload=true",),
    "both": ("tricks.tiled_mlp=true", "tricks.activation_offload=true"),
    "both, fused": ("tricks.tiled_mlp=true", "tricks.activation_offload=true", *FUSED),
    "`stream_layers`": ("tricks.stream_layers=true",),
    "all": ("tricks.tiled_mlp=true", "tricks.activation_offload=true", *FUSED, "tricks.stream_layers=true"),
}
"""Column -> what it sets over :func:`qlora`."""


def qlora(model: str, device: Device) -> Recipe:
    """Return what all columns have in common: one row in a micro-batch, and what the course teaches for memory."""
    tricks = Tricks(
        gradient_checkpointing=True,
        precision=device.best_precision,
        quantization="nf4",
        double_quantization=True,
        peft="lora",
        optimizer="adamw_8bit",
        attention="sdpa",
        expand_kv=device.needs_expand_kv,
        chunked_loss=True,
        lean_preparation=True,
    )
    return Recipe(model=model, data=Data(), tricks=tricks)


def cell(model: str, gpu: str, settings: Iterable[str]) -> str:
    """Return the longest row, a + if the model's context ends there, and what the host needs if it is used."""
    shape, device = find_shape(model), find_gpu(gpu).device
    target, recipe = Target(shape, device), with_settings(qlora(model, device), settings)
    most = longest(target, recipe)
    if not most:
        return "does not fit"
    tokens = min(most, shape.context)
    ends = "+" if most > tokens else ""
    found = f"{tokens:,}{ends}"
    if not (recipe.tricks.activation_offload or recipe.tricks.stream_layers):
        return found
    host = host_bill(target, with_settings(recipe, [f"data.max_length={tokens}"]))
    assert host is not None, "these are cards"
    return f"{found}, host {human(host.peak.bytes)}"


def table() -> str:
    """The whole table."""
    rows = []
    for model in MODELS:
        for gpu in GPUS:
            rows.append((model, gpu, *(cell(model, gpu, settings) for settings in WAYS.values())))
    return "\n".join(markdown_table(("model", "card", *WAYS), rows))


def written(page: str) -> str:
    """A page with the table of today between the two comments."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
