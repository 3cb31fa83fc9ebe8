"""The table of ``docs/map.md``: a cell's colour and number say what a switch saves, and its link tries it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tools import techniques

NAMES = {
    "peft": "LoRA",
    "attention": "fused attention",
    "expand_kv": "expanded K/V heads",
    "gradient_checkpointing": "gradient checkpointing",
    "chunked_loss": "chunked loss",
    "precision": "16-bit precision",
    "lean_preparation": "lean preparation",
    "quantization": "4-bit weights",
    "double_quantization": "double quantization",
    "optimizer": "8-bit AdamW",
    "paged_optimizer": "paged optimizer",
    "gradient_accumulation": "gradient accumulation",
}
"""What a row is called in plain words; the setting stands below in small."""
STEPS = (200, 1_000, 5_000)
"""MiB at which a cell gets the next stronger colour."""


class Row(NamedTuple):
    """A switch, on top of those above it.

    Attributes:
        switch: such as ``chunked_loss=true``.
        choice: all switches with their values, as "Will it fit?" opens them: this one and those above it are on.
        changes: what the switch adds to each column [MiB]; what it saves is negative.
    """

    switch: str
    choice: Mapping[str, str]
    changes: Mapping[str, float]


def matrix(base: Mapping[str, float], rows: Sequence[Row]) -> str:
    """Draw the table, as HTML because Markdown has no colours.

    Args:
        base: each column, and its value before the first switch [MiB].
        rows: the switches.
    """
    columns = [*base]
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    lines = "\n".join(
        f"<tr>{_label(row.switch)}{''.join(_cell(row, column) for column in columns)}</tr>" for row in rows
    )
    first = "".join(f"<td><b>{value:,.0f}</b></td>" for value in base.values())
    return (
        '<div class="scrolls" role="region" aria-label="What each switch saves" tabindex="0">\n<table class="map">\n'
        f'<thead><tr><th scope="col">switch</th>{head}</tr></thead>\n<tbody>\n'
        f'<tr><th scope="row">plain fp32</th>{first}</tr>\n{lines}\n</tbody>\n</table>\n</div>'
    )


def _label(switch: str) -> str:
    address = f"reference/techniques/{techniques.of_switch(switch)}.html"
    breakable = switch.replace("_", "_<wbr>").replace("=", "<wbr>=")  # on a phone
    return f'<th scope="row"><a href="{address}">{NAMES[switch.partition("=")[0]]} <code>{breakable}</code></a></th>'


def _cell(row: Row, column: str) -> str:
    change = row.changes[column]
    if not round(change):
        return "<td></td>"
    step = 1 + sum(abs(change) >= start for start in STEPS)
    kind = "saves" if change < 0 else "costs"
    number = f"{change:+,.0f}".replace("-", "−")
    label = f"{number} MiB of {column} with {row.switch}: try it"
    address = "fit.html#" + "&amp;".join(f"{name}={value}" for name, value in row.choice.items())
    return f'<td class="{kind}{step}"><a href="{address}" aria-label="{label}">{number}</a></td>'
