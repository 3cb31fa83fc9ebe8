"""Run a recipe on the tiny model in one call, and stop it where a test wants."""

import os
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from cria_tricks.load.model import Loaded, load, refuse_unfit
from cria_tricks.models import Weights
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.step_plan import Plan
from cria_tricks.store.checkpoints import Checkpoints
from cria_tricks.trainer.fit import Run, fit, training

SMALL_LORA = ("lora.r=16",)


def tiny_llama(folder: Path) -> Path:
    """Save a two-layer Llama in a folder: wide enough that bitsandbytes quantises its optimizer states."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def prepare(folder: Path, *settings: str, processes: int = 1) -> tuple[Recipe, Plan, Loaded]:
    """Resolve settings for a model folder, check and load it, the same way each time."""
    recipe = with_settings(Recipe(model=str(folder)), settings)
    plan = resolve(recipe, processes=processes)
    weights = Weights(str(folder), str(folder), None)
    refuse_unfit(plan, weights)
    torch.manual_seed(0)
    return recipe, plan, load(plan, weights)


def train(folder: Path, rows, out: Path, *settings: str, eval_rows=(), resume=False, **options) -> tuple[Run, Loaded]:
    """Train the model in a folder on token rows."""
    recipe, plan, loaded = prepare(folder, *settings)
    checkpoints = Checkpoints(out)
    start = checkpoints.newest() if resume else None
    options = {"pad_id": 2, "start": start, **options}
    return fit(training(loaded, plan, recipe.train, rows, eval_rows, checkpoints, **options)), loaded


def trained_weights(loaded: Loaded) -> dict[str, torch.Tensor]:
    """A copy of all weights that train."""
    return {name: p.detach().clone() for name, p in loaded.model.named_parameters() if p.requires_grad}


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The difference's length, over the expected one's."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


class At(TrainerCallback):
    """Does something before the optimizer takes a step."""

    def __init__(self, step: int, act):
        self.step, self.act = step, act

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            self.act()


class Killed(BaseException):
    """Stands for SIGKILL inside one process: nobody catches it, and nothing is saved any more."""


def kill():
    raise Killed


def send(number: int):
    return lambda: os.kill(os.getpid(), number)
