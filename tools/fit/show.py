"""Write the answers of the page "Will it fit?" as HTML: when the site is built, and in the browser."""

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from cria_tricks.common.themes import PARTS
from cria_tricks.common.units import between, human, money_between, speed
from cria_tricks.hardware import trust
from cria_tricks.hardware.cards import PRICES_DATE

Found = Mapping[str, Any]

STARTS = {
    "weights": ("weights",),
    "gradients": ("gradients", "embedding gradient", "head gradient"),
    "optimizer states": ("optimizer",),
    "activations": ("saved", "open block", "blocks"),
    "batch": ("batch",),
    "the card's own": ("CUDA", "cuBLAS"),
    "reserved, not used": ("reserved",),
}
"""The groups of the bar, by how the names of their lines begin; all other lines are logits."""
GROUPS = (*PARTS, "batch", "the card's own", "reserved, not used")
"""The groups in the order of the bar; the class of number n is ``gn``."""
PACKING = (
    "Packing saves time where rows are shorter than the sequence length: it fills each packed row with several of "
    "them. Without a mean length, every row is taken as full, and packing changes the attention mask at most."
)
CLASSES = {"fits": "fits", "tight": "tight", "does not fit": "not"}


def group_of(line: str) -> str:
    """Return the group that a line of the bill belongs to."""
    return next((group for group, starts in STARTS.items() if line.startswith(starts)), "logits")


def lines(found: Found) -> list[dict[str, Any]]:
    """Return all lines of a bill, by groups; of a mixture of experts these have a line of their own."""
    every = []
    for line in (*found["lines"], *found["around"]):
        share = found["about"]["experts"]
        if line["name"] == "weights: all others" and share:
            experts = round(share * line["bytes"])
            every.append({"name": "weights: experts", "bytes": experts, "why": "quantization leaves them as they are"})
            line = {**line, "bytes": line["bytes"] - experts}
        if line["bytes"]:
            every.append(line)
    return sorted(every, key=lambda line: GROUPS.index(group_of(line["name"])))


def verdict(found: Found) -> str:
    """Say whether it fits, and by how much."""
    needed, capacity, least = (found[f"{name}_bytes"] for name in ("needed", "capacity", "least"))
    word = {"fits": "It fits.", "tight": "It is tight.", "does not fit": "It does not fit."}[found["verdict"]]
    if found["verdict"] == "tight":
        says = f"At least {human(least)} of {human(capacity)}, up to {human(needed)} with what PyTorch keeps."
    else:
        left = capacity - needed
        says = f"{human(needed)} of {human(capacity)}, {human(abs(left))} {'too much' if left < 0 else 'to spare'}."
    more = ""
    if any("longer than the model's context" in warning for warning in found["warnings"]):
        more += " Rows are longer than the model's context."
    host = found.get("host")
    if host and host["verdict"] == "does not fit":
        more += " The host's memory is too small."
    return f'<strong class="{CLASSES[found["verdict"]]}">{word}</strong> {escape(says + more)}'


def bar(found: Found, room: float) -> str:
    """Draw the bill as a bar of ``room`` bytes, with the card's line and the margin that should stay free."""
    sums = _sums(found)
    capacity, margin = found["capacity_bytes"], found["about"]["margin"]
    spans = [
        f'<span class="g{GROUPS.index(name)}" style="width:{_share(size, room)}" title="{escape(name)}: {human(size)}">'
        "</span>"
        for name, size in sums.items()
    ]
    left, wide = _share((1 - margin) * capacity, room), _share(margin * capacity, room)
    spans.append(f'<span class="margin" style="left:{left};width:{wide}"></span>')
    spans.append(f'<span class="card-line" style="left:{_share(capacity, room)}"></span>')
    parts = ", ".join(f"{name} {human(size)}" for name, size in sums.items())
    says = escape(f"{human(found['needed_bytes'])} of {human(capacity)}: {parts}")
    return f'<div class="stack" role="img" aria-label="{says}">{"".join(spans)}</div>'


def _share(size: float, room: float) -> str:
    return f"{100 * size / room:.3f}%"


def _sums(found: Found) -> dict[str, int]:
    """Add the lines of each group; groups without a byte are left out."""
    sums = dict.fromkeys(GROUPS, 0)
    for line in lines(found):
        sums[group_of(line["name"])] += line["bytes"]
    return {name: size for name, size in sums.items() if size}


def room(*found: Found) -> float:
    """Return the bytes of a bar's whole width, so that several answers share one scale."""
    return 1.04 * max(max(one["needed_bytes"], one["capacity_bytes"]) for one in found)


