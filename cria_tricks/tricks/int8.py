r"""LLM.int8(): frozen weights in one byte, columns with outliers computed in 16 bits.

Saves    frozen linear weights: 4 or 2 bytes -> 1 byte an element                    [bytes]
Costs    quantising activations on the fly, in every product
Claim    approximate: error bounded per row by absmax / 127 outside the outlier columns
Needs    CUDA of compute capability 7.5 (a T4 has it), or a CPU; something else to train (peft)
Breaks   training the quantised weights themselves: they have no gradient
Sources  Dettmers et al. 2022, arXiv:2208.07339, sec. 3 (vector-wise quantisation, threshold 6.0)
Ours     the switch; bitsandbytes does the work

Shapes: weights (D_out, D_in) with one fp32 scale per output row.
"""

from cria_tricks.plan import Plan
from cria_tricks.recipe import Recipe
from cria_tricks.tricks.nf4 import refuse_without_adapter

SWITCHES = ("quantization=int8",)
CLAIM = "approximate"


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Ask bitsandbytes for 8-bit linears; the embedding and the head stay as they are."""
    if recipe.tricks.quantization != "int8":
        return plan
    refuse_without_adapter(recipe)
    if recipe.tricks.precision == "bf16" and plan.device.kind == "cuda":
        plan = plan.warn("quantization=int8 computes its outlier columns in fp16, also with precision=bf16")
    return plan.with_("quantization", load_in_8bit=True).then("prepare_for_kbit_training")
