"""Tiny models, rows and runs for the selftest: they take a second and need no network."""

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from cria_tricks.data.tokens import IGNORED
from cria_tricks.load.model import Loaded, load
from cria_tricks.models import Weights
from cria_tricks.models.catalogue import CONFIGS
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.store.checkpoints import Checkpoints
from cria_tricks.trainer.fit import Run, fit

TokenRow = dict[str, list[int]]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A template as most models have it: nothing in it says which tokens are the assistant's."""


def make(folder: Path, **changes: Any) -> Weights:
    """Write a model of ``random:tiny``'s shape, and a tokenizer of single bytes with a chat template.

    Args:
        folder: the folder to write into; it exists.
        **changes: fields of its config that are to differ, such as a smaller ``vocab_size``.

    Returns:
        The weights that :func:`cria_tricks.load.model.load` and plain ``from_pretrained`` take.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS["tiny"] | changes))
    model.to(torch.bfloat16).save_pretrained(folder)
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    text = Tokenizer(BPE(letters, []))
    text.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=text, bos_token="<|im_start|>", eos_token="<|im_end|>", chat_template=CHATML
    )
    tokenizer.save_pretrained(folder)
    return Weights("random:tiny", str(folder), str(folder))


def random_rows(*lengths: tuple[int, int]) -> list[TokenRow]:
    """Make rows of random bytes, the same ones every time.

    Args:
        lengths: the length of each row, and how many of its tokens, from the first on, are not trained.
    """
    draw = torch.Generator().manual_seed(0)
    made = []
    for length, prompt in lengths:
        ids = torch.randint(1, 256, (length,), generator=draw).tolist()
        made.append({"input_ids": ids, "labels": [IGNORED] * prompt + ids[prompt:]})
    return made


class _Gradient(TrainerCallback):
    """Keeps the gradient of the step, all in one vector; a weight without a gradient has zeros."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        gradients = []
        for weight in model.parameters():
            if weight.requires_grad:
                gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
                gradients.append(gradient.flatten().double().cpu())
        self.found = torch.cat(gradients)


class Poison(TrainerCallback):
    """Makes a frozen matrix NaN after the first step, and notes whether the log would hide it."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.filtered = args.logging_nan_inf_filter
        if state.global_step == 1:
            next(p for p in model.parameters() if not p.requires_grad).data.fill_(math.nan)


def fitted(
    weights: Weights,
    rows: Sequence[TokenRow],
    *settings: str,
    eval_rows: Sequence[TokenRow] = (),
    callbacks: Sequence[TrainerCallback] = (),
) -> tuple[Run, Loaded]:
    """Train LoRA for a step, or as many as the settings say, from the same adapter every time."""
    usual = ("tricks.peft=lora", "lora.r=4", "tricks.attention=sdpa", "train.max_steps=1", "train.warmup_ratio=0")
    recipe = with_settings(Recipe(), [*usual, *settings])
    plan = resolve(recipe)
    torch.manual_seed(0)
    loaded = load(plan, weights)
    with tempfile.TemporaryDirectory() as folder:
        job = (loaded, plan, recipe.train, rows, eval_rows, Checkpoints(Path(folder)))
        return fit(*job, pad_id=0, callbacks=callbacks), loaded


def gradient_of(
    weights: Weights, rows: Sequence[TokenRow], *settings: str, eval_rows: Sequence[TokenRow] = ()
) -> torch.Tensor:
    """Train as :func:`fitted` does, and return the gradient of the last step."""
    kept = _Gradient()
    fitted(weights, rows, "train.max_grad_norm=1e9", *settings, eval_rows=eval_rows, callbacks=[kept])
    return kept.found


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Compute the length of the difference over that of the first [ratio]; NaN where there is none to compare."""
    return ((one - other).norm() / one.norm()).item()


def token_mean(model: Any, rows: Sequence[TokenRow]) -> float:
    """Compute the loss by its definition: row by row, every trained token counts once, in float64."""
    losses = []
    for row in rows:
        ids, labels = (torch.tensor(row[name], device=model.device) for name in ("input_ids", "labels"))
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1].double()
        losses.append(torch.nn.functional.cross_entropy(logits, labels[1:], reduction="none")[labels[1:] != IGNORED])
    return torch.cat(losses).mean().item()
