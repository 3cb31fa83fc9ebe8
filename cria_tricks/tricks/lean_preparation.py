r"""Lean preparation: leave out the fp32 copies that peft's usual preparation makes.

Saves    2 V D bytes, because the embedding is not cast to fp32 (501 MiB for Llama-3.2-1B), and as many again, because
         no 16-bit copy of an fp32 head is made; half of the saved block inputs, 2 B T D bytes each; the fp32 copies of
         adapters' inputs, where peft makes them                                                           [bytes]
Costs    rounding: the residual stream, and what lies between products, are in 16 bits
Claim    approximate: a sum in the residual stream is off by up to half a step of its 16-bit format; to leave out the
         casts of the adapters' inputs changes no bit, but with dropout the scaled inputs are rounded
Needs    precision fp16 or bf16, and peft = lora; without 16-bit arithmetic there is nothing to save
Breaks   in fp16, models that were trained in bf16 and whose residual stream exceeds 65504, the largest fp16 number; the
         usual preparation keeps that stream in fp32
Sources  peft ``prepare_model_for_kbit_training`` and ``cast_input_dtype_enabled`` (peft 0.21 source)
Ours     one edit of the loaded model left out and one added; both are in ``load/model.py``

Shapes: embedding (V, D); an adapter's input (B, T, D_in).
"""

from dataclasses import replace

from cria_tricks.bill.step import Step
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan

SWITCHES = ("lean_preparation=true",)
CLAIM = "approximate"
LESSON = "mixed_precision"
REFERENCE = ("switch_on",)
PLAIN = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, TrainingArguments

# No prepare_model_for_kbit_training. On a T4: dtype="float16" and fp16=True.
model = AutoModelForCausalLM.from_pretrained(base, dtype="bfloat16")
model = get_peft_model(
    model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
)
for module in model.modules():
    if hasattr(module, "cast_input_dtype_enabled"):
        module.cast_input_dtype_enabled = False
arguments = TrainingArguments(
    "plain", max_steps=1, bf16=True, use_cpu=not torch.cuda.is_available()
)
"""


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Leave out the usual casts to fp32, and let adapters take their inputs without a cast."""
    tricks = recipe.tricks
    if not tricks.lean_preparation:
        return plan
    if tricks.precision == "fp32" or tricks.peft != "lora":
        return plan.warn(
            "lean_preparation has no effect: it avoids fp32 copies around LoRA in 16-bit arithmetic, and "
            f"precision is {tricks.precision}, peft {tricks.peft}"
        )
    return plan.without("prepare_for_kbit_training").then("adapter_inputs_uncast")


def bill(step: Step, recipe: Recipe) -> Step:
    """Bill 16 bits for what is usually fp32.

    That is the weights beside the matrices, hidden states, adapters' inputs, and products of quantised matrices, which
    come back in the dtype of their input. Less is moved between products, and adapters cast no input.
    """
    if not recipe.tricks.lean_preparation or recipe.tricks.precision == "fp32" or recipe.tricks.peft != "lora":
        return step
    return replace(step, other_weight_itemsize=2, hidden_itemsize=2, product_itemsize=2, adapter_input_itemsize=2)
