"""Compute which share of its card's peak rate a run reached: MFU, and HFU.

MFU, model FLOP utilisation, is the number of floating-point operations that the training needs in a second, divided by
the peak rate of the hardware (Chowdhery et al. 2022, PaLM, arXiv 2204.02311, section 4.1 and appendix B). What is
computed a second time to save memory is not needed, so checkpointing lowers MFU. HFU, hardware FLOP utilisation, counts
it too, so it says how busy the arithmetic units were.

Both take the operations from ``bill/step_time.py``. So a frozen weight needs 4 operations a token and a trained one 6,
and causal attention needs half of all token pairs where the kernel leaves the others out; PaLM counts 6 and all pairs.
"""

from dataclasses import dataclass, replace

from cria_tricks.bill import products
from cria_tricks.bill.step import Step
from cria_tricks.bill.step_time import counts
from cria_tricks.hardware.gpus import by_datasheet
from cria_tricks.models.shape import Shape
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.switches import folds


@dataclass(frozen=True)
class Utilisation:
    """What MFU and HFU are computed from.

    Attributes:
        model_flops: floating-point operations that one token needs.
        hardware_flops: the same with what is computed again.
        peak: the peak rate of all cards together, for the precision of the products [operations/s]; ``None`` where no
            datasheet has one.
    """

    model_flops: float
    hardware_flops: float
    peak: float | None

    def mfu(self, tokens_per_second: float) -> float | None:
        """Return the share of the peak that the needed operations took, from 0 to 1; ``None`` without a peak."""
        return None if self.peak is None else self.model_flops * tokens_per_second / self.peak

    def hfu(self, tokens_per_second: float) -> float | None:
        """Return the share of the peak that all operations took, from 0 to 1; ``None`` without a peak."""
        return None if self.peak is None else self.hardware_flops * tokens_per_second / self.peak


def of_run(plan: Plan, recipe: Recipe, shape: Shape, processes: int, tokens: int, trained_share: float) -> Utilisation:
    """Count the operations of a token of a run, and find the peak of its cards.

    Args:
        plan: what runs.
        recipe: the recipe.
        shape: the model's shape.
        processes: how many processes share the run; on GPUs each has one.
        tokens: the mean length of a row [tokens].
        trained_share: which share of the tokens is trained, from 0 to 1.
    """
    step = folds.step_of(recipe, shape, plan.device, tokens, trained_share=trained_share)
    card = by_datasheet(plan.device)
    peak = None
    # strategy=model spreads one model over all cards of the machine from one process, and only one of them computes.
    if card and plan.parallel["strategy"] != "model":
        peak = processes * card.flops(step.precision)
    return Utilisation(model_flops(step), hardware_flops(step), peak)


def hardware_flops(step: Step) -> float:
    """Count the floating-point operations that a step does in its matrix products, for each of its tokens."""
    return sum(part.flops for part in counts(step)) / step.step_tokens


def model_flops(step: Step) -> float:
    """Count the same without what is computed again: the operations that a token needs."""
    # `reaches_embedding` stays: checkpointing asks for that gradient, and it is not computed twice.
    once = replace(step, checkpointed=False, mlp_tile=0, fused_adapters=False)
    return sum(part.flops * _needed(part.name, once) for part in counts(once)) / step.step_tokens


def _needed(name: str, step: Step) -> float:
    """Return which share of a part's operations is computed for the first time, if no block and no MLP is repeated.

    A fused kernel of attention computes seven products: two forward and five backward. One of the five, the scores, it
    computes a second time.
    """
    if name != "attention" or step.kernel not in ("flash", "memory-efficient"):
        return 1.0
    blocks = products.blocks(step)
    return 1 - blocks.attended_back / (2 * blocks.attended + 5 * blocks.attended_back)