def legend(found: Found) -> str:
    """List the groups of the bar with their sizes."""
    items = [
        f'<li><span class="swatch g{GROUPS.index(name)}"></span> {escape(name)} {human(size)}</li>'
        for name, size in _sums(found).items()
    ]
    items.append(f'<li><span class="swatch card-line"></span> the card {human(found["capacity_bytes"])}</li>')
    margin = found["about"]["margin"]
    items.append(f'<li><span class="swatch margin"></span> margin, {margin:.0%} that should stay free</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def notes(found: Found, packing: bool) -> str:
    """List what speaks against a choice that is not refused."""
    every = [*found["warnings"], *([PACKING] if packing else [])]
    items = [f"<li>{escape(sentence(words))}</li>" for words in every]
    return f'<ul class="notes">{"".join(items)}</ul>' if items else ""


def sentence(text: str) -> str:
    """Begin with a capital letter, and end with a full stop."""
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


def facts(found: Found) -> str:
    """Say when the peak is, how long a step and the run take, what the run costs, and what the host needs."""
    items = [f"Most is alive at the moment “{found['peak_at']}”."]
    if found["seconds_per_step"] is None:
        items.append("How long a step takes is not predicted: we know no rates of this card.")
    else:
        step = between(found["seconds_per_step_low"], found["seconds_per_step_high"])
        items.append(f"An optimizer step takes {step}.")
    items += [_run(price) for price in found["prices"]]
    host = found.get("host")
    if host and host["name"]:
        has = f"{human(host['needed_bytes'])} of {human(host['capacity_bytes'])}"
        items.append(f"The host, {host['name']}: {host['verdict']}, {has} while {host['needed_at']}.")
    elif host:
        items.append(f"The host needs {human(host['needed_bytes'])} while {host['needed_at']}.")
    items.append(f"{sentence(found['lengths'])}")
    if found["seconds_per_step"] is not None:
        items.append(f"Times are {trust.TIME}. Prices are those of Hugging Face Jobs’ list of {PRICES_DATE}.")
    return f'<ul class="facts">{"".join(f"<li>{escape(item)}</li>" for item in items)}</ul>'


def _run(price: Found) -> str:
    """Say how long the run takes on a rented machine, and what it costs."""
    time = between(60 * price["minutes_low"], 60 * price["minutes_high"])
    return f"The run on {price['flavor']}: {time}, {money_between(price['cost_low'], price['cost_high'])}."


def bill(found: Found) -> str:
    """Write the bill line by line; each line opens to say why."""
    rows = [
        f'<tr><th scope="row"><details><summary><span class="swatch g{GROUPS.index(group_of(line["name"]))}"></span> '
        f"{escape(line['name'])}</summary>{escape(line['why'])}</details></th>"
        f"<td>{line['bytes']:,}</td><td>{human(line['bytes'])}</td></tr>"
        for line in lines(found)
    ]
    rows.append(
        f'<tr class="sum"><th scope="row">needed</th><td>{found["needed_bytes"]:,}</td>'
        f"<td>{human(found['needed_bytes'])}</td></tr>"
    )
    return _table("The bill at the peak of a step; each line opens to say why", ("line", "bytes", ""), rows)


def _table(caption: str, heads: Iterable[str], rows: Iterable[str]) -> str:
    cells = "".join(f'<th scope="col">{head}</th>' if head else "<td></td>" for head in heads)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{caption}"><table class="bill">'
        f"<caption>{caption}</caption><thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def compared(first: Found, second: Found) -> str:
    """Write two bills beside each other, with the difference of each line."""
    one, two = ({line["name"]: line["bytes"] for line in lines(found)} for found in (first, second))
    one["needed"], two["needed"] = first["needed_bytes"], second["needed_bytes"]
    names = list(dict.fromkeys([*one, *two]))
    names.sort(key=lambda name: (name == "needed", GROUPS.index(group_of(name))))
    rows = []
    for name in names:
        a, b = one.get(name, 0), two.get(name, 0)
        of_sum = ' class="sum"' if name == "needed" else ""
        rows.append(
            f'<tr{of_sum}><th scope="row">{escape(name)}</th><td>{human(a)}</td><td>{human(b)}</td>'
            f"<td>{change(b - a)}</td></tr>"
        )
    times = [found["seconds_per_step"] for found in (first, second)]
    if None not in times:
        both = [between(found["seconds_per_step_low"], found["seconds_per_step_high"]) for found in (first, second)]
        rows.append(
            f'<tr><th scope="row">an optimizer step</th><td>{both[0]}</td><td>{both[1]}</td>'
            f"<td>{speed(times[1] / times[0])}</td></tr>"
        )
    return _table("A and B, line by line", ("line", "A", "B", "B - A"), rows)


def change(size: int) -> str:
    """Write a difference of bytes with its sign."""
    return "0" if not size else f"{'+' if size > 0 else '−'}{human(abs(size))}"


def saving(one: Found) -> str:
    """Say in a few words what a value of a switch would change."""
    words = [] if not one["saved_bytes"] else [f"{'saves' if one['saved_bytes'] > 0 else 'adds'} "
                                               f"{human(abs(one['saved_bytes']))}"]  # fmt: skip
    ratio = speed(one["slowdown"])
    if ratio not in ("", "as fast"):
        words.append(ratio)
    return ", ".join(words) or "changes nothing here"


def whole(found: Found, packing: bool) -> dict[str, str]:
    """Write one answer, in the three parts of the page."""
    rest = legend(found) + notes(found, packing) + facts(found) + bill(found)
    return {"verdict": verdict(found), "bar": bar(found, room(found)), "rest": rest}


def pair(first: Found, second: Found, packing: bool) -> dict[str, str]:
    """Write two answers beside each other: A, which was kept, and B."""
    scale = room(first, second)
    said = [f'<span class="which">A</span> {verdict(first)}', f'<span class="which">B</span> {verdict(second)}']
    bars = "".join(bar(found, scale) for found in (first, second))
    rest = legend(second) + notes(second, packing) + compared(first, second) + facts(second) + bill(second)
    return {"verdict": "<br>".join(said), "bar": bars, "rest": rest}
