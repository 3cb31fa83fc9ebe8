"""What the page "Will it fit?" computes with, exported from the estimate: ``python -m tools.fit``.

The estimate is folded over formulas in place of a batch, a length and an accumulation (``bill/formula.py``). What
comes out is sorted into tables: a moment of the step is a few parts, a part a few rows, and each depends on some of the
switches only. The page looks its parts up, puts its numbers into their polynomials, adds, and takes the largest moment.
It knows no formula of ours. One script a model, under ``docs/assets/fit/``, made anew when the package has changed.
"""

import functools
import itertools
import json
import os
import typing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from cria_tricks import recipes
from cria_tricks.bill.bill import EXPANDABLE
from cria_tricks.bill.constants import TOKENS_PER_CHUNK
from cria_tricks.bill.facts import StepFacts
from cria_tricks.bill.formula import RULES, Formula, Polynomial
from cria_tricks.bill.lines import Moment
from cria_tricks.bill.moments import moments
from cria_tricks.bill.step_time import counts
from cria_tricks.common.errors import BadInput
from cria_tricks.course import LESSON_OF
from cria_tricks.data.kwanzaa_lengths import row_lengths
from cria_tricks.hardware import trust
from cria_tricks.hardware.cards import CARDS, FLAVORS, PRICES_DATE, Card
from cria_tricks.hardware.gpus import GPUS
from cria_tricks.load.refusals import facts_of, refuse
from cria_tricks.models import catalogue
from cria_tricks.models.configs import LONGER_THAN_CONTEXT
from cria_tricks.models.shape import Shape, find_shape
from cria_tricks.predict.model_settings import lora_targets
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.settings import Tricks
from cria_tricks.tricks.folds import estimate, facts, work
from tools import notebooks

HERE = Path(__file__).resolve().parents[1] / "docs" / "assets" / "fit"
SAMPLED = {
    "gemma-3-1b", "llama-3.1-70b", "llama-3.2-1b", "llama-3.2-3b", "mixtral-8x7b", "olmo-2-1b", "phi-4-mini", "smollm2",
    "tinyllama-1.1b",
}  # fmt: skip
"""Models of each kind of block; ``CRIA_FIT=sample`` makes the tables of these alone, in a third of the time."""
MODELS = tuple(name for name in catalogue.CATALOGUE if name in SAMPLED or os.environ.get("CRIA_FIT") != "sample")
ONE_CARD = {name: gpu for name, gpu in GPUS.items() if gpu.count == 1}
"""The cards of the page, which plans one process."""
OLD, NEW = CARDS["t4"], CARDS["a100"]
"""A card of each kind: what kernels a card has is all that a formula asks of it."""
LEAST = {"B": 1, "T": 8}
"""Of the page's numbers; what can never be the largest from there on is left out."""
SAMPLE = {"T": 64, "k": 2}
"""Tokens and micro-batches for which comparisons are answered."""

LEFT_OUT = frozenset(
    ("gradient_accumulation", "keep_attention", "fused_lora", "fused_blocks", "tiled_mlp", "optimizer_in_backward",
     "stream_layers", "layer_by_layer")
)  # fmt: skip
"""Techniques that the page has no switch for; accumulation is a number of its own."""
VALUES: dict[str, tuple[Any, ...]] = {
    name: typing.get_args(field.annotation) if typing.get_origin(field.annotation) is typing.Literal else (False, True)
    for name, field in Tricks.model_fields.items()
    if name not in LEFT_OUT
}
"""The switches of the page, and what each can be. Checkpointing is on or off here, never a number of blocks."""
STORED = ("precision", "peft", "quantization", "lean_preparation")
ATTENTION = ("precision", "attention", "expand_kv", "packing")
WINDOWS = {False: 2**40, True: 1}
"""A window that is longer than the sample of ``T``, and one that is not: comparisons are answered for the sample."""
PACKING = (
    'packing saves time where rows are shorter than "Tokens of a row": it fills each packed row with several of them. '
    "This page takes every row as full, so here packing changes the attention mask at most"
)
"""What the page says while packing is on."""
Row = tuple[str, Formula]
Part = list[list[Row]]
"""Rows that stand together; where several such lists are, the one with the largest sum."""


