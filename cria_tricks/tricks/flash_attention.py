r"""FlashAttention: exact attention that never holds the T x T matrix.

Saves    attention scores: B H T^2 elements a block -> one running max and sum, B H T          [bytes]
Costs    backward recomputes the scores, tile by tile; still faster, as it moves fewer bytes
Claim    exact within rounding
Needs    sdpa: nothing, torch picks a kernel. flash_attention_2: compute capability 8.0, fp16 or bf16
Breaks   flash_attention_2 on a T4 (7.5); grouped-query heads without a mask there get the slow kernel
Sources  Dao et al. 2022, arXiv:2205.14135, alg. 1; Dao 2023, arXiv:2307.08691, sec. 3
Ours     the switch; torch and flash-attn do the work

Shapes: queries (B, H, T, D/H); keys and values with fewer heads in grouped-query models.
"""

import importlib.util

from cria_tricks.errors import BadInput
from cria_tricks.plan import Plan
from cria_tricks.recipe import Recipe

SWITCHES = ("attention=sdpa", "attention=flash_attention_2")
CLAIM = "exact within rounding"


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Name the attention implementation for ``from_pretrained``."""
    attention = recipe.tricks.attention
    if attention == "flash_attention_2":
        _refuse_flash_attention_2(plan, recipe)
    return plan.with_("model", attn_implementation=attention)


def _refuse_flash_attention_2(plan: Plan, recipe: Recipe) -> None:
    device, instead = plan.device, "use tricks.attention=sdpa"
    if device.kind != "cuda":
        raise BadInput(f"tricks.attention=flash_attention_2: it runs on CUDA cards only; {instead}")
    if device.capability < (8, 0):
        major, minor = device.capability
        raise BadInput(
            "tricks.attention=flash_attention_2: it needs compute capability 8.0, and "
            f"{device.name} has {major}.{minor}; {instead}"
        )
    if recipe.tricks.precision == "fp32":
        raise BadInput(
            "tricks.attention=flash_attention_2: it computes in 16 bits only; set tricks.precision=bf16 or fp16, "
            f"or {instead}"
        )
    if importlib.util.find_spec("flash_attn") is None:
        raise BadInput(
            "tricks.attention=flash_attention_2: the package flash-attn is missing; pip install "
            f"'cria_tricks[flash]', or {instead}"
        )
