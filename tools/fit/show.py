"""Write the answers of the page "Will it fit?" as HTML: when the site is built, and in the browser."""

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from cria_tricks.common.themes import PARTS
from cria_tricks.common.units import between, human, money_between, speed
from cria_tricks.hardware import trust
from cria_tricks.hardware.cards import PRICES_DATE
from tools.fit.fields import Field
from tools.fit.words import plain

Found = Mapping[str, Any]

STARTS = {
    "weights": ("weights",),
    "gradients": ("gradients", "embedding gradient", "head gradient"),
    "optimizer states": ("optimizer",),
    "activations": ("saved", "open block", "blocks", "KV cache"),
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
PEAKS = {
    "embedding": "when the gradient of the embedding is computed",
    "forward": "in the forward pass, in the last block",
    "frozen block": "in the backward pass, in a frozen block",
    "last frozen block": "in the backward pass, in the last frozen block",
    "loss": "while the loss is computed",
    "log-softmax": "while the loss is computed (its log-softmax)",
    "head": "while the gradient of the head is computed",
    "last norm": "at the start of the backward pass, in the last norm",
    "last block": "at the start of the backward pass, in the last block",
    "first block": "at the end of the backward pass, in the first block",
    "last checkpointed block": "in the backward pass, in the last checkpointed block",
    "first kept block": "in the backward pass, in the first block without checkpointing",
    "averaging": "while the processes average their gradients",
    "optimizer step": "in the optimizer step",
    "evaluation": "in an evaluation, whose rows have no gradients",
    "answers of eval.samples": "while rows are answered in an evaluation",
}
"""When the peak is, by the names of the bill's moments."""
HOST = {"fits": "large enough", "tight": "just large enough", "does not fit": "too small"}
NOTICED = 1.05
"""Times that differ by less than this factor are not told apart beside a switch."""
QUALITY = "benchmarks.html#what-the-techniques-cost-in-quality"
PREDICTED = 'All numbers are predicted. <a href="#how-far-to-trust-it">How far to trust them</a>'


def amount(count: float) -> str:
    """Write bytes as all commands do, but GiB from 1,000 MiB on."""
    size = count / 2**20
    return f"{size / 1024:.1f} GiB" if 999.95 <= abs(size) < 1024 else human(count)


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
    if found["verdict"] == "fits":
        says = f"{amount(needed)} of {amount(capacity)}, {amount(capacity - needed)} to spare."
    else:
        says = f"{amount(least)} for tensors and CUDA of {amount(capacity)}"
        says += f": {amount(least - capacity)} too much." if least > capacity else "."
        says += f" PyTorch may reserve about {amount(needed - least)} besides."
    more = ""
    if any("longer than the model's context" in warning for warning in found["warnings"]):
        more += " Rows are longer than the model's context."
    host = found.get("host")
    if host and host["verdict"] == "does not fit":
        more += " The computer's RAM is too small."
    return f'<strong class="{CLASSES[found["verdict"]]}">{word}</strong> {escape(says + more)}'


def bar(found: Found, room: float) -> str:
    """Draw the bill as a bar of ``room`` bytes, with the card's line and the margin that should stay free."""
    sums = _sums(found)
    capacity, margin = found["capacity_bytes"], found["about"]["margin"]
    spans = [
        f'<span class="g{GROUPS.index(name)}" style="width:{_share(size, room)}" '
        f'title="{escape(name)}: {amount(size)}"></span>'
        for name, size in sums.items()
    ]
    left, wide = _share((1 - margin) * capacity, room), _share(margin * capacity, room)
    spans.append(f'<span class="margin" style="left:{left};width:{wide}"></span>')
    spans.append(f'<span class="card-line" style="left:{_share(capacity, room)}"></span>')
    parts = ", ".join(f"{name} {amount(size)}" for name, size in sums.items())
    says = escape(f"{amount(found['needed_bytes'])} of {amount(capacity)}: {parts}")
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
        f'<li><span class="swatch g{GROUPS.index(name)}"></span> {escape(name)} {amount(size)}</li>'
        for name, size in _sums(found).items()
    ]
    items.append(f'<li><span class="swatch card-line"></span> the card {amount(found["capacity_bytes"])}</li>')
    margin = found["about"]["margin"]
    items.append(f'<li><span class="swatch margin"></span> margin, {100 * margin:.0f} % that should stay free</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def notes(found: Found, packing: bool) -> str:
    """List what speaks against a choice that is not refused."""
    every = [*found["warnings"], *([PACKING] if packing else [])]
    items = [f'<li title="{escape(words)}">{escape(sentence(plain(words)))}</li>' for words in every]
    return f'<ul class="notes">{"".join(items)}</ul>' if items else ""


def sentence(text: str) -> str:
    """Begin with a capital letter, and end with a full stop."""
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


def facts(found: Found) -> str:
    """Say when the peak is, how long a step and the run take, what the run costs, and what the host needs."""
    needed, least, peak = (found[f"{name}_bytes"] for name in ("needed", "least", "peak"))
    own = f"Tensors need {amount(peak)} at the peak, CUDA {amount(least - peak)}. "
    items = [
        f"The peak is {PEAKS.get(found['peak_at'], found['peak_at'])}.",
        f"{own}PyTorch may reserve about {amount(needed - least)} more.",
    ]
    timed = found["verdict"] != "does not fit"
    if timed:
        items += _times(found)
    host = found.get("host")
    if host and host["name"]:
        has = f"{amount(host['needed_bytes'])} of {amount(host['capacity_bytes'])}"
        items.append(f"The RAM of {host['name']} is {HOST[host['verdict']]} ({has}).")
    elif host:
        items.append(f"The computer needs {amount(host['needed_bytes'])} of RAM.")
    if found["mean_tokens"] == found["tokens"]:
        items.append(f"We assume that every row has {found['tokens']:,} tokens.")
    else:
        items.append(f"We assume rows of {found['mean_tokens']:,} tokens in the mean, {found['tokens']:,} at most.")
    if timed and found["seconds_per_step"] is not None:
        items.append(f"Times are {trust.TIME}. Prices are those of Hugging Face Jobs’ list of {PRICES_DATE}.")
    return f'<ul class="facts"><li>{PREDICTED}</li>{"".join(f"<li>{escape(item)}</li>" for item in items)}</ul>'


def _times(found: Found) -> list[str]:
    """Say how long a step and the run take, and what the run costs."""
    if found["seconds_per_step"] is None:
        return ["How long a step takes is not predicted: an amount of memory does not say how fast the card is."]
    step = between(found["seconds_per_step_low"], found["seconds_per_step_high"])
    said = [f"An optimizer step takes {step}.", *(_run(price) for price in found["prices"])]
    if found["run"] and not found["prices"]:
        said.append(f"The whole run: {_minutes(found['run'])}.")
    return said


def _minutes(run: Found) -> str:
    return between(60 * run["minutes_low"], 60 * run["minutes_high"])


def _run(price: Found) -> str:
    """Say how long the run takes on a rented machine, and what it costs."""
    time = _minutes(price)
    cost = money_between(price["cost_low"], price["cost_high"])
    return f"The whole run on Hugging Face Jobs ({price['flavor']}): {time}, {cost}."


def bill(found: Found) -> str:
    """Write the bill line by line; each line opens to say its bytes, and why."""
    rows = [
        f'<tr><th scope="row"><details><summary><span class="swatch g{GROUPS.index(group_of(line["name"]))}"></span> '
        f"{escape(line['name'])}</summary>{line['bytes']:,} bytes. {escape(sentence(line['why']))}</details></th>"
        f"<td>{amount(line['bytes'])}</td></tr>"
        for line in lines(found)
    ]
    needed = found["needed_bytes"]
    rows.append(f'<tr class="sum"><th scope="row">needed</th><td title="{needed:,} bytes">{amount(needed)}</td></tr>')
    return _table("The bill at the peak of a step; each line opens to say why", ("line", "memory"), rows)


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
            f'<tr{of_sum}><th scope="row">{escape(name)}</th><td>{amount(a)}</td><td>{amount(b)}</td>'
            f"<td>{change(b - a)}</td></tr>"
        )
    if all(found["seconds_per_step"] is not None and found["verdict"] != "does not fit" for found in (first, second)):
        both = [between(found["seconds_per_step_low"], found["seconds_per_step_high"]) for found in (first, second)]
        rows.append(
            f'<tr><th scope="row">an optimizer step</th><td>{both[0]}</td><td>{both[1]}</td>'
            f"<td>{speed(second['seconds_per_step'] / first['seconds_per_step'])}</td></tr>"
        )
    return _table("A and B, line by line", ("line", "A", "B", "B - A"), rows)


