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
Ours     one edit of the loaded model left out (``load/adapters.py``), and one added, which is below

Shapes: embedding (V, D); an adapter's input (B, T, D_in).
"""

from typing import Any

from cria_tricks.step_plan import Plan

REFERENCE = ("leave_inputs_uncast",)
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


def leave_inputs_uncast(model: Any, plan: Plan | None = None) -> Any:
    """Have peft leave the inputs of adapters in 16 bits, in place, and return the model.

    peft casts the wide input of each adapter up to fp32, the dtype of the adapter's thin matrices. Under autocast that
    is needless: the product runs in 16 bits, and autocast casts the thin matrices down for it.
    """
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False
    return model
