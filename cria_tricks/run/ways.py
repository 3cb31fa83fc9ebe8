"""Say what would fit where no set of switches does: LoRA, 4-bit weights, weights on the host, or shorter rows."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cria_tricks import recipes
from cria_tricks.common.errors import OutOfMemory
from cria_tricks.common.units import human
from cria_tricks.predict import model_settings, toggles
from cria_tricks.predict.host import host_bill, longest_on_host
from cria_tricks.predict.toggles import Setting, Target, with_toggles
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.run.candidates import differences

SHORTEST = 64
"""Shorter rows than this are not offered [tokens]."""

FOUR_BITS = {"quantization": "nf4", "double_quantization": True}


@dataclass(frozen=True)
class Way:
    """What would fit, although it changes results, or what the host must hold.

    Attributes:
        kind: ``adapter``, ``weights``, ``host``, ``file`` or ``rows``: what changes.
        setting: the changed recipe with its bill; its ``set`` is all that changes, as ``--set`` takes it.
        host_bytes: what the host needs; 0 if it is not known.
    """

    kind: str
    setting: Setting
    host_bytes: int


class NothingFits(OutOfMemory):
    """No set of switches fits; the message says what else would.

    Args:
        target: the model and the hardware.
        recipe: what is wanted.
        smallest: the same with the set that needs least.
        tried: the number of sets.
    """

    def __init__(self, target: Target, recipe: Recipe, smallest: Recipe, tried: int):
        self.smallest = smallest
        self.needed = target.memory(smallest).needed_bytes
        self.tried = tried
        self.ways = tuple(ways(target, recipe, smallest))
        sets = [" ".join(f"--set {setting}" for setting in way.setting.set) for way in self.ways]
        others = f"this fits: {', or '.join(sets)}" if sets else "take a smaller model or a larger card"
        super().__init__(
            f"--fit: no set of switches fits {target.device.name} with a margin: the smallest needs "
            f"{human(self.needed)} of {human(target.device.memory_bytes)}; {others}"
        )


def ways(target: Target, recipe: Recipe, smallest: Recipe) -> Iterator[Way]:
    """Yield what would fit, the least change first: one way for the weights, one to stream them, and the longest rows.

    Args:
        target: the model and the hardware.
        recipe: what is wanted.
        smallest: the same with the set of switches that needs least.
    """
    tries: list[tuple[str, Recipe]] = []
    base = smallest
    if recipe.tricks.peft == "none":
        base = _with_adapter(target, recipe)
        tries = [("adapter", base)]
    elif recipe.tricks.quantization not in ("nf4", "fp4"):
        tries = [("weights", with_toggles(one, FOUR_BITS)) for one in (recipe, smallest)]
    yield from _first(target, recipe, tries)
    streamed = with_toggles(base, {"gradient_checkpointing": True})  # without which no block can be streamed
    places = {"host": True, "file": "file"}
    tries = [(place, with_toggles(streamed, {"stream_layers": value})) for place, value in places.items()]
    yield from _first(target, recipe, tries)
    rows = [_longest(target, with_toggles(smallest, {"activation_offload": on})) for on in (True, False)]
    rows.sort(key=lambda one: -one.data.max_length)
    yield from _first(target, recipe, [("rows", one) for one in rows if one.data.max_length >= SHORTEST])


def _longest(target: Target, recipe: Recipe) -> Recipe:
    """Return the recipe with the longest rows for which card and host have room."""
    tokens = toggles.longest(target, recipe) if target.works(recipe) else 0
    if target.host:
        tokens = longest_on_host(target, recipe, tokens)
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_length": tokens})})


def _with_adapter(target: Target, recipe: Recipe) -> Recipe:
    """Return the recipe with the switches of ``qlora``, and its learning rate, in place of training all weights."""
    usual = recipes.qlora(target.device)
    batch = {"gradient_accumulation": recipe.tricks.gradient_accumulation}
    train = recipe.train.model_copy(update={"learning_rate": usual.train.learning_rate})
    with_lora = recipe.model_copy(update={"tricks": usual.tricks.model_copy(update=batch), "train": train})
    needed = model_settings.needed(with_lora, target.shape)
    # Rows may be shorter than a recipe may ask for, so it is not built anew without need.
    return with_settings(with_lora, needed) if needed else with_lora


def _first(target: Target, recipe: Recipe, tries: Iterable[tuple[str, Recipe]]) -> Iterator[Way]:
    """Yield the first of several recipes that fits the card and the host."""
    for kind, changed in tries:
        if not target.works(changed):
            continue
        setting = target.bill(changed, *differences(recipe, changed))
        host = host_bill(target, changed)
        if setting.memory.verdict == "fits" and not (host and host.verdict == "does not fit"):
            yield Way(kind, setting, host.peak.bytes if host else 0)
            return
