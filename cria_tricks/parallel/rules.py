"""Refuse recipes that do not fit a parallel strategy: the rules that several strategies share."""

from cria_tricks.common.errors import BadInput
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan


def several(strategy: str, processes: int) -> None:
    """Refuse a run of a single process.

    Raises:
        BadInput: says how to start several.
    """
    if processes < 2:
        raise BadInput(
            f"parallel.strategy={strategy}: needs two processes or more, and this is one; start it with cria launch "
            f"RECIPE --on torchrun --nproc 2 --set parallel.strategy={strategy}"
        )


def share_window(plan: Plan, recipe: Recipe, shares: int) -> Plan:
    """Divide the micro-batches of each accumulation window, so that an optimizer step still trains on the same rows.

    Args:
        plan: the plan for one process; its accumulation steps are divided.
        recipe: the recipe; ``tricks.gradient_accumulation`` is the window of all processes together.
        shares: the number of data-parallel ranks.

    Raises:
        BadInput: if the window cannot be divided evenly.
    """
    window = recipe.tricks.gradient_accumulation
    rows = recipe.train.batch_size
    if window % shares:
        raise BadInput(
            f"parallel.strategy={recipe.parallel.strategy}: {shares} processes cannot share the "
            f"{window} micro-batches of a step evenly; "
            f"set tricks.gradient_accumulation to a multiple of {shares}{_same_step(rows, window, shares)}"
        )
    return plan.refine("training", gradient_accumulation_steps=window // shares)


def _same_step(rows: int, window: int, shares: int) -> str:
    """Suggest settings with as many rows in a step, for a message; empty if a step has too few rows for all shares."""
    all_rows = rows * window
    for smaller in range(min(rows, all_rows // shares), 0, -1):
        if all_rows % (smaller * shares) == 0:
            return f": {all_rows // smaller} with train.batch_size={smaller} keeps the {all_rows} rows of a step"
    return ""


def refuse(recipe: Recipe, field: str, values: tuple[object, ...], why: str) -> None:
    """Refuse a technique that does not work together with the strategy.

    Args:
        recipe: the recipe to check.
        field: a field of ``recipe.tricks``.
        values: the values of this field that do not work.
        why: the reason and what to use instead, as the end of the message.

    Raises:
        BadInput: if the field has one of these values.
    """
    if (value := getattr(recipe.tricks, field)) in values:
        shown = str(value).lower() if isinstance(value, bool) else value
        raise BadInput(f"parallel.strategy={recipe.parallel.strategy} with tricks.{field}={shown}: {why}")
