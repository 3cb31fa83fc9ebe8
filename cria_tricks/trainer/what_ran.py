"""Say in words what a run trained, over which base and on which rows, for the model card and the report."""

from collections.abc import Mapping
from typing import Any

from cria_tricks.recipe import Recipe

KINDS = {
    "chat": ("chat rows", "loss on the assistant's tokens only"),
    "completion": ("prompt/completion rows", "loss on the completion only"),
    "text": ("plain text", "loss on all tokens but the first of each document"),
}
"""For each kind of rows: what they are called, and which of their tokens have a loss (as ``data/tokens.py`` labels)."""
_QUANTIZED = {"int8": "int8", "nf4": "4-bit NF4", "fp4": "4-bit FP4"}


def in_words(recipe: Recipe, base: str, kinds: Mapping[str, int]) -> str:
    """Say in one sentence what was trained.

    Args:
        recipe: of the run.
        base: the base model's name.
        kinds: how many training rows of each kind became tokens.
    """
    stream = "a stream of " if recipe.data.stream else ""
    return f"{_method(recipe, base)}, trained with cria_tricks on {stream}{rows_in_words(kinds)}."


def rows_in_words(kinds: Mapping[str, int]) -> str:
    """Name the kinds of rows, and which of their tokens have a loss.

    Args:
        kinds: how many rows of each kind; the text gives the numbers if there are several kinds.
    """
    found = [(number, *KINDS[kind]) for kind, number in kinds.items() if number]
    if len(found) == 1:
        [(_, rows, loss)] = found
        return f"{rows}, {loss}"
    return " and ".join(f"{rows} ({number:,}; {loss})" for number, rows, loss in found) or "no row"


def lengthened(entry: Mapping[str, int]) -> str:
    """Explain why a run that was lengthened differs from one that was planned with all its steps.

    Args:
        entry: an entry of the run's history, with ``step`` and ``lengthened_from``, the steps planned before.
    """
    return (
        f"the run was lengthened after step {entry['step']}: its first steps had the learning rates of a run of "
        f"{entry['lengthened_from']} steps, so it differs from a run of this length "
        "(with train.schedule=constant and train.warmup_ratio=0 it would not)"
    )


def stopped_early(entry: Mapping[str, Any], planned: int) -> str:
    """Say that ``train.patience`` has ended a run, and why.

    Args:
        entry: as :class:`~cria_tricks.trainer.stops.Patience` has found it.
        planned: the steps that the run was to have.
    """
    return (
        f"train.patience={entry['patience']} ended the run after step {entry['step']} of {planned}: the last "
        f"{entry['patience']} evaluations were not below the loss {entry['lowest_loss']:.4f} of step "
        f"{entry['lowest_step']}; --resume goes on with a larger train.patience, or with 0"
    )


def best(entry: Mapping[str, Any], lowest: Mapping[str, Any]) -> str:
    """Say which weights ``train.keep_best`` has kept.

    Args:
        entry: ``step`` and ``eval_loss`` of what was kept.
        lowest: the same of the evaluation with the lowest loss. It may not be the one that was kept, because nothing is
            trained before the first step, and because a resumed run may have had ``train.keep_best`` off before.
    """
    said = f"{entry['eval_loss']:.4f} after step {entry['step']}"
    if lowest and lowest["eval_loss"] < entry["eval_loss"]:
        said += f"; step {lowest['step']} had {lowest['eval_loss']:.4f}, and its weights were not kept"
    return said


def tags(recipe: Recipe) -> list[str]:
    """Return the hub's tags for the training method; ``qlora`` is LoRA, and not DoRA, over a base in 4 bits."""
    peft = recipe.tricks.peft
    lora = recipe.lora
    if peft != "lora":
        return [{"none": "full-fine-tuning", "head": "head-only"}.get(peft, peft.replace("_", "-"))]
    variants = [name for name in ("dora", "rslora") if getattr(lora, name)]
    four_bits = recipe.tricks.quantization in ("nf4", "fp4")
    return ["lora", *variants, *(["qlora"] if four_bits and not lora.dora else [])]


def adapter(recipe: Recipe) -> str:
    """Name what was trained, with its article, e.g. ``a LoRA adapter``."""
    lora = recipe.lora
    scaled = "rank-stabilised " * lora.rslora
    return {
        "lora": f"a {scaled}{'DoRA' if lora.dora else 'LoRA'} adapter",
        "head": "a trained head",
        "prompt_tuning": "a learnt prompt",
        "side_network": "a side network",
        "none": "a fully fine-tuned model",
    }[recipe.tricks.peft]


def quantized(recipe: Recipe) -> str:
    """Say how the base's matrices were quantised, e.g. ``4-bit NF4``; empty if they were not."""
    tricks = recipe.tricks
    if tricks.quantization == "none":
        return ""
    twice = tricks.double_quantization and tricks.quantization != "int8"
    return _QUANTIZED[tricks.quantization] + " with double quantization" * twice


def _method(recipe: Recipe, base: str) -> str:
    if recipe.tricks.peft == "none":
        return f"`{base}`, all weights fine-tuned"
    over = f", whose matrices were quantised to {quantized(recipe)}" if quantized(recipe) else ""
    what = adapter(recipe)
    return f"{what[0].upper()}{what[1:]} for `{base}`{over}"
