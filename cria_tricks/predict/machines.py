"""Recommend a machine for a model: the Hardware Selection Guide's answer, our estimate, and where the two disagree.

Our estimate is computed: the bytes by an estimator that the caller passes in, the minutes and the cost by
``bill/step_time.py``. So it works for any model whose ``config.json`` is available.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cria_tricks.bill.bill import Bill
from cria_tricks.bill.step_time import ends, run_cost
from cria_tricks.hardware import trust
from cria_tricks.hardware.cards import A100_40GB, CARDS, FLAVORS, PRICES_DATE, TPUS, Flavor
from cria_tricks.hardware.device import Device
from cria_tricks.models.shape import Shape
from cria_tricks.predict.selection_guide import (
    BY_BUDGET,
    BY_SIZE,
    GB_PER_BILLION,
    KINDS,
    MACHINES,
    recommendation_for,
    refuse_unknown,
)
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.settings import Data, Lora, Train, Tricks
from cria_tricks.tricks.folds import step

Estimate = Callable[[Recipe, Shape, Device], Bill]
"""An estimator: from a recipe, a model and a card to the memory bill of the run on this card."""

METHODS = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}
"""The three ways to train that are compared, each with its name on the screen."""

GB = 10**9
"""The guide's gigabyte [bytes]."""

ROWS = (512, 2048, 8192)
"""Row lengths for which a rule of thumb is compared with our estimate, because the rule knows no lengths [tokens]."""

WHY = {
    "full": "a weight, its gradient and AdamW's two states are 16 bytes; the rule is right where these are the peak, "
    "and knows nothing of rows, vocabulary and CUDA's memory",
    "lora": "a frozen 16-bit weight is 2 bytes, and the adapter next to nothing; the other 2 of the rule stand for "
    "activations and logits, which grow with rows and vocabulary and not with parameters",
}
"""Why the rule of thumb and our estimate differ, by the way to train."""


@dataclass(frozen=True)
class Option:
    """One way to train on one machine.

    Attributes:
        flavor: the machine.
        method: ``full``, ``lora`` or ``qlora``.
        needed_bytes: the memory that each of its cards should have.
        least_bytes: the memory without which the run cannot work.
        capacity_bytes: the memory of each card.
        verdict: ``fits``, ``tight`` or ``does not fit``.
        fits: whether the run can work: the verdict is ``fits`` or ``tight``.
        minutes: the time of training, the middle of its range; ``None`` if it does not fit.
        cost: the price of these minutes [USD]; ``None`` if it does not fit.
        minutes_low: the low end of the range of the minutes.
        minutes_high: its high end.
        cost_low: the low end of the range of the cost [USD].
        cost_high: its high end.
        within_budget: whether the high end of the cost is within the budget; ``None`` without a budget, or if it does
            not fit.
    """

    flavor: str
    method: str
    needed_bytes: int
    least_bytes: int
    capacity_bytes: int
    verdict: str
    fits: bool
    minutes: float | None
    cost: float | None
    within_budget: bool | None
    minutes_low: float | None = None
    minutes_high: float | None = None
    cost_low: float | None = None
    cost_high: float | None = None


@dataclass(frozen=True)
class Recommended:
    """One recommendation of the guide.

    Attributes:
        by: the question it answers: ``model size``, ``budget`` or ``kind of training``.
        case: the entry that applies, e.g. ``"1-3B parameters"``.
        flavors: the machines it names; none where the guide has no entry.
        says: the rest of the entry.
    """

    by: str
    case: str
    flavors: tuple[str, ...]
    says: str


@dataclass(frozen=True)
class Rule:
    """A rule of thumb of the guide for memory, compared with our estimate.

    Attributes:
        method: ``full`` or ``lora``.
        gb_per_billion: the rule [GB per billion parameters].
        guide_bytes: the memory by the rule.
        our_bytes: the least memory by our estimate, on an A100, for rows of 2,048 tokens.
        by_tokens: row length [tokens] -> the least memory by our estimate, on an A100 [bytes].
        only_by_the_rule: the machines on which the model fits by the rule, but not by our estimate.
        only_by_ours: the machines on which the model fits by our estimate, but not by the rule.
        why: the reason for the difference.
    """

    method: str
    gb_per_billion: int
    guide_bytes: int
    our_bytes: int
    by_tokens: dict[int, int]
    only_by_the_rule: tuple[str, ...]
    only_by_ours: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Advice:
    """The whole answer.

    Attributes:
        model: the model's name.
        parameters: the number of its parameters.
        tokens: the tokens of the whole run.
        tokens_per_row: the tokens of a row.
        kind: the kind of training.
        budget: the budget [USD]; ``None`` without one.
        guide: the guide's recommendations.
        options: every method on every machine.
        cheapest: method -> the cheapest machine on which it fits, within the budget if there is one, or ``None``. It is
            chosen by the middles of the ranges.
        fastest: method -> the fastest of these machines, or ``None``.
        as_cheap: method -> the machines whose range of costs overlaps with that of the cheapest: they may be cheaper.
        as_fast: method -> the same for the minutes and the fastest.
        rules: the guide's rules of thumb, compared with our estimate.
        notes: further sentences for the reader.
    """

    model: str
    parameters: int
    tokens: int
    tokens_per_row: int
    kind: str
    budget: float | None
    guide: tuple[Recommended, ...]
    options: tuple[Option, ...]
    cheapest: dict[str, str | None]
    fastest: dict[str, str | None]
    as_cheap: dict[str, tuple[str, ...]]
    as_fast: dict[str, tuple[str, ...]]
    rules: tuple[Rule, ...]
    notes: tuple[str, ...]


