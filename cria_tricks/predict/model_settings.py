"""Find the settings without which a recipe does not fit another model, so that any known model can be planned.

The recipes were written for models like Llama. Phi-3 has joined matrices with other names, LoRA does not reach the
experts of a mixture, a head that does more than one product has no chunked loss, and attention whose scores are capped
has no fused kernel.
"""

from collections.abc import Iterable

from cria_tricks.common.errors import BadInput
from cria_tricks.models.shape import Shape
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.settings import Lora


def lora_targets(shape: Shape) -> list[str]:
    """Return the setting that LoRA needs on a model that lacks some of the default matrices; empty if it has all."""
    names = tuple(shape.packable)
    return [] if set(names) == set(Lora().target_modules) else [f"lora.target_modules={','.join(names)}"]


def needed(recipe: Recipe, shape: Shape, given: Iterable[str] = ()) -> list[str]:
    """Return the settings that a recipe needs for a model, written as for ``--set``.

    Args:
        recipe: the recipe.
        shape: the model's shape.
        given: settings that the user chose. They are not changed, so a wrong one is refused later.
    """
    chosen = [setting.partition("=")[0] for setting in given]
    found = []
    if recipe.tricks.peft == "lora" and recipe.lora.target_modules == Lora().target_modules:
        found += lora_targets(shape)
    if recipe.tricks.chunked_loss and shape.beside_head:
        found.append("tricks.chunked_loss=false")
    if recipe.tricks.attention != "eager" and shape.caps_scores:
        found.append("tricks.attention=eager")
        on = [name for name in ("expand_kv", "keep_attention") if getattr(recipe.tricks, name)]
        found += [f"tricks.{name}=false" for name in on]  # both act on the fused kernel
    return [setting for setting in found if not any(_same(setting.partition("=")[0], name) for name in chosen)]


def refuse_other_storage(shape: Shape, recipe: Recipe) -> None:
    """Refuse to plan weights that are quantised already as if they were stored otherwise.

    Raises:
        BadInput: with the settings that say how they are stored.
    """
    # An unquantised model asks for nothing. Its rows may be shorter than a recipe may ask for.
    if shape.stored_by and with_settings(recipe, shape.stored_by) != recipe:
        options = " ".join(f"--set {setting}" for setting in shape.stored_by)
        raise BadInput(f"model {shape.name}: its weights are quantised already; plan it with {options}")


def warning(model: str, settings: Iterable[str]) -> list[str]:
    """Say which settings were added for a model; an empty list if none was."""
    options = " ".join(f"--set {setting}" for setting in settings)
    return [f"{model} needs other settings than this recipe has, so it is taken with {options}"] if options else []


def _same(field: str, name: str) -> bool:
    """Whether a name that the user wrote means a field: its path, or the last part of it."""
    return name.strip() == field or field.endswith(f".{name.strip()}")
