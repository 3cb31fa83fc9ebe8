"""Write the advice on machines as sentences, for the screen."""

from collections.abc import Sequence

from cria_tricks.common.units import human, money
from cria_tricks.predict.machines import METHODS, Advice, Rule


def in_words(found: Advice) -> list[str]:
    """Write what the table of options cannot show, as a list of paragraphs.

    They are the guide's recommendations, the cheapest and fastest machines, how far the numbers can be trusted, the
    guide's rules of thumb, and further notes.
    """
    said = ["The guide recommends, and by our estimate there fit:"]
    for by in found.guide:
        said[0] += f"\n- by {by.by} ({by.case}; {by.says}): {_machines(found, by.flavors)}"
    within = ""
    if found.budget:
        within = f" within {money(found.budget)}"
    for title, best in (("Cheapest", found.cheapest), ("Fastest", found.fastest)):
        named = (f"{name} on {best[method] or 'none of these'}" for method, name in METHODS.items())
        said.append(f"{title}{within}, by our estimate: {', '.join(named)}.")
    said.append("Machines that are closer than a factor of two cannot be told apart by these estimates.")
    return said + [_in_words(rule) for rule in found.rules] + ["\n".join(f"- {note}" for note in found.notes)]


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