def plain(shape: Shape, **tricks: Any) -> Recipe:
    """A recipe of these switches for a model, in letters: B rows of T tokens, k times."""
    k = Formula.letter("k", SAMPLE["k"]) if tricks.pop("accumulates", False) else 1
    rows = Formula.letter("B", 2 if tricks.pop("several", False) else 1)
    tokens = Formula.letter("T", SAMPLE["T"])
    bare = with_settings(Recipe(), lora_targets(shape))
    return bare.model_copy(
        update={
            "tricks": bare.tricks.model_copy(update={**tricks, "gradient_accumulation": k}),
            "train": bare.train.model_copy(update={"batch_size": rows}),
            "data": bare.data.model_copy(update={"max_length": tokens}),
        }
    )


def windowed(shape: Shape, reached: bool) -> Shape:
    """Return the shape with a window that the sample of ``T`` reaches, or does not; without a window as it is."""
    return replace(shape, window=WINDOWS[reached]) if shape.window else shape


def combinations(fields: Iterable[str]) -> Iterator[dict[str, Any]]:
    """All values of some switches, but for those that are refused."""
    fields = tuple(fields)
    for values in itertools.product(*(VALUES.get(field, (False, True)) for field in fields)):
        chosen = dict(zip(fields, values, strict=True))
        if chosen.get("quantization", "none") == "none" or chosen["peft"] != "none":
            yield chosen


def key(values: Iterable[Any]) -> str:
    """As the page writes it: ``fp16,lora,true``."""
    return ",".join(str(value).lower() if isinstance(value, bool) else str(value) for value in values)


def bytes_of(shape: Shape) -> dict[str, Any]:
    """Moments and their parts, each part a table."""
    stored: dict[tuple[Any, ...], dict[str, Any]] = {}
    classes = {}
    for chosen in combinations(STORED):
        memory = facts(plain(shape, **chosen), shape, NEW.device)
        bf16 = memory.bf16 and (chosen["quantization"] == "int8" or shape.experts > 1)  # else it is as large as fp16
        found = (memory.compute_itemsize, bf16, memory.other_weight_itemsize, memory.hidden_itemsize,
                 memory.product_itemsize, memory.product_bytes, memory.adapter_input_itemsize,
                 chosen["peft"])  # fmt: skip
        classes[key(chosen.values())] = str(list(stored).index(found) if found in stored else len(stored))
        stored.setdefault(found, chosen)
    kernels, of_kernel = _kernels(shape)
    parts: dict[str, Any] = {}

    def table(name: str, by: tuple[str, ...], entries: Iterable[tuple[Iterable[Any], Part | None]]) -> None:
        parts[name] = {"by": by, "is": {key(values): part for values, part in entries if part is not None}}

    def over(by: tuple[str, ...], rows: Callable[[StepFacts], Part | None], **more: Any) -> Iterator[Any]:
        """One entry for each choice: ``stored`` is a class of how weights are stored, all others switches."""
        switches = [field for field in by if field != "stored"]
        for number, chosen in enumerate(stored.values()):
            for values in itertools.product(*(VALUES.get(field, (False, True)) for field in switches)):
                tricks = {**more, **chosen, **dict(zip(switches, values, strict=True))}
                if tricks.get("chunked_loss") and chosen["peft"] in ("none", "head", "prompt_tuning"):
                    continue
                memory = facts(plain(shape, **tricks), shape, NEW.device)
                yield (number, *values), rows(memory)

    matrices = ("precision", "peft", "quantization", "double_quantization")
    table("matrices", matrices, (
        (chosen.values(), _rows(facts(plain(shape, **chosen), shape, NEW.device), FIXED[:1]))
        for chosen in combinations(matrices)
    ))  # fmt: skip
    table("others", ("stored",), over(("stored",), lambda memory: _rows(memory, FIXED[1:3])))
    by: tuple[str, ...] = ("stored", "optimizer", "paged_optimizer")
    table("states", by, over(by, lambda memory: _rows(memory, FIXED[3:4])))
    by = ("stored", "accumulates")
    table("gradients before", by, over(by, lambda memory: _rows(memory, ("gradients",), "loss")))
    table("gradients", ("stored",), over(("stored",), lambda memory: _rows(memory, ("gradients",), "optimizer step")))
    ends = ("final norm", "16-bit copy of the head", "16-bit copies of weights", "hidden states for the loss", "logits",
            "capped logits", "head gradient")  # fmt: skip
    by = ("stored", "gradient_checkpointing", "activation_offload", "chunked_loss")
    for moment in ("loss", "log-softmax", "head", "last norm"):
        table(moment, by, over(by, functools.partial(_rows, names=ends, moment=moment)))
    by = ("stored", "accumulates")
    table("embedding", by, over(by, lambda memory: _rows(memory, ("embedding gradient",), "embedding")))
    _blocks(shape, stored, of_kernel, table)
    return {"classes": {"stored": {"by": STORED, "is": classes}, "kernel": kernels}, "parts": parts}