def change(size: int) -> str:
    """Write a difference of bytes with its sign."""
    return "0" if not size else f"{'+' if size > 0 else '−'}{amount(abs(size))}"


def hint(field: Field, value: str, one: Found) -> dict[str, str]:
    """Say in a few words what a value of a switch would change.

    Returns:
        ``words``, empty if it would change nothing that is worth telling; ``link``: a page with more about it.
    """
    if (field.name, value) == ("quantization", "fp4") and not one["saved_bytes"]:
        return {"words": "the same memory as NF4, but a higher loss in our small test", "link": QUALITY}
    words = [change(-one["saved_bytes"])] if one["saved_bytes"] else []
    ratio = one["slowdown"] or 1
    if ratio >= NOTICED:
        words.append(f"{ratio:.3g} times slower")
    elif ratio <= 1 / NOTICED:
        words.append(f"{1 / ratio:.3g} times faster")
    return {"words": ", ".join(words)}


def whole(found: Found, packing: bool) -> dict[str, str]:
    """Write one answer, in the four parts of the page."""
    rest = notes(found, packing) + facts(found) + bill(found)
    return {"verdict": verdict(found), "bar": bar(found, room(found)), "legend": legend(found), "rest": rest}


def pair(first: Found, second: Found, packing: bool) -> dict[str, str]:
    """Write two answers beside each other: A, which was kept, and B."""
    scale = room(first, second)
    said = [f'<span class="which">A</span> {verdict(first)}', f'<span class="which">B</span> {verdict(second)}']
    bars = "".join(bar(found, scale) for found in (first, second))
    rest = notes(second, packing) + compared(first, second) + facts(second) + bill(second)
    return {"verdict": "<br>".join(said), "bar": bars, "legend": legend(second), "rest": rest}