def advise(
    shape: Shape,
    estimate: Estimate,
    tokens: int | None = None,
    budget: float | None = None,
    kind: str = "development",
) -> Advice:
    """Recommend machines for a model, by the guide and by our estimate.

    Args:
        shape: the model's shape.
        estimate: the estimator.
        tokens: the tokens of the whole run, all epochs together; when left out, those of a run of this kind (rows x
            epochs x the default ``data.max_length``).
        budget: the budget for the run [USD].
        kind: ``quick``, ``development``, ``production`` or ``research``.

    Raises:
        BadInput: for an unknown kind, or tokens or a budget that is not above zero.
    """
    refuse_unknown(tokens, budget, kind)
    per_row = Data().max_length
    tokens = tokens or KINDS[kind].rows * KINDS[kind].epochs * per_row
    options: list[Option] = []
    for flavor in FLAVORS.values():
        for method in METHODS:
            options.append(_option(shape, estimate, tokens, budget, flavor, method))
    return Advice(
        model=shape.name,
        parameters=shape.weights,
        tokens=tokens,
        tokens_per_row=per_row,
        kind=kind,
        budget=budget,
        guide=_from_the_guide(shape, budget, kind),
        options=tuple(options),
        cheapest={method: _best(options, method, lambda option: option.cost) for method in METHODS},
        fastest={method: _best(options, method, lambda option: option.minutes) for method in METHODS},
        as_cheap={method: _close(options, method, "cost") for method in METHODS},
        as_fast={method: _close(options, method, "minutes") for method in METHODS},
        rules=tuple(_rule(shape, estimate, options, method) for method in GB_PER_BILLION),
        notes=_notes(),
    )


def recipe_for(method: str, device: Device, shape: Shape | None = None) -> Recipe:
    """Make the recipe that stands for a way to train on a card.

    Each step trains on eight rows of 2,048 tokens, one row in each micro-batch, with gradient checkpointing, 16-bit
    products and torch's attention, as the guide advises when memory is short. LoRA has rank 16 and adapts all linear
    layers of the blocks. QLoRA adds NF4 with double quantization, lean preparation, the chunked loss and a paged 8-bit
    optimizer.

    Args:
        method: ``full``, ``lora`` or ``qlora``.
        device: the card.
        shape: the model's shape, which names the linear layers that LoRA adapts; when left out, those of a Llama.
    """
    tricks = Tricks(
        gradient_accumulation=8,
        gradient_checkpointing=True,
        precision=device.half_precision,
        attention="sdpa",
        expand_kv=device.needs_expand_kv,
    )
    if method != "full":
        tricks = tricks.model_copy(update={"peft": "lora"})
    # QLoRA stands for the least memory, so it gets every switch that saves some. The others are what the guide means.
    if method == "qlora":
        frozen = {"quantization": "nf4", "double_quantization": True, "lean_preparation": True, "chunked_loss": True}
        tricks = tricks.model_copy(update={**frozen, "optimizer": "adamw_8bit", "paged_optimizer": True})
    lora = Lora()
    if shape:
        # The layers that can be quantized are those that LoRA can adapt: neither reaches the experts of a mixture.
        lora = Lora(target_modules=tuple(shape.packable))
    return Recipe(name=method, tricks=tricks, lora=lora, train=Train(batch_size=1))