FIXED = ("weights: blocks", "weights: all others", "weights: adapter", "optimizer states", "batch")
ALWAYS = ("matrices", "others", "states")
INSIDE = ("gradients", "16-bit copies of weights", "open block: saved", "open block: temporary")
MOMENTS = {
    "loss": ("batch", "gradients before", "waiting: loss", "loss"),
    "log-softmax": ("batch", "gradients before", "waiting: loss", "log-softmax"),
    "head": ("batch", "gradients before", "waiting: loss", "head"),
    "last norm": ("batch", "gradients before", "waiting: loss", "last norm"),
    "forward": ("batch: forward", "waiting: forward", "forward"),
    "last block": ("batch", "waiting: last block", "last block"),
    "first block": ("batch", "waiting: first block", "first block"),
    "frozen block": ("batch", "waiting: frozen block", "frozen block"),
    "embedding": ("batch", "gradients", "embedding"),
    "optimizer step": (
        "batch",
        "gradients",
    ),
}
"""What a moment is made of, beside what lives :data:`ALWAYS`."""


def _kernels(shape: Shape) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Which attention runs: by switches, card and mask; and a choice that leads to each."""
    classes, of_kernel = dict[str, str](), dict[str, dict[str, Any]]()
    by = (*ATTENTION, "several", "new", *(["windowed"] if shape.window else []))
    for chosen in combinations(by):
        card = NEW if chosen["new"] else OLD
        switches = {name: value for name, value in chosen.items() if name not in ("new", "windowed")}
        seen = windowed(shape, chosen.get("windowed", False))
        recipe = plain(seen, **switches, peft="lora")
        memory = facts(recipe, seen, card.device)
        timed = work(recipe, seen, card.device)
        name = "/".join([memory.kernel, *(word for word, holds in (
            ("repeated", memory.repeats_keys), ("maskless", memory.maskless),
            ("joined", memory.joins_documents), ("apart", memory.own_positions),
            (timed.kernel, True), ("masked", timed.masked), ("new", shape.experts > 1 and chosen["new"]),
        ) if holds)])  # fmt: skip
        classes[key(chosen.values())] = name
        of_kernel.setdefault(f"{name} {chosen['precision']}", {**switches, "card": card, "shape": seen})
    return {"by": by, "is": classes}, of_kernel


def _blocks(shape: Shape, stored: dict[Any, dict[str, Any]], of_kernel: dict[str, dict[str, Any]], table: Any) -> None:
    """What depends on the attention: the batch with its mask, what blocks keep, and what is open in one."""
    found: dict[str, dict[tuple[Any, ...], Part | None]] = {"batch": {}, "batch: forward": {}}
    by = ("stored", "kernel", "gradient_checkpointing", "activation_offload", "accumulates")
    for number, chosen in enumerate(stored.values()):
        for name, attention in of_kernel.items():
            kernel, _, precision = name.partition(" ")
            if precision != chosen["precision"]:
                continue
            switches = {**attention, **chosen}
            card, seen = switches.pop("card"), switches.pop("shape")
            for checkpointed, offloaded, accumulates in itertools.product((False, True), repeat=3):
                recipe = plain(seen, **switches, gradient_checkpointing=checkpointed, activation_offload=offloaded,
                               accumulates=accumulates)  # fmt: skip
                memory = facts(recipe, seen, card.device)
                where = (number, kernel, checkpointed, offloaded, accumulates)
                found["batch: forward"][number, kernel] = _rows(memory, FIXED[4:], "forward")
                found["batch"][number, kernel, checkpointed] = _rows(memory, FIXED[4:])
                for moment in ("loss", "forward", "last block", "first block", "frozen block"):
                    waits = found.setdefault(f"waiting: {moment}", {})
                    waits[where[:-1]] = _rows(memory, ("saved activations",), moment)
                    if moment != "loss":
                        inside = _rows(memory, INSIDE, moment)
                        found.setdefault(moment, {})[where] = inside and _that_can_be_largest(inside)
    for name, entries in found.items():
        fields = {"batch: forward": by[:2], "batch": by[:3]}.get(name, by[:-1] if name.startswith("waiting") else by)
        table(name, fields, entries.items())


def _rows(memory: StepFacts, names: Iterable[str], moment: str = "optimizer step") -> Part | None:
    """Some rows of a moment, as often as there is such a moment, and once more for each size a row may have."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for one in _moments(memory):
        if one.name == moment:
            rows = [(line.name, line.bytes) for line in one.lines if line.name in names and line.bytes]
            sizes = [_formula(size).polynomials for _, size in rows]
            for chosen in itertools.product(*sizes):
                same = tuple((name, frozenset(size.items())) for (name, _), size in zip(rows, chosen, strict=True))
                if same not in found:
                    found[same] = [(name, Formula([size], 0)) for (name, _), size in zip(rows, chosen, strict=True)]
    return list(found.values()) or None


