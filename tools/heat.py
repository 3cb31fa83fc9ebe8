"""The table of ``docs/map.md``: a cell's colour and number say what a switch saves, and its link tries it."""

from collections.abc import Iterable, Mapping, Sequence

from tools import techniques

STEPS = (200, 1_000, 5_000)
"""MiB at which a cell gets the next stronger colour."""


def matrix(columns: Sequence[str], changes: Iterable[tuple[str, Mapping[str, float]]]) -> str:
    """Draw the table, as HTML because Markdown has no colours.

    Args:
        columns: the names of the columns.
        changes: each switch with what it adds to each column [MiB]; what it saves is negative.
    """
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    rows = "\n".join(
        f"<tr>{_label(switch)}{''.join(_cell(switch, column, found[column]) for column in columns)}</tr>"
        for switch, found in changes
    )
    return (
        '<div class="scrolls" role="region" aria-label="What each switch saves" tabindex="0">\n<table class="map">\n'
        f'<thead><tr><th scope="col">switch</th>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>\n</div>'
    )


def _label(switch: str) -> str:
    address = f"reference/techniques/{techniques.of_switch(switch)}.html"
    breakable = switch.replace("_", "_<wbr>").replace("=", "<wbr>=")  # on a phone
    return f'<th scope="row"><a href="{address}"><code>{breakable}</code></a></th>'


def _cell(switch: str, column: str, change: float) -> str:
    if not round(change):
        return "<td></td>"
    step = 1 + sum(abs(change) >= start for start in STEPS)
    kind = "saves" if change < 0 else "costs"
    number = f"{change:+,.0f}".replace("-", "−")
    label = f"{number} MiB of {column} with {switch}: try it"
    return f'<td class="{kind}{step}"><a href="fit.html#{switch}" aria-label="{label}">{number}</a></td>'
