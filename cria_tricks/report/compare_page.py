"""Write a comparison of runs as one HTML page that needs no other file and no network."""

import base64
import html
from collections.abc import Mapping, Sequence
from typing import Any

from cria_tricks.common.themes import THEMES
from cria_tricks.report.compare_tables import ComparedTable, verdict
from cria_tricks.report.figure import draw_losses
from cria_tricks.report.runs import RunFolder

LONGEST = 4000
"""The length at which an answer is cut (characters)."""
_STYLE = """
:root {{ --ink: {light.ink}; --quiet: {light.quiet}; --grid: {light.grid}; --page: #ffffff; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: {dark.ink}; --quiet: {dark.quiet}; --grid: {dark.grid}; --page: #0d1117; }}
}}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0 auto;
  max-width: 70rem; padding: 1rem; }}
h1, th {{ overflow-wrap: anywhere; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; margin: 0.5rem 0; }}
th, td {{ text-align: left; vertical-align: top; padding: 0.3rem 0.8rem 0.3rem 0; border-bottom: 1px solid var(--grid);
  white-space: pre-line; }}
.note {{ color: var(--quiet); }}
.answers td {{ min-width: 16rem; max-width: 30rem; overflow-wrap: anywhere; }}
img {{ max-width: 100%; background: #ffffff; }}
"""


def page(found: Mapping[str, Any], made: Sequence[ComparedTable], runs: Sequence[RunFolder], rows: int | None) -> str:
    """Write the page.

    Args:
        found: the comparison, with the scores under ``evaluation``.
        made: its tables.
        runs: the runs, for the figure of their losses.
        rows: how many rows to show with all answers; ``None`` for all that the evaluations show.
    """
    title = " and ".join(run.name for run in runs)
    body = [f"<h1>{html.escape(title)}</h1>", f"<p><strong>{html.escape(verdict(found))}.</strong></p>"]
    picture = draw_losses({run.name: run.history for run in runs})
    if picture:
        source = base64.b64encode(picture).decode("ascii")
        body.append(f'<p><img alt="loss by step of each run" src="data:image/png;base64,{source}"></p>')
    for table in made:
        body += [f"<h2>{html.escape(table.title)}</h2>", *_table(table.head, table.lines, "wide")]
        if table.note:
            body.append(f'<p class="note">{html.escape(table.note)}</p>')
    body += _answers(found, rows)
    style = _STYLE.format(light=THEMES["light"], dark=THEMES["dark"])
    head = [
        "<!doctype html>",
        '<html lang="en">',
        '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{html.escape(title)}</title>",
        f"<style>{style}</style></head>",
        "<body>",
    ]
    return "\n".join([*head, *body, "</body>", "</html>", ""])


def _table(head: Sequence[str], lines: Sequence[Sequence[str]], css: str) -> list[str]:
    made = [f'<div class="{css}"><table>', f"<tr>{_cells('th', head)}</tr>"]
    for line in lines:
        made.append(f"<tr>{_cells('td', line)}</tr>")
    return [*made, "</table></div>"]


def _cells(tag: str, cells: Sequence[str]) -> str:
    return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)


def _answers(found: Mapping[str, Any], rows: int | None) -> list[str]:
    """Write the answers side by side: a table for each row, with a column for each run."""
    shown = found["evaluation"]["answers"][:rows]
    if not shown:
        return []
    made = ["<h2>Answers side by side</h2>"]
    head = ["the data's own answer", *(run["name"] for run in found["runs"])]
    for example in shown:
        cells = [_shortened(example["reference"])]
        for answer in example["answers"]:
            cells.append(_shortened(answer["text"]) if answer else "not evaluated")
        made += [f"<h3>{html.escape(example['query'] or '(nothing is asked)')}</h3>"]
        made += _table(head, [cells], "wide answers")
    return made


def _shortened(text: str) -> str:
    if len(text) > LONGEST:
        return text[:LONGEST] + " ..."
    return text or "(no text)"
