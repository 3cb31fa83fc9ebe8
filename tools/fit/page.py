"""Write the page "Will it fit?" as it is before any Python runs in it: the form, and the answer for its first choice.

A browser without JavaScript, or with a page that was opened as a file, shows this answer. ``docs/assets/fit.js`` makes
the form work.
"""

import json
from html import escape
from typing import Any

from cria_tricks import recipes
from cria_tricks.common.units import human
from cria_tricks.hardware.gpus import ALIASES, GPUS, find_gpu
from cria_tricks.models.shape import find_shape
from cria_tricks.recipe import Recipe
from tools import notebooks
from tools.fit import answers, bridge, fields, others, words
from tools.fit.fields import BY_NAME, CONFIG, FIELDS, FIRST, GROUPS, NUMBERS, Field

PLACE = '<div id="fit"></div>'
"""What stands in ``docs/fit.md`` for the form and the answer."""
HOST = "python -m http.server --directory build/site"
NO_SCRIPT = (
    "This is the answer for one choice. Others are computed in your browser, which needs JavaScript; "
    "<code>cria plan</code> does the same on the command line."
)
COLAB = {"t4": "T4", "l4": "L4", "a100": "A100"}
"""The cards that Colab has, by its names for them."""


def put_in(html: str, missing: str = "") -> str:
    """Return the page with the form and the first answer in it; ``missing``: why there is no Python for it."""
    return html.replace(PLACE, whole(missing))


def whole(missing: str = "") -> str:
    """Write the form, the first answer, and the data that the script needs."""
    choice = fields.default()
    first = json.loads(bridge.call("answer", json.dumps({"choice": choice})))
    said = first["html"]
    data = json.dumps(facts(first, missing)).replace("<", "\\u003c")
    return (
        f'<div id="fit" class="fit"><noscript><p class="notice">{NO_SCRIPT}</p></noscript>'
        '<div class="head"><p class="strange" role="alert"></p>'
        f'<p class="verdict" role="status" aria-live="polite">{said["verdict"]}</p>'
        f'<div class="bars">{said["bar"]}</div>'
        '<div class="done" role="status"></div></div>'
        f'<div class="legends">{said["legend"]}</div>'
        f'<form autocomplete="off">{_buttons()}{"".join(_group(name, choice) for name in GROUPS)}</form>'
        f'<div class="answer"><div class="rest">{said["rest"]}</div>{_command(first["commands"])}</div></div>'
        f'<script type="application/json" id="fit-data">{data}</script>'
    )


def facts(first: dict[str, Any], missing: str) -> dict[str, Any]:
    """Return what the script needs: the fields with their limits, the names that a link may say, the first answer."""
    plain = fields.of_recipe(Recipe())
    return {
        "missing": missing,
        "host": HOST,
        "first": {"data": first["data"], "commands": first["commands"]},
        "default": fields.default(),
        "fields": {field.name: _limits(field) for field in FIELDS},
        "besides": (*others.LISTS, *fields.SWITCHES),
        "models": [*fields.MODELS, CONFIG, NUMBERS],
        "cards": list(GPUS),
        "aliases": ALIASES,
        "switches": fields.SWITCHES,
        "off": {name: plain[name] for name in (*fields.SWITCHES, "gradient_accumulation")},
        "read": answers.READ,
        "config": answers.CONFIG_FIELDS,
        "install": notebooks.INSTALL,
        "colab": COLAB,
        # What a recipe chooses for a card, by its compute capability: precision and kernels change with the card.
        "kernels": {"old": _kernels("8GiB:7.5"), "new": _kernels("8GiB:8.0")},
        "capability": {name: ".".join(map(str, gpu.device.capability)) for name, gpu in GPUS.items()},
    }


def _kernels(card: str) -> dict[str, str]:
    """Return the fields that depend on the card's generation, as the recipe ``qlora`` sets them."""
    found = fields.of_recipe(recipes.qlora(find_gpu(card).device))
    return {name: found[name] for name in ("precision", "expand_kv")}


def _limits(field: Field) -> dict[str, Any]:
    found: dict[str, Any] = {"values": field.values, "number": bool(field.number), "beside": field.beside}
    if field.high:
        found |= {"low": field.low, "high": field.high, "whole": field.whole}
    return found


def _buttons() -> str:
    """Write the buttons above the form."""
    buttons = (
        ("fit", "Make it fit", "change as little as possible until it fits"),
        ("fastest", "Make it fast", "the fastest set of switches that fits"),
        ("off", "All switches off", "plain fp32 training of all weights, without gradient accumulation"),
        ("reset", "Start again", "the first choice of this page"),
        ("pin", "Compare with this (A)", "keep this choice as A, and change B beside it"),
        ("link", "Copy link", "of this choice"),
    )
    made = (
        f'<button type="button" class="md-button" data-do="{name}" title="{title}">{label}</button>'
        for name, label, title in buttons
    )
    return f'<p class="buttons">{"".join(made)}</p>'


