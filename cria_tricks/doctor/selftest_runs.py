"""Make tiny models, rows and training runs for the selftest, which take a second and need no network."""

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
"""``input_ids`` and ``labels`` of one row."""
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A chat template as most models have it: nothing in it marks which tokens are the assistant's."""


def make(folder: Path, **changes: Any) -> Weights:
    """Write a model with the shape of ``random:tiny``, and a tokenizer of single bytes with a chat template.

    Args:
        folder: an existing folder to write into.
        **changes: fields of the model's config to change, such as a smaller ``vocab_size``.

    Returns:
        The place of the model, for :func:`cria_tricks.load.model.load`. Its ``path`` is for plain ``from_pretrained``.
    """
    with torch.random.fork_rng(devices=[]):  # gives the caller its random state back; no GPU draws numbers here
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS["tiny"] | changes))
    model.to(torch.bfloat16).save_pretrained(folder)
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    text = Tokenizer(BPE(letters, []))  # no merges, so every byte is a token of its own
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
        lengths: for each row its length, and how many of its first tokens are not trained (tokens).
    """
    draw = torch.Generator().manual_seed(0)
    made = []
    for length, prompt in lengths:
        ids = torch.randint(1, 256, (length,), generator=draw).tolist()  # 0 is the padding id, see fitted
        made.append({"input_ids": ids, "labels": [IGNORED] * prompt + ids[prompt:]})
    return made


class _Gradient(TrainerCallback):
    """Keep the gradients of all trained weights before each step, as one vector; zeros for a weight that has none.

    Attributes:
        found: the vector of the last step, float64, on the CPU.
    """

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        gradients = []
        for weight in model.parameters():
            if weight.requires_grad:
                gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
                gradients.append(gradient.flatten().double().cpu())
        self.found = torch.cat(gradients)


class Poison(TrainerCallback):
    """Make a frozen matrix NaN after the first step, and record whether the log would hide that.

    Attributes:
        filtered: whether ``logging_nan_inf_filter`` is on.
    """

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
    """Train LoRA for one step, or for as many as the settings say, from the same initial adapter every time.

    The settings change the recipe, such as ``"train.max_steps=4"``. Without ``eval_rows`` the run is never evaluated.

    Returns:
        The run, and the model that it has trained.
    """
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
    """Train as :func:`fitted` does, and return the gradient of the last step, as one vector."""
    kept = _Gradient()
    # The limit of the gradient's norm is so high that nothing is clipped.
    fitted(weights, rows, "train.max_grad_norm=1e9", *settings, eval_rows=eval_rows, callbacks=[kept])
    return kept.found


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the relative difference of two gradients: the norm of their difference over the norm of the first.

    It is NaN if both are zero, so that a check without any gradient does not pass.
    """
    return ((one - other).norm() / one.norm()).item()


def token_mean(model: Any, rows: Sequence[TokenRow]) -> float:
    """Compute the mean loss of all trained tokens [nats] by its definition: row by row, without batches, in float64."""
    losses = []
    for row in rows:
        ids, labels = (torch.tensor(row[name], device=model.device) for name in ("input_ids", "labels"))
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1].double()  # position t predicts token t + 1
        losses.append(torch.nn.functional.cross_entropy(logits, labels[1:], reduction="none")[labels[1:] != IGNORED])
    return torch.cat(losses).mean().item()