@lru_cache(1)  # the same estimate is asked for several of its rows
def _moments(memory: StepFacts) -> list[Moment]:
    return moments(memory, every_point=True)


def _formula(size: Any) -> Formula:
    return size if isinstance(size, Formula) else Formula([{"": size}], size)


def _that_can_be_largest(part: Part) -> Part:
    """Those that no other one is at least as large as, whatever batch and length."""
    sums = [_shifted(sum((size for _, size in rows), Formula([{}], 0))) for rows in part]
    stay: list[int] = []
    for i, one in enumerate(sums):
        if not any(_at_least(sums[j], one) for j in stay):
            stay = [j for j in stay if not _at_least(one, sums[j])] + [i]
    return [part[i] for i in sorted(stay)]


def _shifted(size: Formula) -> dict[str, float]:
    """The polynomial in what batch and length have above their least: all of its letters are from 0 on."""
    (polynomial,) = size.polynomials
    found: dict[str, float] = {}
    for name, number in polynomial.items():
        for each, times in _expanded(name).items():
            found[each] = found.get(each, 0) + number * times
    return found


@cache
def _expanded(name: str) -> Polynomial:
    """A product of letters, each as its least plus what is above that."""
    term = Formula([{"": 1}], 0)
    for letter in name:
        term = term * (Formula.letter(letter, 0) + LEAST[letter])
    return term.polynomials[0]


def _at_least(one: dict[str, float], other: dict[str, float]) -> bool:
    return all(one.get(name, 0) >= other.get(name, 0) for name in {**one, **other})


TIMES = {
    "blocks forward": ("precision", "peft", "quantization", "double_quantization", "gradient_checkpointing"),
    "blocks again": ("precision", "peft", "quantization", "double_quantization", "gradient_checkpointing"),
    "blocks backward": ("precision", "peft", "quantization", "double_quantization", "gradient_checkpointing"),
    "unpacking": ("precision", "peft", "quantization", "double_quantization", "gradient_checkpointing"),
    "casts of weights": ("precision", "peft", "quantization", "lean_preparation", "gradient_checkpointing"),
    "adapter": ("precision", "peft", "gradient_checkpointing"),
    "between products": ("precision", "peft", "quantization", "lean_preparation", "gradient_checkpointing", "compile"),
    "head": ("precision", "peft", "gradient_checkpointing", "chunked_loss"),
    "loss": ("precision", "peft", "chunked_loss"),
    "offload": ("precision", "peft", "quantization", "lean_preparation", "gradient_checkpointing",
                "activation_offload", "chunked_loss"),
    "optimizer": ("precision", "peft", "optimizer"),
    "launches": ("precision", "peft", "quantization", "attention", "lean_preparation", "gradient_checkpointing",
                 "compile"),
}  # fmt: skip
"""The parts of a step's time, and the switches that each depends on."""