def _command(commands: dict[str, str]) -> str:
    """Write the commands that say and train the choice."""
    return (
        '<h2 id="the-command">The command</h2>'
        f'<pre><code class="plan" tabindex="0">{escape(commands["plan"])}</code></pre>'
        '<p class="buttons"><button type="button" class="md-button" data-do="command">Copy command</button> '
        '<button type="button" class="md-button" data-do="config" hidden>Download config.json</button></p>'
        '<p class="get"><a class="notebook" download="cria_train.ipynb" href="#the-command">'
        "Download the notebook of this choice</a><span></span></p>"
    )


def _group(group: str, choice: dict[str, str]) -> str:
    """Write the fields of a group; all groups but the first can be folded, and are on a phone (fit.js)."""
    inside = "".join(_field(field, choice[field.name]) for field in FIELDS if field.group == group)
    if group == FIRST:
        return f"<fieldset><legend>{group}</legend>{inside}</fieldset>"
    name = f"fit-group-{group.partition(' ')[0].lower()}"
    return (
        f'<details class="group" id="{name}"><summary>More: {group}</summary>'
        f'<fieldset aria-label="{group}">{inside}</fieldset></details>'
    )


def _field(field: Field, value: str) -> str:
    """Write a field: its label, its control, a link to its lesson, and room for what it saves or why it cannot be."""
    box = _is_box(field)
    name = f"fit-{field.name}"
    says = f'<div class="says" id="{name}-says"></div>'
    if field.name == "config":
        file = f'<input type="file" id="{name}-file" accept=".json,application/json">'
        says += f'<label class="file">or its file {file}</label>'
    lesson = ""
    if field.lesson:
        about = escape(field.label.partition(" (")[0])
        lesson = f'<a href="lessons/{field.lesson}.html" aria-label="lesson on {about}">lesson</a>'
    beside = f' data-beside="{field.beside[0]}={field.beside[1]}"' if field.beside else ""
    kind = "switch" if box else "field"
    title = f' title="{field.setting}"' if field.setting else ""
    label = f'<label for="{name}"{title}>{escape(field.label)}</label>'
    return f'<div class="{kind}"{beside}>{label}{_control(field, value)}{lesson}{says}</div>'


def _is_box(field: Field) -> bool:
    """Whether a field is on or off, and nothing else."""
    return field.values == ("false", "true") and not field.number


def _control(field: Field, value: str) -> str:
    """Write the control of a field."""
    at = f'id="fit-{field.name}" name="{field.name}" aria-describedby="fit-{field.name}-says"'
    if _is_box(field):
        return f'<input type="checkbox" {at}{" checked" * (value == "true")}>'
    if field.name == "config":
        return f'<textarea {at} rows="4" spellcheck="false" placeholder=\'{{"model_type": "llama", ...}}\'></textarea>'
    if field.name == "model":
        return _select(at, _models(), value)
    if field.name == "card":
        return _select(at, _cards(), value) + _own_card()
    if field.values:
        options = {one: words.value(field, one) for one in field.values}
        if not field.number:
            return _select(at, options, value)
        options["number"] = f"{field.number}:"
        return (
            f"{_select(at, options, value)}"
            f'<input type="number" id="fit-{field.name}-number" min="1" max="1048576" step="1" hidden '
            f'aria-label="{field.number}">'
        )
    step = "1" if field.whole else "any"
    number = (
        f'<input type="number" {at} min="{field.low:g}" max="{field.high:.0f}" step="{step}" value="{value}" '
        'inputmode="decimal">'
    )
    return number + (_slider() if field.name == "tokens" else "")


def _slider() -> str:
    """Write the slider of the sequence length: powers of two from 2^3 to 2^20, with room for a mark."""
    return (
        '<span class="slider"><input type="range" id="fit-tokens-slider" min="3" max="20" step="0.25" '
        'aria-label="Sequence length, by powers of two"><span class="longest" hidden></span></span>'
        '<div class="longest-says"></div>'
    )


def _select(at: str, options: dict[str, str], value: str) -> str:
    made = (
        f'<option value="{escape(one)}"{" selected" * (one == value)}>{escape(label)}</option>'
        for one, label in options.items()
    )
    return f"<select {at}>{''.join(made)}</select>"


def _models() -> dict[str, str]:
    found = {name: f"{name} ({find_shape(name).weights / 1e9:.2f} billion)" for name in fields.MODELS}
    return {**found, CONFIG: "your config.json ...", NUMBERS: "type the sizes yourself ..."}


def _cards() -> dict[str, str]:
    found = {"other": "my card has ... GiB (type how many)"}
    for name, gpu in GPUS.items():
        many = f"{gpu.count} x " if gpu.count > 1 else ""
        found[name] = f"{name}: {many}{gpu.device.name}, {human(gpu.device.memory_bytes)}"
    return found


def _own_card() -> str:
    """Write the two fields of a card that is only an amount of memory."""
    return (
        '<span class="own" hidden><label for="fit-gib">My card has (GiB)</label>'
        '<input type="number" id="fit-gib" min="0.1" max="1024" step="any" value="8">'
        '<label for="fit-capability">Compute capability</label>'
        '<select id="fit-capability"><option>7.5</option><option>8.0</option><option selected>8.6</option>'
        "<option>8.9</option><option>9.0</option></select></span>"
    )


assert set(BY_NAME) == {field.name for field in FIELDS}, "two fields have one name"
