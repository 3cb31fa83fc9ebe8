"""Write the advice on machines as sentences, for the screen."""

from collections.abc import Sequence

from cria_tricks.common.units import between, human, money, money_between
from cria_tricks.predict.machines import METHODS, Advice, Option, Rule


def verdict(found: Advice) -> list[tuple[str, str]]:
    """Name the cheapest and the fastest machine for each way to train, each with its minutes and its price."""
    within = f" within {money(found.budget)}" if found.budget else ""
    chosen = []
    for name, best, close in (("cheapest", found.cheapest, found.as_cheap), ("fastest", found.fastest, found.as_fast)):
        ways = [
            f"{METHODS[method]}: {_where(found, method, flavor)}{_or(close[method])}" for method, flavor in best.items()
        ]
        chosen.append((f"{name}{within}", "\n".join(ways)))
    return chosen


def _where(found: Advice, method: str, flavor: str | None) -> str:
    """Write one machine with the minutes and the price of a way to train on it."""
    for option in found.options:
        if (option.flavor, option.method) == (flavor, method):
            return f"{flavor}, {in_figures(option)}"
    return "none of these"


def in_figures(option: Option) -> str:
    """Write the range of minutes and of costs of a way to train on a machine; nothing if it does not fit.

    If it fits but is tight, the last word says so.
    """
    if option.minutes_low is None or option.minutes_high is None or option.cost_low is None or option.cost_high is None:
        return ""
    minutes = between(60 * option.minutes_low, 60 * option.minutes_high)
    narrow = ", tight" if option.verdict == "tight" else ""
    return f"{minutes}, {money_between(option.cost_low, option.cost_high)}{narrow}"


def _or(flavors: Sequence[str]) -> str:
    """Name the machines that the estimate cannot tell from the best one."""
    if not flavors:
        return ""
    return f"; not told apart from {', '.join(flavors)}, whose range overlaps"


def in_words(found: Advice) -> list[str]:
    """Write what neither the verdict nor the table of options shows, as a list of paragraphs.

    They say how far the numbers can be trusted, what the guide recommends, its rules of thumb, and further notes.
    """
    guide = ["The guide recommends, and by our estimate there fit:"]
    for by in found.guide:
        guide.append(f"- by {by.by} ({by.case}; {by.says}): {_machines(found, by.flavors)}")
    notes = "\n".join(f"- {note}" for note in found.notes)
    return [
        "Machines whose ranges overlap cannot be told apart by these estimates.",
        "\n".join(guide),
        *(_in_words(rule) for rule in found.rules),
        notes,
    ]


def _machines(found: Advice, flavors: Sequence[str]) -> str:
    """Name these machines, each with the methods that fit on it by our estimate."""
    named = []
    for flavor in flavors:
        fitting = [METHODS[option.method] for option in found.options if option.flavor == flavor and option.fits]
        named.append(f"{flavor} ({', '.join(fitting) or 'nothing'})")
    return " or ".join(named) or "nothing"


def _in_words(rule: Rule) -> str:
    """Compare a rule of thumb with our estimate, in a few sentences."""
    ours = ", ".join(f"{human(needed)} with rows of {tokens:,}" for tokens, needed in rule.by_tokens.items())
    said = (
        f"The guide's rule for {METHODS[rule.method]}, {rule.gb_per_billion} GB per billion parameters, gives "
        f"{human(rule.guide_bytes)}. We estimate {ours} tokens: {rule.why}."
    )
    for names, one, other in (
        (rule.only_by_the_rule, "the rule", "our estimate"),
        (rule.only_by_ours, "our estimate", "the rule"),
    ):
        if names:
            said += f" By {one} it fits {', '.join(names)}, by {other} it does not."
    return said
