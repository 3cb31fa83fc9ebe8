"""Compare the machines that are free or can be rented: what ``cria plan RECIPE --gpu all`` prints."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from rich.text import Text

from cria_tricks.common.console import Screen, table
from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import between, human, money_between
from cria_tricks.data.lengths import Lengths
from cria_tricks.hardware import trust
from cria_tricks.hardware.cards import FLAVORS, PRICES_DATE
from cria_tricks.hardware.gpus import find_gpu
from cria_tricks.predict import plan_data
from cria_tricks.predict.answer import COLOURS
from cria_tricks.predict.host import host_bill
from cria_tricks.predict.toggles import Target
from cria_tricks.recipe import Recipe, several
from cria_tricks.run import api
from cria_tricks.run.asked import Named, named
from cria_tricks.run.search import NothingFits


@dataclass(frozen=True)
class Offer:
    """A recipe on one machine, of which the price of an hour is known [USD], and 0 for a free one.

    ``cria plan RECIPE --gpu`` with ``gpu`` shows the same run in full. ``verdict`` is as in a plan, or ``refused``, and
    ``why`` is the reason if it is not the card's memory. Each card has ``capacity_bytes`` and should have
    ``needed_bytes``. ``minutes`` and ``cost`` are the low and the high end of a range [min, USD]; they are ``None`` if
    the number of rows is not known, or the run does not fit. ``set`` holds the switches that a search has changed.
    """

    machine: str
    gpu: str
    price: float
    verdict: str
    capacity_bytes: int
    needed_bytes: int | None = None
    why: str = ""
    minutes: tuple[float, float] | None = None
    cost: tuple[float, float] | None = None
    set: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the run can work there."""
        return self.verdict in ("fits", "tight")


def compare(
    recipe: Named,
    *,
    model: str | None = None,
    settings: Iterable[str] = (),
    rows: int | None = None,
    rows_full: bool = False,
    fit: str = "",
    may_change: Iterable[str] = (),
    as_is: bool = False,
) -> list[Offer]:
    """Plan a recipe on each machine that is free or can be rented. The arguments are those of ``cria_tricks.plan``.

    Raises:
        BadInput: if the recipe is refused on every machine.
    """
    recipe, changes = named(recipe, model, several(settings))
    offers, refusals = [], []
    free = [("Colab, free", "t4@colab", 0.0), ("Kaggle, free", "t4x2@kaggle", 0.0)]
    rented = [(one.name, f"{one.card}x{one.cards}", one.price) for one in FLAVORS.values()]
    for name, cards, price in (*free, *rented):
        gpu = find_gpu(cards)
        wanted, shape, device = api.find_wanted(recipe, changes, gpu.device)
        target = Target(shape, device, gpu.count, gpu.host)
        aim = api.aim_of(wanted, fit, as_is)
        offer = Offer(name, cards, price, "does not fit", device.memory_bytes)
        try:
            target, wanted, lengths, fitted = api.searched(target, wanted, rows_full, aim, several(may_change))
            known_rows = lengths.rows or None if rows is None else rows
            offer = replace(offer, set=fitted.chosen.set if fitted else ())
            offer = _billed(offer, target, wanted.recipe, lengths, known_rows)
        except NothingFits as error:
            offer = replace(offer, needed_bytes=error.needed)
        except BadInput as error:
            refusals.append(error)
            offer = replace(offer, verdict="refused", why=str(error))
        offers.append(offer)
    if len(refusals) == len(offers):
        raise refusals[0]
    return offers


def _billed(offer: Offer, target: Target, recipe: Recipe, lengths: Lengths, rows: int | None) -> Offer:
    """Add the verdict and the bytes to an offer, and minutes and cost if the number of rows is known."""
    memory = target.memory(recipe)
    offer = replace(offer, verdict=memory.verdict, needed_bytes=memory.needed_bytes)
    on_host = host_bill(target, recipe)
    if on_host and on_host.verdict == "does not fit":
        return replace(offer, verdict="does not fit", why=f"the host needs {human(on_host.peak.bytes)} of memory")
    run = None if rows is None else plan_data.run_time(target, recipe, rows, lengths)
    if run is None:
        return offer
    low, high = run.minutes_low, run.minutes_high
    return replace(offer, minutes=(low, high), cost=(low / 60 * offer.price, high / 60 * offer.price))


def show(offers: list[Offer], screen: Screen) -> None:
    """Print how many machines fit, the cheapest and the fastest to rent, and a table of all machines."""
    screen.wrapped(f"[bold]verdict[/]   fits {sum(offer.fits for offer in offers)} of {len(offers)} machines")
    rented = [offer for offer in offers if offer.minutes and offer.price]
    if rented:
        screen.wrapped(f"[bold]cheapest[/]  {_best(rented, 'cost')}", f"[bold]fastest[/]   {_best(rented, 'minutes')}")
    elif not any(offer.minutes for offer in offers):
        screen.wrapped("[bold]price[/]     needs --rows N, the number of training rows, and a machine where it fits")
    shown = table("machine", "--gpu", "needs", "of", "verdict", "time", "price", numbers=("needs", "of"))
    for column in shown.columns[:2]:
        column.no_wrap = True
    for one in offers:
        needs = human(one.needed_bytes) if one.needed_bytes else ""
        verdict = f"[{COLOURS.get(one.verdict, 'red')}]{one.verdict}[/]"
        shown.add_row(one.machine, one.gpu, needs, human(one.capacity_bytes), verdict, *_time_and_price(one))
    screen.wrapped("", shown, "")
    for why in dict.fromkeys(offer.why for offer in offers if offer.why):
        names = ", ".join(offer.machine for offer in offers if offer.why == why)
        screen.wrapped(Text(f"{names}: {why}"), "")
    note = (
        f"Bytes are of each card. Training alone, without loading; times are {trust.TIME}. Prices are those of Hugging "
        f"Face Jobs' list of {PRICES_DATE}. The host of a rented machine is not checked. One machine in full: this "
        "command with its --gpu."
    )
    screen.wrapped(Text(note, style="dim"))


def _best(offers: list[Offer], key: str) -> str:
    """Name the offer with the lowest middle of a range, and those on other cards whose ranges overlap with it."""
    first = min(offers, key=lambda offer: math.prod(getattr(offer, key)))
    card = first.gpu.partition("x")[0]
    others = [offer for offer in offers if offer.gpu.partition("x")[0] != card]
    close = [offer.machine for offer in others if getattr(offer, key)[0] <= getattr(first, key)[1]]
    beside = f"; not told apart from {', '.join(close)}" if close else ""
    return f"{first.machine}: {', '.join(_time_and_price(first))}{beside}"


def _time_and_price(offer: Offer) -> tuple[str, str]:
    if offer.minutes is None or offer.cost is None:
        return "", ""
    low, high = offer.minutes
    return between(60 * low, 60 * high), money_between(*offer.cost) if offer.price else "free"