def times_of(shape: Shape) -> dict[str, Any]:
    """Operations, bytes, bytes over the link and launches of each part of a step."""
    found = {}
    for name, by in TIMES.items():
        table = {}
        for chosen in combinations(by):
            if chosen.get("chunked_loss") and chosen["peft"] in ("none", "head", "prompt_tuning"):
                continue
            table[key(chosen.values())] = _work(shape, name, NEW, **chosen)
        found[name] = {"by": by, "is": table}
    _, of_kernel = _kernels(shape)
    by = ("precision", "peft", "gradient_checkpointing", "kernel")
    table = {}
    for name, attention in of_kernel.items():
        kernel, _, precision = name.partition(" ")
        switches = {field: value for field, value in attention.items() if field != "precision"}
        card, seen = switches.pop("card"), switches.pop("shape")
        for peft, checkpointed in itertools.product(VALUES["peft"], (False, True)):
            chosen = {"precision": precision, "peft": peft, "gradient_checkpointing": checkpointed}
            part = _work(seen, "attention", card, **switches, **chosen)
            table[key((*chosen.values(), kernel))] = part
    return {**found, "attention": {"by": by, "is": table}}


def _work(shape: Shape, name: str, card: Any, **tricks: Any) -> list[Formula]:
    recipe = plain(shape, **tricks, accumulates=True)
    for part in counts(work(recipe, shape, card.device)):
        if part.name == name:
            return [_formula(part.flops), _formula(part.bytes), _formula(part.link), _formula(part.launches)]
    return [_formula(0)] * 4


def refusals() -> list[dict[str, Any]]:
    """Switches that do not go together, on which card, and what is said of it: singles, pairs, threes."""
    usual = {"peft": "lora", "precision": "fp16", "attention": "sdpa"}
    singles = [(name, value) for name, values in VALUES.items() for value in values if value != usual.get(name, False)]
    many = 65_535
    found: list[dict[str, Any]] = []
    for number, (card, several) in itertools.product((1, 2), itertools.product(ONE_CARD, (False, True))):
        for chosen in itertools.combinations(singles, number):
            when = {"card": card, "several": several, **dict(chosen)}
            if len(when) < number + 2:
                continue
            tricks = Recipe().tricks.model_copy(update={**usual, **dict(chosen)})
            recipe = Recipe(tricks=tricks).model_copy(
                update={"train": Recipe().train.model_copy(update={"batch_size": many if several else 1})}
            )
            try:
                resolve(recipe, ONE_CARD[card].device)
            except BadInput as error:
                says = str(error).replace(str(many), "{B}")
                if not any(one["says"] == says and one["when"].items() <= when.items() for one in found):
                    found.append({"when": when, "says": says})
    return _merged(found)


