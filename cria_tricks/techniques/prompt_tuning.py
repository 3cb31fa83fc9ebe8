r"""Prompt tuning: learn a few input vectors, and nothing else.

Saves    gradients and optimizer states of all but P x D numbers                     [bytes]
Costs    P more positions in every row, in training and in every answer
Claim    reparametrised: the model is frozen, and P learnt vectors stand before each row. They begin as random numbers,
         so its outputs differ from the base's already at step 0
Needs    rows that are not packed: peft drops the position ids that keep the documents of a packed row apart, so they
         would see each other
Breaks   small models, which learn little from a prompt (Lester et al., fig. 1); chunked_loss, which calls the model
         below peft's prompt
Sources  Lester et al. 2021, arXiv:2104.08691, sec. 2 (the prompt), sec. 3 (its length)
Ours     with_prompt, as a reference only: it puts the vectors in front of the embedded tokens. A run uses peft, which
         does the same, keeps and saves the vectors, and extends masks and labels

Shapes: prompt (P, D) before embedded tokens (B, T, D); a row has P + T positions.
"""

import torch

REFERENCE = ("with_prompt",)
PLAIN = """
from peft import PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=16)
model = get_peft_model(
    AutoModelForCausalLM.from_pretrained(base, dtype="float32"), config
)
"""


def with_prompt(prompt_PD: torch.Tensor, embedded_BTD: torch.Tensor) -> torch.Tensor:
    """Put the learnt vectors in front of every row.

    Args:
        prompt_PD: the prompt, shape (P, D), trained in fp32.
        embedded_BTD: embedded tokens, shape (B, T, D), any float dtype.

    Returns:
        Shape (B, P + T, D), of the tokens' dtype. The first P positions have no label, because no token stands there.
    """
    prompt_BPD = prompt_PD.to(embedded_BTD.dtype).expand(len(embedded_BTD), -1, -1)
    return torch.cat([prompt_BPD, embedded_BTD], dim=1)
