"""What several strategies ask of a recipe."""

from cria_tricks.common.errors import BadInput
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan


def several(strategy: str, processes: int) -> None:
    """Refuse a single process.

    Raises:
        BadInput: saying how to start more.
    """
    if processes < 2:
        raise BadInput(
            f"parallel.strategy={strategy}: needs two processes or more, and this is one; start it with cria launch "
            f"RECIPE --on torchrun --nproc 2 --set parallel.strategy={strategy}"
        )


def share_window(plan: Plan, recipe: Recipe, shares: int) -> Plan:
    """Give each share of the rows its part of every window of micro-batches, so that a step's rows stay the same.

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
    """A setting that leaves a step's rows as they are, if there is one."""
    all_rows = rows * window
    for smaller in range(min(rows, all_rows // shares), 0, -1):
        if all_rows % (smaller * shares) == 0:
            return f": {all_rows // smaller} with train.batch_size={smaller} keeps the {all_rows} rows of a step"
    return ""


def refuse(recipe: Recipe, field: str, values: tuple[object, ...], why: str) -> None:
    """Refuse a trick beside the strategy.

    Args:
        recipe: what is wanted.
        field: of ``recipe.tricks``.
        values: that do not work.
        why: the reason and what to use, after a colon.

    Raises:
        BadInput: if the trick is on.
    """
    if (value := getattr(recipe.tricks, field)) in values:
        shown = str(value).lower() if isinstance(value, bool) else value
        raise BadInput(f"parallel.strategy={recipe.parallel.strategy} with tricks.{field}={shown}: {why}")