def _merged(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Say once what is said on every card, or for every batch."""
    for field, values in (("several", (False, True)), ("card", tuple(ONE_CARD))):
        merged: list[dict[str, Any]] = []
        for one in found:
            rest = {name: value for name, value in one["when"].items() if name != field}
            same = [other for other in found if other["says"] == one["says"]
                    and {name: value for name, value in other["when"].items() if name != field} == rest]  # fmt: skip
            entry = {"when": rest if len(same) == len(values) else one["when"], "says": one["says"]}
            if entry not in merged:
                merged.append(entry)
        found = merged
    return found


def model(name: str) -> dict[str, Any]:
    """Everything that depends on the model."""
    shape = find_shape(name)
    found = {**bytes_of(shape), "times": times_of(shape)}
    names: dict[str, int] = {}
    formulas: dict[str, int] = {}

    def numbered(value: Any) -> Any:
        """Rows and formulas by their numbers: each is there often."""
        if isinstance(value, Formula):
            (polynomial,) = value.polynomials or [{}]
            return formulas.setdefault(json.dumps(polynomial, sort_keys=True), len(formulas))
        if isinstance(value, dict):
            return {name: numbered(each) for name, each in value.items()}
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Formula):
            return [names.setdefault(value[0], len(names)), numbered(value[1])]
        return [numbered(each) for each in value] if isinstance(value, (list, tuple)) else value

    return {**numbered(found), "names": list(names), "formulas": [json.loads(text) for text in formulas]}


def index() -> dict[str, Any]:
    """Everything that does not: switches, cards, machines, rules."""
    run = recipes.kwanzaa(OLD.device)
    found = estimate(run, find_shape(run.model), OLD.device)
    around = [line for line in found.around if line != found.unused]  # the page computes that one itself
    return {
        "models": {name: _about(find_shape(name)) for name in MODELS},
        "values": VALUES,
        "defaults": Tricks().model_dump(),
        "run": {"model": run.model, "batch": run.train.batch_size, "tokens": run.data.max_length,
                "epochs": run.train.epochs, "rows": len(row_lengths("train"))},
        "lessons": {switch.partition("=")[0]: lesson for switch, lesson in LESSON_OF.items()},
        "install": notebooks.INSTALL,
        "notebook": notebooks.colab_address("17_kwanzaa"),
        "cards": {
            name: {
                "name": gpu.device.name,
                "bytes": gpu.device.memory_bytes,
                "new": gpu.device.capability >= (8, 0),
                "rates": _rates(gpu.card),
                "recipe": recipes.kwanzaa(gpu.device).tricks.model_dump(),
                "capstone": recipes.capstone(gpu.device).tricks.model_dump(),
            }
            for name, gpu in ONE_CARD.items()
        },
        "machines": machines(),
        "prices": PRICES_DATE,
        "margin": trust.MARGIN,
        "reserved": EXPANDABLE._asdict(),
        "says": {"time": trust.TIME, "fits": trust.FITS, "tight": trust.TIGHT, "host": trust.HOST,
                 "context": LONGER_THAN_CONTEXT, "packing": PACKING},
        "around": [[line.name, line.bytes] for line in around],
        "chunk": TOKENS_PER_CHUNK,
        "prompt": Recipe().prompt.tokens,
        "rules": RULES,
        "refused": refusals(),
        "always": ALWAYS,
        "moments": MOMENTS,
    }  # fmt: skip


def _rates(card: Card | None) -> dict[str, Any] | None:
    """Return the rates that a card reaches by the letters of the page; ``None`` if they are not known."""
    if card is None:
        return None
    return {
        "flops": {precision: card.product_rate("products", precision) for precision in VALUES["precision"]},
        "spread": {precision: card.spread(precision) for precision in VALUES["precision"]},
        "memory": card.traffic_rate("between products", "fp16"),
        "link": card.link_rate * card.reached.link,
        "launch": card.reached.launch,
    }


def machines() -> list[dict[str, Any]]:
    """List the rented machines of one card, at the prices that the commands bill by."""
    return [{"name": one.name, "card": one.card, "price": one.price} for one in FLAVORS.values() if one.cards == 1]


def _about(shape: Shape) -> dict[str, Any]:
    """Say what the page shows of a model: its size, context and window, what it refuses, how many weights are experts.

    ``experts`` is their share of "all others".
    """
    dense = sum(d_in * d_out for d_in, d_out in shape.packable.values())
    others = shape.weights - shape.layers * dense
    experts = shape.layers * (shape.block_linear_weights - dense) / others
    return {
        "weights": shape.weights,
        "context": shape.context,
        "window": shape.window,
        "experts": experts,
        "lora": lora_targets(shape),
        "refused": _refused(shape),
    }


def _refused(shape: Shape) -> list[dict[str, Any]]:
    """List the switches that a model refuses, with what is said of them."""
    found = []
    for name, value in (("chunked_loss", True), ("attention", "sdpa"), ("attention", "flash_attention_2")):
        recipe = with_settings(
            Recipe(), ["tricks.peft=lora", "tricks.precision=fp16", f"tricks.{name}={value}", *lora_targets(shape)]
        )
        try:
            refuse(resolve(recipe, NEW.device), facts_of(shape), 1)
        except BadInput as error:
            found.append({"when": {name: value}, "says": str(error)})
    return found


def write(folder: Path = HERE) -> None:
    """Write all files, two models at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    with ProcessPoolExecutor(2) as pool:
        for name, found in zip(MODELS, pool.map(model, MODELS), strict=True):
            _write(folder, name, found)
    _write(folder, "index", index())


def _write(folder: Path, name: str, found: dict[str, Any]) -> None:
    """Write a table as a script: a page that was opened as a file may load scripts, and nothing else, beside it."""
    text = f"fitTables[{json.dumps(name)}]={json.dumps(found, separators=(',', ':'))};\n"
    (folder / f"{name}.js").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