def _option(shape: Shape, estimate: Estimate, tokens: int, budget: float | None, flavor: Flavor, method: str) -> Option:
    card = CARDS[flavor.card]
    recipe = recipe_for(method, card.device, shape)
    memory = estimate(recipe, shape, card.device)
    want, least, has = memory.needed_bytes, memory.least_bytes, card.device.memory_bytes
    verdict = trust.verdict(want, has, least)
    option = Option(flavor.name, method, want, least, has, verdict, verdict != "does not fit", None, None, None)
    if not option.fits:
        return option
    run = run_cost(step(recipe, shape, card, cards=flavor.cards), tokens, flavor)
    option = replace(option, minutes=run.minutes, cost=run.cost)
    minutes, cost = ends(run.minutes, run.spread), ends(run.cost, run.spread)
    option = replace(option, minutes_low=minutes[0], minutes_high=minutes[1], cost_low=cost[0], cost_high=cost[1])
    if budget is None:
        return option
    return replace(option, within_budget=cost[1] <= budget)


def _best(options: Sequence[Option], method: str, key: Callable[[Option], float | None]) -> str | None:
    found = _least(options, method, key)
    return found.flavor if found else None


def _least(options: Sequence[Option], method: str, key: Callable[[Option], float | None]) -> Option | None:
    # What fits has a number, so 0.0 is never used.
    return min(_possible(options, method), key=lambda option: key(option) or 0.0, default=None)


def _possible(options: Sequence[Option], method: str) -> list[Option]:
    return [o for o in options if o.method == method and o.fits and o.within_budget is not False]


def _close(options: Sequence[Option], method: str, what: str) -> tuple[str, ...]:
    """List the machines that may be better than the best one by the middles, because the two ranges overlap.

    Machines with the same card have the same error, so of them the middles decide.

    Args:
        options: every method on every machine.
        method: the way to train.
        what: ``minutes`` or ``cost``.
    """
    best = _least(options, method, lambda option: getattr(option, what))
    if best is None:
        return ()
    high = getattr(best, f"{what}_high")
    card = FLAVORS[best.flavor].card
    others = [option for option in _possible(options, method) if FLAVORS[option.flavor].card != card]
    return tuple(option.flavor for option in others if getattr(option, f"{what}_low") <= high)


def _from_the_guide(shape: Shape, budget: float | None, kind: str) -> tuple[Recommended, ...]:
    size = recommendation_for(BY_SIZE, shape.weights / 1e9)
    assert size is not None, "the last entry has no end"
    found = [Recommended("model size", size.case, size.flavors, size.says)]
    if budget is not None:
        row = recommendation_for(BY_BUDGET, budget)
        if row:
            found.append(Recommended("budget", row.case, row.flavors, row.says))
        else:
            found.append(Recommended("budget", f"${budget:g}", (), "the guide ends at $200"))
    return (*found, Recommended("kind of training", kind, KINDS[kind].flavors, KINDS[kind].says))


def _rule(shape: Shape, estimate: Estimate, options: Sequence[Option], method: str) -> Rule:
    gb = GB_PER_BILLION[method]
    ours = {option.flavor: option for option in options if option.method == method}
    # N GB for each billion parameters are N bytes for each parameter. The guide adds up the memory of a machine's
    # cards. We do not, because each card must hold the whole model.
    by_rule = {name for name in ours if gb * shape.weights <= MACHINES[name].gb * GB}
    by_ours = {name for name, option in ours.items() if option.fits}
    # The rule names no card. The one that stands for all is the guide's largest, with its 40 GB.
    recipe = recipe_for(method, A100_40GB, shape)
    by_tokens = {
        n: estimate(with_settings(recipe, [f"data.max_length={n}"]), shape, A100_40GB).least_bytes for n in ROWS
    }
    return Rule(
        method,
        gb,
        gb * shape.weights,
        ours["a100-large"].least_bytes,
        by_tokens,
        tuple(name for name in ours if name in by_rule - by_ours),
        tuple(name for name in ours if name in by_ours - by_rule),
        WHY[method],
    )


def _notes() -> tuple[str, ...]:
    """Write the remarks that hold for every model."""
    several = ", ".join(f"{flavor.name} ({flavor.cards} cards)" for flavor in FLAVORS.values() if flavor.cards > 1)
    return (
        f"{several}: the cards share the rows, not the model. Each must hold all that a single one would, so four "
        "times 24 GB are not 96 GB for a model; what they save is time. Each of them takes eight rows of a step here; "
        "cria plan and cria launch share a recipe's own rows out among them, which takes a little longer.",
        "t4-medium has the card of t4-small, and a10g-large that of a10g-small: the same memory and the same minutes.",
        f"Minutes are of training alone, {trust.TIME}. Loading, evaluations and checkpoints come on top.",
        f"Prices are those of Hugging Face Jobs' list of {PRICES_DATE}, in USD.",
        f"Whether it fits is {trust.FITS}.",
        f"Tight means: {trust.TIGHT}.",
        f"Not estimated: {', '.join(TPUS)}. TPUs need code of their own.",
    )
